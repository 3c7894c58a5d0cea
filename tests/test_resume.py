"""A run that was stopped and resumed is the run that never stopped, to the last bit (R01, R02, R05, R07)."""

import dataclasses
import io
import shutil
import sys

import numpy as np
import pytest

from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.data.windows import Windows
from gru_ref.errors import CheckpointError, ConfigError, DataError, RunDirectoryError
from gru_ref.models.gru_lm import GRULM
from gru_ref.schedules import learning_rate
from gru_ref.threads import available_cores
from gru_ref.training import resume, train
from gru_ref.training.loop import changed_config
from gru_ref.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("short_samples")

SPLITS = [[1], [7], [19], [20], [5, 10, 15]]  # 1+19, 7+13, 19+1, 20+0, 5×4

RUNS = {
    "nadam": {"model.dropout": 0.3, "model.layers": 2, "train.eval_every": 3},
    "adamw": {"optimizer.name": "adamw", "optimizer.weight_decay": 0.1, "model.dropout": 0.3},
    # boundaries of the schedule where the run is cut too
    "wsd": {"schedule.warmup": 7, "schedule.decay": 5, "optimizer.variant": "keras"},
    # 15 windows an epoch, 8 a step
    "epochs": {"train.accumulation": 4, "train.steps": 0, "train.epochs": 160 / 15, "model.dropout": 0.3},
    # 15 windows in 4 lanes are 4 steps an epoch
    "carry": {"train.carry_state": True, "train.accumulation": 2, "model.dropout": 0.3},
    "bf16": {"run.precision": "bf16", "train.keep_checkpoints": 1, "train.checkpoint_every": 4},
    "fp16": {"run.precision": "fp16", "model.reset_after": False, "model.tied": True},
}


def checkpoint_at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.h5"


def tree(run):
    """Every file but the lock, with its bytes and its time."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in run.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


@pytest.fixture
def used_windows(monkeypatch):
    """The windows that training took, in order."""
    used, indices = [], Windows.indices

    def spy(self, cursor, count):
        taken = indices(self, cursor, count)
        used.extend(taken.tolist())
        return taken

    monkeypatch.setattr(Windows, "indices", spy)
    return used


@pytest.mark.parametrize("kind", RUNS)
def test_stopped_and_resumed_equals_never_stopped(tiny, tmp_path, text, timeless, all_verify, kind):
    """R01, R02: the checkpoint's bytes, and every row of metrics and samples but for timings."""
    text.write_bytes(text.read_bytes()[:135])
    config = tiny({"train.steps": 20, **RUNS[kind]})
    straight = tmp_path / "straight"
    assert train(config, straight).step == 20
    for stops in SPLITS if kind in ("nadam", "adamw") else [[7], [5, 10, 15]]:
        run = tmp_path / "-".join(map(str, stops))
        result = train(config, run, stop_at=stops[0])
        assert (result.step, result.finished) == (stops[0], stops == [20])
        for stop_at in [*stops[1:], 0]:
            result = resume(run, stop_at=stop_at)
            assert result.step == (stop_at or 20)
        assert result.finished
        for log in ("metrics", "samples"):
            assert timeless(run, log) == timeless(straight, log)
        assert checkpoint_at(run, 20).read_bytes() == checkpoint_at(straight, 20).read_bytes()
        all_verify(run)
    if not config.train.epochs:
        lr = [learning_rate(config.schedule, step, 20) for step in range(1, 21)]
        assert [row["lr"] for row in timeless(straight)] == lr


def test_every_cut_of_three_epochs_takes_the_same_windows(tiny, tmp_path, text, timeless, used_windows):
    """R02: 10 windows an epoch, 4 a step, which does not divide them."""
    text.write_bytes(text.read_bytes()[:81])
    config = tiny({"data.val_fraction": 0, "train.steps": 0, "train.epochs": 3.0, "train.accumulation": 2})
    straight = tmp_path / "straight"
    train(config, straight)
    whole = list(used_windows)
    assert len(whole) == 30
    for cut in range(1, 8):
        used_windows.clear()
        train(config, tmp_path / f"{cut}", stop_at=cut)
        resume(tmp_path / f"{cut}")
        assert used_windows == whole
        assert checkpoint_at(tmp_path / f"{cut}", 8).read_bytes() == checkpoint_at(straight, 8).read_bytes()


