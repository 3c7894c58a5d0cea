"""How benchmarks measure and report, with a clock of the test's own. No timing is a test."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from threadpoolctl import threadpool_info

from gru_ref import bench, cli, threads
from gru_ref.backend import KERNEL_FOLDERS
from gru_ref.bench import _limits, _machine, _ours, gpt_124m, gpt_step, gru_step, sample
from gru_ref.bench._rows import Row, faster, missing
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import PAUSE, Spread, alternate, ratios
from gru_ref.config import ModelConfig

TWO_ROUNDS = Settings(threads=1, kernels="numpy", repeats=2)


class World:
    """Sides that take as long as they say, on a clock that only they and pauses move."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def side(self, name, *durations):
        """Its calls take these seconds, the last for ever."""
        left = list(durations)

        def call():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call

    def sleep(self, seconds):
        self.log.append("pause")
        self.now += seconds

    def alternate(self, sides, settings, **options):
        return alternate(sides, settings, clock=lambda: self.now, sleep=self.sleep, **options)


@pytest.fixture
def world():
    return World()


# --- turns ------------------------------------------------------------------------------------------------


def test_sides_take_turns_after_a_warm_up_that_is_not_counted(world):
    sides = {"ours": world.side("a", 9, 1, 2, 3), "peer": world.side("b", 9, 9, 4, 9)}
    times = world.alternate(sides, TWO_ROUNDS)
    assert times == {"ours": [2, 3], "peer": [4, 9]}
    assert world.log == ["a", "a", "b", "b", *(["pause", "a", "pause", "b"] * 2)]


def test_a_short_call_is_repeated_within_its_turn_and_a_long_one_is_not(world):
    times = world.alternate(
        {"short": world.side("s", 2**-5), "long": world.side("l", 1.0)},
        dataclasses.replace(TWO_ROUNDS, repeats=1),
    )
    assert times == {"short": [2**-5], "long": [1.0]}
    assert world.log[4:] == ["pause", *["s"] * 6, "pause", "l"]  # 6 of 1/32 s are the most that fit in 0.2 s


def test_equally_many_calls_where_it_is_said_and_no_more_rounds_than_allowed(world):
    sides = {"a": world.side("a", 1.0), "b": world.side("b", 0.001)}
    times = world.alternate(sides, dataclasses.replace(TWO_ROUNDS, repeats=9), calls=3, most=2)
    assert [len(values) for values in times.values()] == [2, 2]
    assert world.log[4:] == ["pause", *"aaa", "pause", *"bbb"] * 2


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 3), (35.0, 4)])
def test_rounds_go_on_until_the_seconds_are_spent_and_are_three_at_least(seconds, rounds, world):
    settings = Settings(threads=1, seconds=seconds)
    times = world.alternate({"a": world.side("a", 4.0), "b": world.side("b", 6.0 - 2 * PAUSE)}, settings)
    assert len(times["a"]) == len(times["b"]) == rounds


def test_the_ratio_is_taken_round_by_round():
    """A machine four times slower in one round: the ratio of medians would be 2.5, not 2."""
    spread = ratios([2, 20, 8], [1, 8, 4])
    assert spread == Spread(2, 2, 2.25, 3)
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])


@pytest.mark.parametrize(
    ("values", "spread"),
    [([3.0], Spread(3, 3, 3, 1)), ([1, 3], Spread(2, 1.5, 2.5, 2)), ([5, 1, 2, 4, 3], Spread(3, 2, 4, 5))],
)
def test_median_and_quartiles(values, spread):
    assert Spread.of(values) == spread


@pytest.mark.parametrize("kernels", KERNEL_FOLDERS)
def test_our_training_has_the_threads_of_a_run_in_its_turn_and_only_there(kernels):
    """With twins a run holds BLAS to one thread; a peer and the sgemm of a limit have all of them."""
    config = ModelConfig(hidden=8, layers=1, vocab_size=20)
    ours = _ours.Training(
        _ours.language_model(config, kernels), _ours.NADAM, _ours.random_batch(config, 3, 2)
    )
    seen = {"ours": [], "peer": []}

    def blas():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    class Side:
        turn = ours.turn

        def __call__(self):
            seen["ours"].append(blas())

    with threads.limited(2, pool=False):
        outside = blas()
        alternate({"ours": Side(), "peer": lambda: seen["peer"].append(blas())}, TWO_ROUNDS, calls=1)
    assert set(outside) == {2}
    assert all(n == (outside if kernels == "numpy" else [1] * len(outside)) for n in seen["ours"])
    assert all(n == outside for n in seen["peer"])


