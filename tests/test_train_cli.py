"""`gru-ref train` as a person meets it: its errors, its output, its signals, its environment."""

import errno
import io
import json
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from gru_ref import config as configuration
from gru_ref.checkpoint import verify_checkpoint
from gru_ref.checkpoint.find import checkpoints_of, newest_checkpoint
from gru_ref.cli import run as run_command
from gru_ref.cli._train_view import TrainView
from gru_ref.training import resume, train

pytestmark = pytest.mark.usefixtures("short_samples")  # in this process

COMMAND = [sys.executable, "-m", "gru_ref.cli"]
PLAIN = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "TERM")}
ENVIRONMENT = {**PLAIN, "OPENBLAS_NUM_THREADS": "1"}

# Long enough that every signal comes before the end; the learning rate does not depend on the length.
ENDLESS = {
    "train.steps": 100_000,
    "train.eval_every": 5,
    "train.checkpoint_every": 50,
    "schedule.name": "constant",
    "schedule.warmup": 3,
    "model.dropout": 0.2,
}
ENDLESS_OPTIONS = [f"--set={key}={value}" for key, value in ENDLESS.items()]


def gru_ref(*args, **options):
    options = {"capture_output": True, "env": ENVIRONMENT, "timeout": 100, **options}
    return subprocess.run([*COMMAND, *map(os.fspath, args)], **options)


def start(*args, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0, **options}
    command = [*COMMAND, *map(os.fspath, args)]
    return subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=hear_hangups, **options)


