"""`gru-ref plan` as a person meets it, and docs/plan.md, whose commands must print what it shows."""

import json
import re
import shlex
from pathlib import Path

import pytest

from gru_ref import cli, plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan.md"
GRU_RUN = ["plan", "--preset", "gru-l3-v3a", "--device", "l40s"]


@pytest.fixture
def call(capfd):
    def run(*args):
        code = cli.run([str(arg) for arg in args])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    monkeypatch.setattr(plan.measure_here, "__defaults__", (0.01,))


def test_the_page_shows_what_its_commands_print(call):
    blocks = re.findall(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert blocks
    for command, shown in blocks:
        code, out, err = call(*shlex.split(command)[1:])
        assert (code, err) == (0, "")
        assert out.rstrip() == shown.rstrip()


def test_the_page_has_every_gpu():
    rows = re.findall(r"^\| ([a-z0-9-]*\d[a-z0-9-]*) \|(.*) \|$", PAGE.read_text("utf-8"), re.M)
    table = {name: [cell.strip().replace(",", "") for cell in cells.split("|")] for name, cells in rows}
    assert table == {
        gpu.name.lower(): [f"{gpu.memory:g}", f"{gpu.bandwidth:g}"]
        + [f"{gpu.peak[p]:g}" if p in gpu.peak else "" for p in ("fp32", "tf32", "fp16", "bf16")]
        for gpu in plan.DEVICES
    }


def test_the_arithmetic_of_the_page_adds_up():
    """The list of buffers, and what is left of 26.4 GB."""
    rows = re.findall(r"^\| [^|]*[a-z][^|]* \| ?([\d.]*) \| ([\d.]+) \|$", PAGE.read_text("utf-8"), re.M)
    *parts, (arrays, gigabytes) = [(float(a or 0), float(b)) for a, b in rows]
    assert sum(part[0] for part in parts) == pytest.approx(arrays)
    assert sum(part[1] for part in parts) == pytest.approx(gigabytes, abs=0.015)
    array = 1024 * 128 * 2048 * 4 / 1e9
    exact = 23 * array + 2 * 100 / 2048 * array + 16 * 75_944_036 / 1e9
    assert exact == pytest.approx(gigabytes, abs=0.005)
    assert f"{26.4 - exact:.2f} GB" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "args",
    [
        "--preset gru-l3-v3a --device h100-pcie --precision bf16 --measured-memory 1GiB",
        "--preset gpt2-124m --device a100-80gb --price-per-hour 1.5 --tokens 10000000000",
        "--measured-tokens-per-second 5e4",
    ],
)
def test_no_line_is_wider_than_a_terminal_and_the_json_is_valid(call, args):
    code, out, err = call("plan", *args.split())
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = call("plan", *args.split(), "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out, parse_constant=pytest.fail)
    assert figures["total_bytes"] == sum(figures["bytes"].values())
    assert figures["total_flops_per_token"] == sum(figures["flops_per_token"].values())
    assert figures["run"]["seconds"] == pytest.approx(
        figures["run"]["steps"] * figures["speed"]["seconds_per_step"]
    )


def test_the_laptop_of_the_write_up_needs_segments(call):
    code, out, _ = call("plan", "--preset", "gru-l3-v3a", "--device", "rtx-3080-laptop")
    assert code == 0
    assert re.search(r"^  does not fit: K=8 or batch \d+ would$", out, re.M)


def test_the_length_and_the_price_of_the_run(call):
    options = ["--tokens", 262_144 * 10 + 1, "--price-per-hour", 2, "--json"]
    _, out, _ = call(*GRU_RUN, *options)
    run = json.loads(out)["run"]
    assert (run["steps"], run["tokens"]) == (11, 11 * 262_144)
    assert run["cost"] == pytest.approx(run["seconds"] / 3600 * 2)


def test_options_reach_the_configuration(call, tmp_path, text):
    (tmp_path / "mine.toml").write_text("[train]\nbatch_size = 3\nseq_len = 9\n")
    args = [tmp_path / "mine.toml", "--data", text, "--epochs", 2, "--seq-len", 8, "--set", "model.hidden=16"]
    _, out, _ = call("plan", *args, "--json")
    figures = json.loads(out)
    assert figures["step"]["tokens"] == 3 * 8
    assert figures["model"]["hidden"] == 16
    assert figures["device"]["name"] == "here"
    assert figures["run"]["steps"] == -(-2 * (855 - 1 + 7) // 8 // 3)


def test_a_precision_of_the_gpu_alone(call):
    _, out, _ = call(*GRU_RUN, "--precision", "tf32", "--efficiency", "0.1", "--json")
    figures = json.loads(out)
    assert figures["device"]["peak_flops_per_second"] == 183e12
    assert figures["speed"]["how"] == "products at 10 % of the tf32 peak"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "l40z"], "--device: unknown device 'l40z'; did you mean l40 or l40s or l4?"),
        (["--preset", "gpt-16m", "--device", "v100-16gb"], "V100-16GB has no listed peak for bf16"),
        (["--efficiency", "0.5"], "--efficiency is the share of a GPU's peak"),
        (["--precision", "tf32"], "--precision tf32 is a GPU's"),
        (["--device", "t4", "--efficiency", "1.5"], "1.5 must be above 0 and at most 1"),
        (["--price-per-hour", "nan"], "nan must be above 0"),
        (["--price-per-hour", "free"], "'free' is not a number"),
        (["--measured-memory", "26"], "'26' needs a unit of MB, GB, MiB, GiB, as in 26.4GB"),
        (["--tokens", "5", "--steps", "6"], "--tokens and --steps contradict each other"),
        (["--set", "train.steps"], "--set train.steps: write it as key.sub=value"),
        (["book.txt"], "book.txt: a configuration ends in .toml"),
        (["--preset", "gru"], "--preset: unknown preset 'gru'"),
    ],
)
def test_wrong_usage_is_one_line(call, args, message):
    code, out, err = call("plan", *args)
    assert (code, out) == (2, "")
    assert err.startswith("gru-ref: error: ")
    assert message in err
    assert err.count("\n") == 1
