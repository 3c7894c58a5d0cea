"""`gru-ref verify` as a user meets it: exit codes, the table, the verdict, --json and --quiet."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from test_checkpoint import BIAS, WEIGHT, make

from gru_ref.checkpoint import save_checkpoint, verify_checkpoint
from gru_ref.cli.verify import _print, command
from gru_ref.errors import CheckpointError, UsageError

VERDICT = "ok: step {}, 164 parameters, {} tensors, md5 and values verified\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the checkpoints of steps 0 and 3."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for step in (3, 0):
        save_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{step:08d}.h5", make(step))
    return tmp_path / "run"


def verify(*arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def damage(path: Path) -> None:
    """Flip one bit of a weight."""
    content = bytearray(path.read_bytes())
    content[content.find(make(3).model["gru.0.weight_hh"].tobytes())] ^= 1
    path.write_bytes(content)


def test_a_run_directory_means_all_its_checkpoints_in_order(run: Path) -> None:
    result = verify(run)
    assert result.exit_code == 0
    first, second = result.stdout.index("step-00000000.h5"), result.stdout.index("step-00000003.h5")
    assert (
        first
        < result.stdout.index(VERDICT.format(0, 7))
        < second
        < result.stdout.index(VERDICT.format(3, 21))
    )
    assert result.stderr == ""


def test_a_pipe_gets_one_whole_line_a_tensor_and_no_control_characters(run: Path) -> None:
    """L04."""
    file = run / "checkpoints" / "step-00000003.h5"
    output = verify(file).stdout
    assert all(c.isprintable() or c == "\n" for c in output)
    assert output.startswith(f"{file}\n")
    lines = output.splitlines()
    for tensor in verify_checkpoint(file).tensors:
        (line,) = [line for line in lines if f" {tensor.name} " in line]
        for cell in (
            "x".join(map(str, tensor.shape)),
            "float32",
            "ok",
            f"{tensor.mean:.4g}",
            f"{tensor.std:.4g}",
        ):
            assert f" {cell} " in line


@pytest.mark.parametrize("width", [1, 40, 80, 300])
def test_a_terminal_of_any_width_shows_every_figure(run: Path, width: int) -> None:
    report = verify_checkpoint(run / "checkpoints" / "step-00000003.h5")
    console = Console(file=io.StringIO(), force_terminal=True, width=width, soft_wrap=True, color_system=None)
    _print(console, report)
    text = console.file.getvalue()
    for tensor in report.tensors:
        assert tensor.name in text
        assert f"{tensor.mean:.4g}" in text
    assert VERDICT.format(3, 21) in text


def test_damage_ends_with_1_and_names_file_and_dataset(run: Path) -> None:
    bad = run / "checkpoints" / "step-00000003.h5"
    damage(bad)
    result = verify(run)
    assert isinstance(result.exception, CheckpointError)  # main makes one line and exit code 1 of it
    assert result.exception.exit_code == 1
    assert str(result.exception).startswith(f"{bad}: {WEIGHT}: md5 ")
    assert "(2 problems in all)" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert VERDICT.format(0, 7) in result.stdout
    assert result.stdout.endswith("FAILED: 2 problems\n")  # the dataset, and the file against its sidecar
    assert f"problem {WEIGHT}: md5 " in result.stdout


def test_quiet_prints_problems_only(run: Path) -> None:
    assert verify("--quiet", run).stdout == ""
    bad = run / "checkpoints" / "step-00000003.h5"
    damage(bad)
    bad.with_name(bad.name + ".md5").unlink()
    result = verify("--quiet", run)
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{bad}: {WEIGHT}: md5 ")
    assert isinstance(result.exception, CheckpointError)


def test_json_is_one_list_with_one_object_a_file(run: Path) -> None:
    damage(run / "checkpoints" / "step-00000003.h5")
    result = verify("--json", run, "/dev/null")
    assert isinstance(result.exception, CheckpointError)
    reports = json.loads(result.stdout)
    assert [(report["ok"], report["step"]) for report in reports] == [(True, 0), (False, 3), (False, None)]
    tensors = {tensor["name"]: tensor for tensor in reports[1]["tensors"]}
    assert (tensors[WEIGHT]["md5_ok"], tensors[BIAS]["md5_ok"]) == (False, True)
    assert tensors[BIAS]["shape"] == [7]


@pytest.mark.parametrize("name", ["/dev/null", "text.h5", "[red]x.h5"])
def test_junk_fails_with_1(tmp_path: Path, name: str) -> None:
    """C01."""
    path = tmp_path / name
    if not path.exists():
        path.write_text("hello")
    result = verify(path)
    assert isinstance(result.exception, CheckpointError)
    assert str(result.exception).startswith(f"{path}: not a ")
    assert result.stdout.startswith(f"{path}\nproblem not a ")
    assert result.stdout.endswith("FAILED: 1 problem\n")


def test_wrong_usage_ends_with_2_before_anything_is_verified(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for wrong, words in (
        (tmp_path, "not a run"),
        (tmp_path / "empty", "not a run"),
        (tmp_path / "no", "no such"),
    ):
        result = verify(run, wrong)
        assert isinstance(result.exception, UsageError)
        assert result.exception.exit_code == 2
        assert str(result.exception).startswith(f"{wrong}: {words}")
        assert result.stdout == ""
    assert isinstance(verify("--json", "--quiet", run).exception, UsageError)
    assert verify().exit_code == 2