def hear_hangups():
    """Whatever started the tests, nohup say, may have asked to ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for(process, line):
    """Read the output up to the line that begins so."""
    for found in process.stdout:
        if found.startswith(line):
            return
    raise AssertionError(f"{line!r} never came; {process.stderr.read()}")


def checkpoint_at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.h5"


def steps_of(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def tree(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


# Usage


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "train.stepz=5"], "options: unknown key 'train.stepz'; did you mean 'train.steps'?"),
        (["--set", "steps=5"], "did you mean 'train.steps'?"),
        (["--set", "train.steps"], "write it as key.sub=value"),
        (["--set", "train.steps=many"], "train.steps must be a whole number, not 'many'"),
        (["--set", "model.tied=perhaps"], "model.tied must be true or false"),
        (["--steps", "many"], "'many' is not a valid integer"),
        (["--steps", "-1"], "train.steps must be at least 0"),
        (["--steps", "3", "--epochs", "2"], "train.steps and train.epochs contradict each other"),
        (["--lr", "nan"], "schedule.lr must be at least 0"),
        (["--lr", "0"], "schedule.lr must be above 0"),
        (["--seed", "-1"], "train.seed must be at least 0"),
        (["--val-fraction", "1.5"], "data.val_fraction must be at least 0 and below 1"),
        (["--device", "cuda"], "run.device must be one of auto, cpu, not 'cuda'"),
        (["--kernels", "numbra"], "did you mean 'numba'?"),
        (["--tokenizer", "asci100"], "did you mean 'ascii100'?"),
        (["--preset", "gru-l3"], "did you mean 'gru-l3-v3a'?"),
        (["--stepz", "3"], "No such option"),
        (["--stop-at", "-1"], "--stop-at"),
        (["missing.toml"], "missing.toml: cannot read the configuration: No such file or directory"),
        (["bad.toml"], "bad.toml: unknown table 'trane'; did you mean 'train'?"),
        (["broken.toml"], "broken.toml: not valid TOML"),
        (["a.toml", "b.toml"], "unexpected extra argument"),
        (["--data", "missing.txt"], "missing.txt: cannot be read: No such file or directory"),
        (["--data", "empty.txt"], "empty.txt: is empty"),
        (["--data", "bad.toml"], "needs at least T+1 = 65"),
        (["--out", ""], "--out is empty"),
        (["--out", "empty.txt/run"], "empty.txt/run: cannot make the run directory: Not a directory"),
        (["--out", "empty.txt"], "empty.txt: cannot make the run directory: File exists"),
        (["--resume", "missing"], "missing: does not exist"),
        (["--resume", "."], "name a checkpoint or a run directory"),
        (["--resume", "missing", "--out", "run"], "--out cannot go with --resume"),
        (["--resume", "missing", "--preset", "default"], "--preset cannot go with --resume"),
        (["--resume", "missing", "bad.toml"], "CONFIG.toml cannot go with --resume"),
        (["--resume", "missing", "--dry-run"], "--dry-run cannot go with --resume"),
        (["--override"], "--override goes with --resume only"),
        (["--steps", "10", "--warmup", "6", "--set", "schedule.decay=6"], "together exceed the 10 steps"),
        (["--set", "model.tied=true", "--set", "model.hidden=9"], "model.tied needs model.embedding"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_exit_code_2_and_nothing_written(tmp_path, monkeypatch, capfd, args, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("bad.toml").write_text("[trane]\nsteps = 3\n")
    Path("broken.toml").write_text("[train\n")
    before = tree(tmp_path)
    assert run_command(["train", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"gru-ref: error: [^\n]+\n", err)
    assert message in err
    assert tree(tmp_path) == before


def test_a_run_that_is_finished_is_refused_and_its_resume_does_nothing(
    tiny, tmp_path, tiny_options, capfd, monkeypatch
):
    """C13, R01."""
    monkeypatch.chdir(tmp_path)
    train(tiny({"train.steps": 1}), "run")
    assert run_command(["train", *tiny_options, "--out", "run"]) == 2
    assert capfd.readouterr().err == (
        "gru-ref: error: run: holds a run already; choose another --out, or continue it with --resume run\n"
    )
    assert run_command(["train", "--resume", "run"]) == 0
    assert capfd.readouterr() == ("run is finished already (step 1); nothing to do\n", "")


def test_a_dry_run_shows_parameters_and_decay_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    args = ["train", "--preset", "gru-l3-v3a", "--dry-run", "--set", "optimizer.weight_decay=0.25"]
    assert run_command(args) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "75,944,036 parameters (75.9 M), 1,502 steps" in out
    decay = dict(re.findall(r"(\S+\.\S+) +│.*│ *[\d,]+ *│ (0\.25|never) ", out))
    assert len(decay) == 15
    assert {name for name, value in decay.items() if value == "never"} == {
        name for name in decay if "bias" in name
    }
    assert "nothing was trained or written" in out
    assert tree(tmp_path) == []


def test_options_reach_the_configuration(tmp_path, monkeypatch, tiny_options):
    """The later wins: preset, file, options, --set."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[train]\nsteps = 5\nlog_every = 7\n[schedule]\nlr = 0.5\nmin_lr = 0\n")
    loaded = {}
    monkeypatch.setattr("gru_ref.training.train", lambda config, *_, **__: loaded.update(config=config))
    monkeypatch.setattr("gru_ref.cli._train_view.TrainView.finish", lambda *_: None)
    monkeypatch.setattr("gru_ref.cli.train._exit_code", lambda *_: 0)
    args = ["mine.toml", "--lr", "0.25", "--epochs", "2", "--carry-state", "--val-data", "v", "--set"]
    assert run_command(["train", *args, "train.log_every=3"]) == 0
    config = loaded["config"]
    assert (config.train.steps, config.train.epochs, config.train.log_every) == (0, 2.0, 3)
    assert (config.schedule.lr, config.train.carry_state, config.data.val_files) == (0.25, True, ("v",))
    assert config.train.seq_len == configuration.load().train.seq_len  # of the preset


def test_longer_and_changed_runs_print_old_and_new(tiny, tmp_path, capfd, monkeypatch):
    """R05."""
    monkeypatch.chdir(tmp_path)
    train(tiny({"train.checkpoint_every": 2}), "run")
    assert run_command(["train", "--resume", "run", "--steps", "8"]) == 0
    out, _ = capfd.readouterr()
    assert "changed: train.steps 6 -> 8\n" in out
    assert "resuming run after step 6\n" in out
    assert run_command(["train", "--resume", "run", "--steps", "10", "--lr", "0.01"]) == 2
    assert "schedule.lr 0.02 -> 0.01 would change the run; add --override" in capfd.readouterr().err
    args = ["--resume", "run/checkpoints/step-00000004.h5", "--lr", "0.01", "--override"]
    assert run_command(["train", *args]) == 0
    out, _ = capfd.readouterr()
    assert "changed: schedule.lr 0.02 -> 0.01\n" in out
    assert "set aside: step-00000006.h5, step-00000008.h5, which are after that step\n" in out