def test_the_products_of_a_gru_step_are_counted_as_they_are_made():
    s = gru_step.Shape(256, 32, 64, 2, 2.0, 55)
    assert gru_step._operations(s, twins=False) == 2048 * (36 * 256**2 * 2 + 6 * 256 * 100)
    made = 18 * 256**2 * (2048 + 100 + 2 * (2048 - 32)) + 6 * 256 * 100 * 2048
    assert gru_step._operations(s, twins=True) == made


def test_a_bar_is_compared_with_the_median_and_not_with_luck():
    row = faster("w", {"ours": [1, 1, 1], "p": [1, 2, 9]}, "p", bar=2.0)
    assert (row.value.median, row.met) == (2.0, True)
    assert dataclasses.replace(row, bar=2.1).met is False
    assert dataclasses.replace(row, bar=2.1, at_most=True).met is True
    assert dataclasses.replace(row, bar=1.9, at_most=True).met is False
    assert dataclasses.replace(row, bar=None).met is None
    assert missing("w", "q", 2.0, "why").met is None


# --- the machine ------------------------------------------------------------------------------------------


def test_the_facts_of_the_machine_name_no_file():
    facts = _machine.facts(2)
    assert not re.search(r"/\w+/", json.dumps(facts))
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["date"])
    assert _machine.version("no-such-package") is None


def test_a_measuring_process_has_no_variable_that_changes_its_speed(monkeypatch):
    for name in bench.REMOVED:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    environment = bench.measuring_environment()
    assert environment["KEPT"] == "1"
    assert not environment.keys() & set(bench.REMOVED)
    assert {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} <= set(bench.REMOVED)


# --- small measurements, whole ----------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Sizes that take milliseconds; the pauses are left out."""
    monkeypatch.setattr(_limits, "SGEMM", 16)
    monkeypatch.setattr(_limits, "STREAM", 1024)
    monkeypatch.setattr(gru_step, "SHAPES", (gru_step.Shape(8, 2, 3, 2, 2.0, 55),))
    monkeypatch.setattr(gpt_step, "SHAPES", (gpt_step.Shape(1, 8, 6, 2, 11, 2),))
    gpt = ModelConfig(
        kind="gpt2", layers=2, hidden=8, heads=2, context=64, vocab_size=21, vocab_padding=8, tied=True
    )
    gru = ModelConfig(hidden=8, layers=2, vocab_size=20)
    monkeypatch.setattr(sample, "MODELS", {"GRU": gru, "GPT": gpt})
    monkeypatch.setattr(gpt_124m, "MODEL", dataclasses.replace(gpt, vocab_padding=1, layers=3))
    monkeypatch.setattr(gpt_124m, "T", 7)


@pytest.fixture
def no_torch(monkeypatch):
    """As where torch is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


HERE = ["--in-this-process", "--repeats=2", "--threads=1", "--kernels=numpy"]


def measured(capsys, *arguments):
    """The report of `gru-ref bench … --json` in this process."""
    assert cli.run(["bench", *arguments, *HERE, "--json"]) == 0

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(capsys.readouterr().out, parse_constant=refuse)


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_a_benchmark_runs_end_to_end_and_prints_valid_json(torch_is_there, small, capsys, request):
    if torch_is_there:
        pytest.importorskip("torch")
    else:
        request.getfixturevalue("no_torch")
    report = measured(capsys, "gru-step")
    assert report["settings"] == dataclasses.asdict(dataclasses.replace(TWO_ROUNDS, seconds=10.0))
    against_torch, against_sgemm = report["benchmarks"]["gru-step"]
    assert against_torch["work"] == against_sgemm["work"] == "GRU step, D 8, B 2, T 3, L 2"
    assert against_sgemm["value"]["n"] == 2
    assert against_sgemm["note"].endswith("GF/s")
    if torch_is_there:
        assert against_torch["sides"].keys() == {"ours", "torch nn.GRU"}
        assert against_torch["met"] is (against_torch["value"]["median"] >= 2.0)
    else:
        assert against_torch["value"] is against_torch["met"] is None
        assert against_torch["note"] == "torch is not installed"


@pytest.mark.parametrize("name", ["gpt-step", "sample"])
def test_the_peers_compute_what_ours_does(name, small, capsys):
    """Losses after updates, and logits, are compared within the benchmark, which raises where they differ."""
    pytest.importorskip("torch")
    rows = measured(capsys, name)["benchmarks"][name]
    assert all(row["value"]["n"] == 2 for row in rows)


def test_the_c_loops_compute_what_ours_does(small, capsys):
    """Every gradient is compared within the benchmark."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    (row,) = measured(capsys, "gpt-124m")["benchmarks"]["gpt-124m"]
    assert row["value"] is not None, row["note"]
    assert row["sides"].keys() == {"ours", "plain C loops"}