def test_the_carried_state_is_saved_and_zeroed_where_an_epoch_starts(tiny, tmp_path, text, monkeypatch):
    """R02: and it is not what an evaluation starts from."""
    text.write_bytes(text.read_bytes()[:81])
    starts, forward = [], GRULM.forward

    def spy(self, ids, state=None, *, dropout_step=None, **options):
        starts.append("eval" if dropout_step is None else None if state is None else bool(np.any(state)))
        if dropout_step is None:
            assert state is None or len(ids) == 1  # a sample feeds its own state back
        return forward(self, ids, state, dropout_step=dropout_step, **options)

    monkeypatch.setattr(GRULM, "forward", spy)
    options = {"train.carry_state": True, "train.steps": 7, "train.eval_every": 1, "data.val_fraction": 0.2}
    train(tiny(options), tmp_path / "run", stop_at=4)  # 8 windows in 2 lanes: 4 steps an epoch
    assert load_checkpoint(checkpoint_at(tmp_path / "run", 4)).hidden.any() == np.False_
    resume(tmp_path / "run", stop_at=6)
    assert load_checkpoint(checkpoint_at(tmp_path / "run", 6)).hidden.any()
    resume(tmp_path / "run")
    training = [start for start in starts if start != "eval"]
    assert training == [False, True, True, True, False, True, True]


def test_a_loaded_run_saved_again_is_the_same_file(tiny, tmp_path):
    """R01."""
    train(tiny({"model.dropout": 0.2}), tmp_path / "run", stop_at=3)
    path = checkpoint_at(tmp_path / "run", 3)
    checkpoint = load_checkpoint(path)
    trainer = Trainer.restore(checkpoint, checkpoint.config)
    save_checkpoint(tmp_path / "again.h5", trainer.checkpoint())
    assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()


def test_resuming_a_finished_run_does_nothing(tiny, tmp_path):
    """R01."""
    config = tiny({"train.checkpoint_every": 2})
    train(config, tmp_path / "run")
    before = tree(tmp_path / "run")
    seen = []
    for path in (tmp_path / "run", checkpoint_at(tmp_path / "run", 6)):
        result = resume(path, observer=seen.append)
        assert (result.step, result.finished, result.checkpoint) == (
            6,
            True,
            checkpoint_at(tmp_path / "run", 6),
        )
    assert seen == []
    assert tree(tmp_path / "run") == before