# What is imported (E01)

MODULES = """
import json, sys
heavy = ("numba", "h5py", "matplotlib", "cupy", "torch", "numpy")
found = lambda: [name for name in heavy if name in sys.modules]
import gru_ref
after_import = found()
from gru_ref.cli import run
assert run(["--help"]) == 0
after_help = found()
assert run(["train", "--help"]) == 0
after_train_help = found()
assert run(sys.argv[1:]) == 0
after_training = found()
print(json.dumps([after_import, after_help, after_train_help, after_training]))
"""


def test_only_what_is_needed_is_imported(tmp_path, tiny_options):
    args = ["train", *tiny_options, "--device", "cpu", "--out", tmp_path / "run"]
    child = subprocess.run(
        [sys.executable, "-c", MODULES, *args], capture_output=True, env=ENVIRONMENT, timeout=100
    )
    assert child.stderr == b""
    after_import, after_help, after_train_help, after_training = json.loads(child.stdout.splitlines()[-1])
    assert after_import == []
    assert after_help == []
    assert after_train_help == []
    assert after_training == ["h5py", "numpy"]


# Output (L01, L04)


def test_a_log_file_has_a_line_for_each_interval_and_no_control_characters(tmp_path, tiny_options):
    """L04, on odd settings of the terminal."""
    odd = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "1"}
    options = ["--log-every", "4", "--steps", "10", "--out", tmp_path / "run"]
    with open(tmp_path / "log", "wb") as log:
        child = gru_ref("train", *tiny_options, *options, capture_output=False, stdout=log,
                        stderr=subprocess.PIPE, env={**ENVIRONMENT, **odd})  # fmt: skip
    output = (tmp_path / "log").read_bytes()
    assert (child.returncode, child.stderr) == (0, b"")
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", output)
    assert re.findall(rb"^step +(\d+)/10 ", output, re.M) == [b"1", b"4", b"8", b"10"]
    assert b"before training: loss 4." in output


def test_the_words_of_a_bare_environment_and_of_odd_names_do_not_matter(tmp_path, text):
    """L04: `env -i` with the C locale, whose encoding is ASCII, and names that ASCII has no letters for."""
    folder = tmp_path / "a b" / "é日" / os.fsdecode(b"-x\xff")
    folder.mkdir(parents=True)
    (folder / "-t.txt").write_bytes("é日 and some more text. ".encode() * 30)
    bare = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    child = gru_ref(
        "train", "--data=-t.txt", "--steps=2", "--seq-len=8", "--set=model.hidden=8", "--out=-run",
        cwd=folder, env=bare,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, b"")
    assert b"notice: 150 bytes (19 %) are not in ascii100" in child.stdout
    assert len(checkpoints_of(folder / "-run")) == 2
    # and the whole name, in an error and on resume
    child = gru_ref("train", "--resume", folder / "-run", "--steps", "3", env=bare)
    assert (child.returncode, child.stderr) == (0, b"")
    assert newest_checkpoint(folder / "-run") == checkpoint_at(folder / "-run", 3)
    child = gru_ref("train", "--out", folder / "-run", env=bare)
    assert child.returncode == 2
    assert re.fullmatch(rb"gru-ref: error: [ -~]+ holds a run already[ -~]+\n", child.stderr)


@pytest.mark.parametrize("reader", ["head -1", ">/dev/full", ">&- 2>&-"])
def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path, tiny_options, all_verify, reader):
    """L01: not even with the first line; the log is in the run directory too."""
    quoted = " ".join(f"'{part}'" for part in [*COMMAND, "train", *tiny_options, "--out", "run"])
    pipe = "|" if reader == "head -1" else ""
    child = subprocess.run(
        ["bash", "-c", f"{quoted} {pipe} {reader}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": "1"} if pipe else ENVIRONMENT,
        cwd=tmp_path,
        timeout=100,
    )
    assert (child.returncode, child.stderr) == (0, b"")
    assert child.stdout.count(b"\n") == (reader == "head -1")
    assert all_verify(tmp_path / "run") == [0, 6]