def test_a_peer_that_computes_something_else_is_no_peer(small, capsys, monkeypatch):
    pytest.importorskip("torch")
    from gru_ref.bench import _torch_peers

    monkeypatch.setattr(_torch_peers, "LR", 1.0)
    assert cli.run(["bench", "gru-step", *HERE]) == 1
    assert "the loss of step 2 is" in capsys.readouterr().err


def test_without_torch_or_c_every_row_says_so(small, no_torch, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpt_124m, "SOURCE", tmp_path / "gpt2_loops.c")
    report = measured(capsys, "gpt-step", "gpt-step-compiled", "sample", "gpt-124m")["benchmarks"]
    notes = {row["note"] for rows in report.values() for row in rows if row["value"] is None}
    assert notes == {"torch is not installed", "benchmarks/gpt2_loops.c is in a checkout only"}
    assert [row["value"] is None for row in report["sample"]] == [True, False] * 2


# --- the command ------------------------------------------------------------------------------------------


def test_the_list_shows_every_benchmark_with_what_it_measures(capsys):
    assert cli.run(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == bench.names()
    assert {"gru-step", "gpt-step", "gpt-124m", "import", "encode", "memory"} <= set(bench.names())
    assert cli.run(["bench", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if row["long"]] == ["gpt-124m", "gpt-step-compiled"]
    assert all(row["summary"].endswith(".") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gru-stp"], "no benchmark 'gru-stp'; known: encode, gpt-124m,"),
        (["--json", "--markdown"], "--json and --markdown contradict each other"),
        (["--repeats", "0"], "'--repeats'"),
        (["--seconds", "nan"], "nan must be above 0 and at most 86400"),
        (["--list", "gru-stp"], "no benchmark 'gru-stp'"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, capsys):
    assert cli.run(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def table_of(row, capsys, monkeypatch, *options):
    monkeypatch.setattr(bench, "run", lambda name, settings: [row.to_dict()])
    assert cli.run(["bench", "import", *HERE, *options]) == 0  # also where a bar is missed
    return capsys.readouterr().out.splitlines()


ROW = Row(
    "work", "faster than peer", Spread(1.234, 1, 1.5, 9), bar=2.0, sides={"ours": Spread(0.0123, 0, 1, 9)}
)


def test_a_missed_bar_is_a_result(capsys, monkeypatch):
    line = table_of(ROW, capsys, monkeypatch)[-1]
    assert line.split("  ") == [
        "work",
        "faster than peer",
        "1.23 × [1–1.5]",
        "≥ 2 ×",
        "missed",
        "ours 12.3 ms",
    ]


def test_markdown_is_one_table_under_the_facts_of_the_machine(capsys, monkeypatch):
    row = dataclasses.replace(ROW, value=Spread(321.4, 2, 1234, 9), unit="MB/s", note="and more")
    lines = table_of(row, capsys, monkeypatch, "--markdown")
    assert lines[0].startswith("- 20")
    assert (
        lines[-1]
        == "| work | faster than peer | 321 MB/s [2–1234] | ≥ 2 MB/s | met | ours 12.3 ms; and more |"
    )
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}


def test_each_benchmark_runs_in_a_process_without_the_variables_and_a_failure_is_a_line(capsys, monkeypatch):
    calls = []

    def fail(command, environment):
        calls.append((command, environment))
        return 1, "", "warning\ngru-ref: error: no peer\n"

    for name in bench.REMOVED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setattr(importlib.import_module("gru_ref.cli.bench"), "_run", fail)
    assert cli.run(["bench", "import", "kernels", "--repeats=3", "--json"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["failed"] == {"import": "no peer", "kernels": "no peer"}
    assert report["removed_variables"] == ["OPENBLAS_CORETYPE"]
    assert "import failed: no peer" in shown.err
    assert [command[5] for command, _ in calls] == ["import", "kernels"]
    assert "--repeats=3" in calls[0][0]
    assert "OPENBLAS_CORETYPE" not in calls[0][1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_ends_the_command_ends_the_measurement(number, tmp_path):
    """It would go on for minutes, and it takes its 200 MB of text with it."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "gru_ref.cli", "bench", "encode", "--seconds=300"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert "measuring encode" in process.stderr.readline()
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not list(tmp_path.iterdir())


def test_a_measurement_in_a_process_of_its_own(capsys):
    assert cli.run(["bench", "import", "--repeats=1", "--json"]) == 0
    shown = capsys.readouterr()
    assert "measuring import" in shown.err
    rows = json.loads(shown.out)["benchmarks"]["import"]
    assert [row["work"] for row in rows] == ["python that does nothing", "import gru_ref", "gru-ref --help"]
    assert all(row["value"]["median"] > 0 for row in rows)