def test_a_run_can_be_resumed_from_another_folder(tiny, tmp_path, monkeypatch):
    """And the number of threads, which decides last bits, is that of the start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    train(tiny({"data.files": ["text.txt"], "run.threads": 0}), "run", stop_at=3)
    config = load_checkpoint("run/checkpoints/step-00000003.h5").config
    assert config.data.files == (str(tmp_path / "text.txt"),)
    assert config.run.threads == available_cores()
    monkeypatch.chdir("elsewhere")
    assert resume("../run").finished


# Changed settings (R05)

# Of each key, another value and what a resume says to it.
CHANGES = {
    "model.layers": (2, "fixed"),
    "model.hidden": (9, "fixed"),
    "model.embedding": (5, "fixed"),
    "model.vocab_size": (99, "fixed"),
    "model.vocab_padding": (64, "fixed"),
    "model.tied": (True, "fixed"),
    "model.reset_after": (False, "fixed"),
    "model.dropout": (0.5, "fixed"),
    "model.kind": ("gpt2", "fixed"),
    "model.heads": (2, "fixed"),
    "model.context": (16, "fixed"),
    "model.bias": (False, "fixed"),
    "data.files": (("/elsewhere",), "free"),
    "data.tokenizer": ("bytes", "fixed"),
    "data.vocab": ("/elsewhere", "fixed"),
    "data.val_fraction": (0.2, "fixed"),
    "data.val_files": (("/elsewhere",), "free"),
    "train.steps": (30, "free"),
    "train.epochs": (2.0, "override"),
    "train.batch_size": (3, "override"),
    "train.seq_len": (9, "fixed"),
    "train.accumulation": (3, "override"),
    "train.carry_state": (True, "fixed"),
    "train.clip_norm": (0.5, "override"),
    "train.label_smoothing": (0.1, "override"),
    "train.seed": (2, "fixed"),
    "train.max_skipped": (3, "free"),
    "train.segments": (4, "free"),
    "train.checkpoint_every": (3, "free"),
    "train.keep_checkpoints": (3, "free"),
    "train.eval_every": (3, "free"),
    "train.eval_tokens": (3, "override"),
    "train.sample_every": (3, "free"),
    "train.log_every": (3, "free"),
    "train.loss_scale": (4.0, "override"),
    "train.loss_scale_growth": (3, "override"),
    "optimizer.name": ("adamw", "fixed"),
    "optimizer.variant": ("keras", "override"),
    "optimizer.beta1": (0.8, "override"),
    "optimizer.beta2": (0.99, "override"),
    "optimizer.eps": (1e-7, "override"),
    "optimizer.weight_decay": (0.1, "override"),
    "optimizer.decoupled": (False, "override"),
    "schedule.name": ("cosine", "override"),
    "schedule.lr": (1e-2, "override"),
    "schedule.min_lr": (1e-3, "override"),
    "schedule.warmup": (3.0, "override"),
    "schedule.decay": (3.0, "override"),
    "schedule.shape": ("linear", "override"),
    "schedule.steps": (40, "override"),
    "run.device": ("cpu", "free"),
    "run.kernels": ("numba", "free"),
    "run.precision": ("fp16", "override"),
    "run.threads": (2, "free"),
}


def test_the_table_has_every_key():
    assert CHANGES.keys() == configuration.keys().keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_change_is_free_or_fixed_or_needs_the_override(tiny, key):
    new, rule = CHANGES[key]
    config = tiny({"train.steps": 20 if key != "train.epochs" else 0})
    table, name = key.split(".")
    old = getattr(getattr(config, table), name)
    shown = rf"{key} .*{old} -> {new}".replace("(", r"\(").replace(")", r"\)")
    if rule == "fixed":
        for override in (False, True):
            with pytest.raises(ConfigError, match=rf"{key} cannot change on resume .*{old} -> {new}"):
                changed_config(config, {key: new}, override=override)
        return
    if rule == "override":
        with pytest.raises(ConfigError, match=f"{shown} would change the run; add --override"):
            changed_config(config, {key: new})
    changed = changed_config(config, {key: new}, override=rule == "override")
    assert configuration.differences(config, changed) == {key: (listed(old), listed(new))}
    assert changed_config(config, {key: old}) == config


def listed(value):
    return list(value) if isinstance(value, tuple) else value


def test_lanes_of_a_carried_state_cannot_change_even_with_the_override(tiny):
    config = tiny({"train.carry_state": True})
    for key in ("train.batch_size", "train.accumulation"):
        with pytest.raises(ConfigError, match=f"{key} cannot change on resume where the state is carried"):
            changed_config(config, {key: 3}, override=True)


def test_settings_that_contradict_each_other_after_a_change_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"schedule\.min_lr 0\.002 is above schedule\.lr 0\.001"):
        changed_config(tiny(), {"schedule.lr": 1e-3}, override=True)


def test_standard_input_is_refused_on_resume(tiny):
    for key in ("data.files", "data.val_files"):
        with pytest.raises(ConfigError, match="-: a resumed run cannot read standard input"):
            changed_config(tiny(), {key: ["-"]})


def test_a_resume_that_stops_where_it_stands_writes_no_checkpoint(tiny, tmp_path, monkeypatch):
    train(tiny(), tmp_path / "run", stop_at=3)
    before = tree(tmp_path / "run/checkpoints")
    monkeypatch.chdir(tmp_path)
    assert resume("run", stop_at=2).step == 3
    assert tree(tmp_path / "run/checkpoints") == before


def test_a_refused_change_leaves_the_run_as_it_was(tiny, tmp_path):
    train(tiny(), tmp_path / "run", stop_at=3)
    before = tree(tmp_path / "run")
    with pytest.raises(ConfigError):
        resume(tmp_path / "run", changes={"schedule.lr": 1e-3})
    assert tree(tmp_path / "run") == before


def test_a_change_that_is_allowed_is_applied_and_recorded_old_and_new(tiny, tmp_path, rows):
    train(tiny({"train.log_every": 10}), tmp_path / "run", stop_at=3)
    changes = {"schedule.lr": 1e-2, "train.log_every": 5}
    resume(tmp_path / "run", changes=changes, override=True)
    (event,) = [row for row in rows(tmp_path / "run", "events") if row["event"] == "resume"]
    assert event["changed"] == {"schedule.lr": [2e-2, 1e-2], "train.log_every": [10, 5]}
    schedule = dataclasses.replace(tiny().schedule, lr=1e-2)
    table = rows(tmp_path / "run")
    assert [row["lr"] for row in table[3:]] == [learning_rate(schedule, step, 6) for step in (4, 5, 6)]
    assert configuration.load(file=tmp_path / "run/config.toml").schedule == schedule
    assert load_checkpoint(checkpoint_at(tmp_path / "run", 6)).config.schedule == schedule


@pytest.mark.parametrize("length", [{"train.steps": 6}, {"train.steps": 0, "train.epochs": 3.0}])
def test_another_batch_size_neither_skips_nor_repeats_a_window(
    tiny, tmp_path, text, rows, used_windows, length
):
    """R05: the position is counted in windows. 10 an epoch; 3 steps of 2, then steps of 3."""
    text.write_bytes(text.read_bytes()[:81])
    config = tiny({"data.val_fraction": 0, **length})
    train(config, tmp_path / "run", stop_at=3)
    resume(tmp_path / "run", changes={"train.batch_size": 3}, override=True, stop_at=5)
    result = resume(tmp_path / "run")
    total = 15 if config.train.steps else 30
    used = list(used_windows)
    assert used == Windows(np.zeros(81), 8, seed=config.train.seed).indices(0, total).tolist()
    assert result.step == (6 if config.train.steps else 3 + 8)
    assert rows(tmp_path / "run")[-1]["lr"] == config.schedule.min_lr  # the schedule knows the length too


def test_a_longer_run_goes_on_after_its_end(tiny, tmp_path, rows):
    train(tiny({"train.steps": 0, "train.epochs": 0.1}), tmp_path / "run", stop_at=3)
    result = resume(tmp_path / "run", changes={"train.steps": 9})
    assert result.step == 9
    (event,) = [row for row in rows(tmp_path / "run", "events") if row["event"] == "resume"]
    assert event["changed"] == {"train.steps": [0, 9], "train.epochs": [0.1, 0.0]}
    assert resume(tmp_path / "run", changes={"train.steps": 11}).step == 11
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 12))


def test_changed_text_is_refused_and_named(tiny, tmp_path, text):
    train(tiny(), tmp_path / "run", stop_at=3)
    before = tree(tmp_path / "run")
    original = text.read_bytes()
    text.write_bytes(original[:-1] + b"!")
    with pytest.raises(DataError, match=f"{text}: not the train text of this run.*--data"):
        resume(tmp_path / "run")
    assert tree(tmp_path / "run") == before
    text.unlink()
    with pytest.raises(DataError, match=f"{text}: cannot be read"):
        resume(tmp_path / "run")
    moved = tmp_path / "moved.txt"
    moved.write_bytes(original)
    assert resume(tmp_path / "run", changes={"data.files": [str(moved)]}).finished


def test_changed_validation_text_is_refused_and_named(tiny, tmp_path):
    held_out = tmp_path / "held-out.txt"
    held_out.write_bytes(b"held out " * 9)
    train(tiny({"data.val_files": [str(held_out)]}), tmp_path / "run", stop_at=3)
    with pytest.raises(DataError, match=r"no file: not the validation text of this run.*--val-data"):
        resume(tmp_path / "run", changes={"data.val_files": []})
    held_out.write_bytes(b"held in. " * 9)
    with pytest.raises(DataError, match=f"{held_out}: not the validation text"):
        resume(tmp_path / "run")


# Logs and checkpoints that do not agree (R07)


def test_rows_after_the_checkpoint_and_torn_lines_are_dropped(tiny, tmp_path, timeless, rows):
    """R07: a checkpoint every 5 steps, killed in the middle of writing row 9."""
    config = tiny({"train.steps": 12, "train.checkpoint_every": 5, "train.sample_every": 2})
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(config, straight)

    class Killed(Exception):
        pass

    def kill(event):
        if event["event"] == "step" and event["step"] == 8:
            raise Killed

    with pytest.raises(Killed):
        train(config, run, observer=kill)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    for name in ("metrics", "events", "samples"):
        log = run / f"{name}.jsonl"
        log.write_bytes(log.read_bytes() + b'{"step": 9, "loss": 3.1')
    resume(run)
    assert [row["step"] for row in rows(run)] == list(range(1, 13))
    for log in ("metrics", "samples"):
        assert timeless(run, log) == timeless(straight, log)
    kinds = [row["event"] for row in rows(run, "events")]
    assert kinds.count("resume") == kinds.count("finished") == kinds.count("start") == 1
    assert checkpoint_at(run, 12).read_bytes() == checkpoint_at(straight, 12).read_bytes()


def test_a_log_older_than_its_checkpoint_is_gone_on_with(tiny, tmp_path, rows):
    """R07: rows that a power cut took are not invented."""
    train(tiny(), tmp_path / "run", stop_at=4)
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "run/samples.jsonl").unlink()
    resume(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 5, 6]


def test_a_run_can_go_on_from_an_earlier_checkpoint(tiny, tmp_path, timeless, all_verify, monkeypatch):
    config = tiny({"train.checkpoint_every": 2, "train.steps": 8})
    run = tmp_path / "run"
    train(config, run)
    straight = tmp_path / "straight"
    shutil.copytree(run, straight)
    monkeypatch.chdir(run / "checkpoints")
    result = resume("step-00000002.h5", stop_at=3)
    # What came after it is out of the way, or the next resume would take it for the newest.
    assert all_verify(run) == [0, 2, 3]
    assert result.checkpoint == checkpoint_at(run, 3)
    aside = sorted(path.name for path in (run / "checkpoints/set-aside/run-001").iterdir())
    assert aside == [f"step-{step:08d}.h5{end}" for step in (4, 6, 8) for end in ("", ".md5")]
    assert [row["step"] for row in timeless(run)] == [1, 2, 3]
    assert resume(run).step == 8
    assert timeless(run) == timeless(straight)
    assert checkpoint_at(run, 8).read_bytes() == checkpoint_at(straight, 8).read_bytes()


def test_a_damaged_newest_checkpoint_is_named_and_so_is_the_one_before_it(tiny, tmp_path):
    train(tiny({"train.checkpoint_every": 2}), tmp_path / "run", stop_at=5)
    newest, before = checkpoint_at(tmp_path / "run", 5), checkpoint_at(tmp_path / "run", 4)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    state = tree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"^{newest}: .*--resume {before}$"):
        resume(tmp_path / "run")
    assert tree(tmp_path / "run") == state
    assert resume(before).finished


def test_what_is_no_run_is_refused(tiny, tmp_path, text):
    train(tiny({"train.steps": 1}), tmp_path / "run")
    shutil.copy(checkpoint_at(tmp_path / "run", 1), tmp_path / "alone.h5")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "empty", text, tmp_path / "alone.h5"):
        with pytest.raises(RunDirectoryError):
            resume(path)
    assert not (tmp_path / "missing").exists()
    assert not any((tmp_path / "empty").iterdir())


def test_a_run_in_use_cannot_be_resumed(tiny, tmp_path):
    """C13."""
    refused = []

    def intrude(event):
        if event["event"] == "step" and event["step"] == 4:
            with pytest.raises(RunDirectoryError, match="in use by process") as error:
                resume(tmp_path / "run")
            refused.append(error)

    train(tiny(), tmp_path / "run", stop_at=3)
    assert resume(tmp_path / "run", observer=intrude).finished
    assert len(refused) == 1


def test_stale_temporary_files_are_removed_and_those_of_others_stay(tiny, tmp_path, all_verify):
    """C10."""
    train(tiny(), tmp_path / "run", stop_at=3)
    folder = tmp_path / "run/checkpoints"
    for name in (".step-00000003.h5.999999999.tmp", ".step-00000003.h5.md5.999999999.tmp"):
        (folder / name).write_bytes(b"half")
    (folder / ".step-00000003.h5.1.tmp").write_bytes(b"process 1 lives")
    resume(tmp_path / "run")
    assert [path.name for path in folder.glob(".*")] == [".step-00000003.h5.1.tmp"]


def test_only_the_configuration_of_the_checkpoint_counts(tiny, tmp_path):
    """R05: not the file in the directory, which a person may have edited."""
    train(tiny(), tmp_path / "run", stop_at=3)
    kept = tmp_path / "run/config.toml"
    kept.write_text(kept.read_text().replace("lr = 0.02", "lr = 0.5"))
    resume(tmp_path / "run")
    assert configuration.load(file=kept).schedule.lr == 0.02


def test_each_branch_that_is_set_aside_is_kept(tiny, tmp_path):
    run = tmp_path / "run"
    train(tiny({"train.checkpoint_every": 2}), run)
    for lr in (1e-2, 1e-3):
        resume(checkpoint_at(run, 2), changes={"schedule.lr": lr, "schedule.min_lr": 1e-3}, override=True)
    kept = sorted((run / "checkpoints" / "set-aside").glob("*/step-00000006.h5"))
    assert [path.parent.name for path in kept] == ["run-001", "run-002"]
    assert [load_checkpoint(path).config.schedule.lr for path in kept] == [2e-2, 1e-2]


def test_a_run_on_standard_input_may_be_moved(tiny, tmp_path, text, monkeypatch):
    with open(text, "rb") as raw:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        train(tiny({"data.files": ("-",)}), tmp_path / "run", stop_at=2)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert resume(tmp_path / "moved").finished