class Terminal(io.TextIOWrapper):
    """Hangs up at the so-and-so-manyth write or flush: all fail until the descriptor is another file."""

    left = math.inf

    def write(self, text):
        return self._unless_gone(super().write, text)

    def flush(self):
        return self._unless_gone(super().flush)

    def _unless_gone(self, function, *arguments):
        self.left -= 1
        if self.left < 0 and os.path.sameopenfile(self.fileno(), self.original):
            raise OSError(errno.EIO, "Input/output error")
        return function(*arguments)


def test_a_terminal_that_is_gone_from_any_of_its_lines_on_makes_the_view_silent(tmp_path):
    """L01: a hang-up just as the progress display started once ended the run with an error."""
    left, silent = 0, True
    while silent:
        with (
            open(tmp_path / "output", "wb", buffering=0) as original,
            Terminal(os.fdopen(os.dup(original.fileno()), "wb", 0), write_through=True) as file,
        ):
            file.original, file.left = original.fileno(), left
            with TrainView() as view:
                view.console = Console(file=file, force_terminal=True, highlight=False)
                view.line("writing to run")
                view._begin()
                view.line("checkpoint at step 0")
            file.left = math.inf
        left, silent = left + 1, view.silent
    assert left > 8
    written = (tmp_path / "output").read_text()
    assert written.startswith("writing to run\n")
    assert "checkpoint at step 0\n" in written


def on_terminal(args, term, until=None):
    """Run on a terminal of its own; returns its exit code and output. Hang up once `until` is there."""
    main, side = pty.openpty()
    # A new session takes the first terminal that it opens for its controlling one.
    process = subprocess.Popen(
        ["bash", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(side), *COMMAND, *map(os.fspath, args)],
        env={**ENVIRONMENT, "TERM": term},
        start_new_session=True,
        preexec_fn=hear_hangups,
    )
    os.read(main, 1)  # it has opened the terminal, which would end when no one has it open
    os.close(side)
    output = b""
    while until is None or until not in output:
        try:
            output += os.read(main, 65536)
        except OSError:  # all of it
            break
    os.close(main)
    if until is not None:
        process.send_signal(signal.SIGHUP)  # the shell's, behind the system's own
    return process.wait(60), output


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_shows_progress_and_a_dumb_one_plain_lines(tmp_path, tiny_options, term):
    code, output = on_terminal(["train", *tiny_options, "--out", tmp_path / "run"], term)
    assert code == 0
    assert (b"\x1b" in output) is (term == "xterm")
    assert b"finished: " in output
    assert b"Traceback" not in output


def test_a_terminal_that_hangs_up_leaves_a_resumable_run(tmp_path, tiny_options, all_verify):
    """L03: SIGHUP comes together with a terminal that takes no more text."""
    args = ["train", *tiny_options, *ENDLESS_OPTIONS, "--out", tmp_path / "run"]
    code, _ = on_terminal(args, "xterm", until=b"checkpoint at step 0")
    assert code == 128 + signal.SIGHUP
    all_verify(tmp_path / "run")
    assert (tmp_path / "run/events.jsonl").read_text().count('"reason": "SIGHUP"') == 1


# Signals (L03)


@pytest.fixture
def straight(tiny, tmp_path):
    """straight(step) is the file of that step's checkpoint in a run that was never disturbed."""

    def at(step):
        train(tiny(ENDLESS), tmp_path / "straight", stop_at=step)
        return checkpoint_at(tmp_path / "straight", step).read_bytes()

    return at


@pytest.mark.parametrize(
    ("number", "after", "delay"),
    [
        (signal.SIGINT, b"model", 0.0),  # the very first line
        (signal.SIGINT, b"writing to", 0.0),  # the evaluation before the first step
        (signal.SIGTERM, b"before training", 0.0),  # the first sample and checkpoint
        (signal.SIGINT, b"step ", 0.1),
        (signal.SIGTERM, b"step ", 0.2),
    ],
)
def test_a_signal_leaves_a_run_that_goes_on_as_if_there_had_been_none(
    tmp_path, tiny_options, all_verify, straight, number, after, delay
):
    run = tmp_path / "run"
    process = start("train", *tiny_options, *ENDLESS_OPTIONS, "--out", "run", cwd=tmp_path)
    wait_for(process, after)
    time.sleep(delay * random.random())
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == b"gru-ref: stopping after this step; once more quits at once\n"
    step = int(re.search(rb"stopped after step (\d+); go on with: gru-ref train --resume run\n$", out)[1])
    assert all_verify(run)[-1] == step
    resume(run, stop_at=step + 3)
    assert steps_of(run) == list(range(1, step + 4))
    assert checkpoint_at(run, step + 3).read_bytes() == straight(step + 3)


