"""What `gru_ref.cli.main` does for every command: one line and an exit code, whatever happens."""

import subprocess
import sys

import numpy as np
import pytest

import gru_ref
from gru_ref import cli
from gru_ref.checkpoint.find import checkpoints_of


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step on token ids of an unknown vocabulary."""
    folder = tmp_path_factory.mktemp("main")
    np.tile(np.arange(20, dtype="<u2"), 20).tofile(folder / "ids.bin")
    options = {
        "data.files": (str(folder / "ids.bin"),),
        "data.tokenizer": "ids",
        "model.hidden": 4,
        "model.embedding": 0,
        "run.threads": 1,
        "train.steps": 1,
        "train.seq_len": 8,
        "train.batch_size": 2,
    }
    gru_ref.train(gru_ref.load_config(options=options), folder / "run")
    return folder / "run"


def call(arguments: str, **options: object) -> tuple[int, str]:
    command = f"exec {sys.executable} -m gru_ref.cli {arguments}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stderr


def test_a_full_disk_under_the_output_is_one_line(run):
    assert call(f"sample {run} --prompt '5 17' -n 9 >/dev/full") == (
        1,
        "gru-ref: error: output: No space left on device\n",
    )


def test_closed_standard_streams_are_no_fault_of_ours(run):
    assert call(f"sample {run} --prompt-file - -n 3 <&-")[0] == 2  # no id to start from
    assert call(f"sample {run} --prompt 3 -n 3 >&-") == (0, "")


def test_a_run_on_raw_ids_trains_samples_and_has_no_bits_per_byte(run):
    assert [path.name for path in checkpoints_of(run)] == ["step-00000000.h5", "step-00000001.h5"]
    sample = (run / "samples.jsonl").read_text().splitlines()[-1]
    assert '"text": "' in sample
    assert '"bpb": null' in (run / "metrics.jsonl").read_text()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "--help"]])
def test_help_is_not_an_error_line(arguments, capsys):
    assert cli.run(arguments) == (0 if arguments else 2)
    shown = capsys.readouterr()
    assert "Usage: gru-ref" in shown.out + shown.err
    assert "error" not in shown.err


def test_every_file_of_the_folder_is_a_command_with_help(capsys):
    for name in cli.cli.list_commands(None):
        assert cli.run([name, "--help"]) == 0
        assert f"Usage: gru-ref {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["train", "book.txt"], "book.txt: a configuration ends in .toml; text goes with --data"),
        (["train", "--data", ""], "data.files and data.val_files: an empty name is no file"),
    ],
)
def test_a_slip_of_the_hand_gets_one_line_that_helps(arguments, line, capsys):
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err == f"gru-ref: error: {line}\n"


def test_a_key_outside_its_table_and_a_byte_order_mark_in_toml(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("\ufeffsteps = 3\n")
    assert cli.run(["train", str(tmp_path / "a.toml")]) == 2
    assert "'steps' belongs in a table; write train.steps" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["import gru_ref", "from gru_ref import cli; cli.run(['--help'])"])
def test_help_and_the_bare_import_load_nothing_that_takes_long(what):
    """They must be there in 0.15 s: of others' packages click only, and of Python's own none of the large."""
    slow = "numpy numba h5py rich psutil threadpoolctl matplotlib tokenizers asyncio concurrent.futures "
    slow += "dataclasses difflib multiprocessing pathlib subprocess tomllib"
    code = f"""
import sys
before = set(sys.modules)  # an editable installation brings some
{what}
sys.exit(' '.join(sorted({set(slow.split())} & (sys.modules.keys() - before))) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