def test_a_second_signal_quits_at_once_and_tears_nothing(tmp_path, tiny_options, all_verify, straight):
    """Both arrive before the first checkpoint, so the directory must be free for another start."""
    run = tmp_path / "run"
    process = start("train", *tiny_options, *ENDLESS_OPTIONS, "--out", run)
    wait_for(process, b"writing to")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # they may come together
    assert err.count(b"\n") == 1
    if checkpoints_of(run):
        resume(run, stop_at=2)
    else:
        assert run_command(["train", *tiny_options, *ENDLESS_OPTIONS, "--out", str(run), "--stop-at=2"]) == 0
    assert all_verify(run)[-1] == 2
    assert checkpoint_at(run, 2).read_bytes() == straight(2)


def test_a_killed_run_never_leaves_a_torn_checkpoint(tmp_path, tiny_options, all_verify, straight):
    """C10: SIGKILL at random times, with a checkpoint after each step."""
    run = tmp_path / "run"
    options = [*tiny_options, *ENDLESS_OPTIONS]
    saved = 0
    for begin in (["--out", run], ["--resume", run], ["--resume", run]):
        process = start("train", *(options if "--out" in begin else []), "--checkpoint-every=1", *begin)
        wait_for(process, b"step " if saved == 0 else b"resuming")
        time.sleep(0.15 * random.random())
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        for path in checkpoints_of(run):
            assert verify_checkpoint(path).problems == []
        newest = int(newest_checkpoint(run).stem.removeprefix("step-"))
        assert newest >= saved
        saved = newest
    result = resume(run, stop_at=saved + 2, changes={"train.checkpoint_every": 50})
    assert result.step == saved + 2
    assert steps_of(run) == list(range(1, saved + 3))
    all_verify(run)  # and no temporary file is left
    assert checkpoint_at(run, saved + 2).read_bytes() == straight(saved + 2)


def test_an_ignored_signal_stays_ignored(tmp_path, tiny_options):
    """`nohup gru-ref train …` outlives its terminal."""
    args = [*COMMAND, "train", *tiny_options, *ENDLESS_OPTIONS, "--out", tmp_path / "run", "--stop-at=60"]
    process = subprocess.Popen(
        ["bash", "-c", 'trap "" HUP; exec "$@"', "bash", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=ENVIRONMENT,
    )
    wait_for(process, b"writing to")
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"stopping after step 60 (--stop-at 60)" in out


# Two at once, standard input


def test_of_two_that_are_started_together_one_wins(tmp_path, tiny_options, all_verify):
    """C13."""
    both = [start("train", *tiny_options, "--steps=100", "--out", tmp_path / "run") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    loser = errors[0] or errors[1]
    assert re.fullmatch(rb"gru-ref: error: \S+ (in use by process|holds a run already)[^\n]*\n", loser)
    assert all_verify(tmp_path / "run") == [0, 100]
    assert steps_of(tmp_path / "run") == list(range(1, 101))


def test_a_run_on_standard_input_can_be_resumed(tmp_path, text, tiny_options, straight, all_verify):
    run = tmp_path / "run"
    options = ["-" if option == str(text) else option for option in [*tiny_options, *ENDLESS_OPTIONS]]
    child = gru_ref("train", *options, "--out", run, "--stop-at=2", input=text.read_bytes())
    assert (child.returncode, child.stderr) == (0, b"")
    resume(run, stop_at=4, changes={"data.files": [str(text)]})  # the same text, wherever it lies
    assert all_verify(run) == [0, 2, 4]
    assert checkpoint_at(run, 4).read_bytes() == straight(4)
    assert resume(checkpoint_at(run, 2), stop_at=3).step == 3  # from what was kept


def test_validation_text_on_standard_input_is_kept_too(tiny, tmp_path, monkeypatch):
    pipe = io.TextIOWrapper(io.BytesIO(b"some text to validate on, and some more of it"))
    monkeypatch.setattr("sys.stdin", pipe)
    train(tiny({"data.val_files": ["-"]}), tmp_path / "run", stop_at=2)
    assert resume(tmp_path / "run").finished
