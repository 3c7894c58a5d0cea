"""A run from its first step to its last: what lies in its directory, when things happen, how it fails."""

import json
import math
import os
import subprocess
import sys
import threading
import tomllib

import numpy as np
import pytest

from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, verify_checkpoint
from gru_ref.checkpoint.find import checkpoints_of
from gru_ref.data.windows import Windows
from gru_ref.errors import ConfigError, DataError, RunDirectoryError, RunError
from gru_ref.models.gru_lm import GRULM
from gru_ref.schedules import learning_rate
from gru_ref.training import Stop, resume, train
from gru_ref.training.evaluation import evaluate
from gru_ref.training.run_directory import RunDirectory, next_free
from gru_ref.training.step import train_step
from gru_ref.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("short_samples")


def events_of(rows, run, kind):
    return [row for row in rows(run, "events") if row["event"] == kind]


def checkpoint_at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.h5"


@pytest.fixture
def poison(monkeypatch):
    """poison(3, 4) makes the loss of attempts 3 and 4 NaN."""

    def install(*attempts):
        forward, count = GRULM.forward, iter(range(1, 10_000))

        def poisoned(self, ids, state=None, *, dropout_step=None, **options):
            logits, state, cache = forward(self, ids, state, dropout_step=dropout_step, **options)
            if dropout_step is not None and next(count) in attempts:
                logits = logits * np.nan
            return logits, state, cache

        monkeypatch.setattr(GRULM, "forward", poisoned)

    return install


# What is written


def test_a_run_directory_holds_what_the_design_page_says(tiny, tmp_path, rows, all_verify):
    config = tiny({"train.checkpoint_every": 4, "train.steps": 6})
    seen = []
    result = train(config, tmp_path / "run", observer=seen.append)
    run = tmp_path / "run"
    assert result.path == run
    assert (result.step, result.finished, result.checkpoint) == (6, True, checkpoint_at(run, 6))
    assert {path.name for path in run.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "events.jsonl",
        "samples.jsonl",
        "checkpoints",
        "run.lock",
    }
    assert all_verify(run) == [0, 4, 6]
    assert all(path.with_name(path.name + ".md5").exists() for path in checkpoints_of(run))
    kept = configuration.load(file=run / "config.toml")
    assert kept == load_checkpoint(checkpoint_at(run, 6)).config
    assert kept.model.vocab_size == 100
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(run, "samples")] == [0, 6]
    kinds = [row["event"] for row in rows(run, "events")]
    assert kinds == [
        "start",
        "evaluation",
        "before_training",
        "checkpoint",
        "checkpoint",
        "evaluation",
        "checkpoint",
        "finished",
    ]
    # The observer sees every event, and steps and samples beside them.
    assert [event["event"] for event in seen if event["event"] not in ("step", "sample")] == kinds
    assert [event["step"] for event in seen if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert result.evaluation.loss == events_of(rows, run, "evaluation")[-1]["loss"]


def test_a_row_says_what_the_step_did(tiny, tmp_path, rows):
    config = tiny({"train.accumulation": 3, "schedule.warmup": 2, "schedule.decay": 3, "train.steps": 7})
    train(config, tmp_path / "run")
    table = rows(tmp_path / "run")
    assert [row["lr"] for row in table] == [learning_rate(config.schedule, s, 7) for s in range(1, 8)]
    assert table[0]["lr"] == 1e-2
    assert table[-1]["lr"] == 2e-3
    assert [row["tokens"] for row in table] == [s * 3 * 2 * 8 for s in range(1, 8)]
    assert all(row["bpb"] == pytest.approx(row["loss"] / math.log(2), rel=1e-12) for row in table)
    assert all(row["skipped"] == 0 and row["epoch"] == 0 and row["grad_norm"] > 0 for row in table)
    speeds = [row["tokens"] / row["step"] / row["seconds"] for row in table]
    assert [row["tokens_per_second"] for row in table] == pytest.approx(speeds, rel=1e-12)


def test_a_step_gets_what_the_configuration_says(tiny, monkeypatch):
    calls = []

    def spy(model, optimizer, micro_batches, **options):
        calls.append((micro_batches, options))
        return train_step(model, optimizer, micro_batches, **options)

    monkeypatch.setattr("gru_ref.training.trainer.train_step", spy)
    options = {"train.accumulation": 3, "train.clip_norm": 0.7, "train.label_smoothing": 0.1}
    options |= {"train.segments": 4}
    trainer = Trainer.start(tiny({"train.seed": 9, "schedule.warmup": 5, "schedule.decay": 0, **options}))
    windows = Windows(trainer.data.train.tokens, 8, seed=9)
    for step in range(2):
        trainer.advance()
        micro_batches, options = calls[step]
        assert options == {
            "lr": 2e-2 * (step + 1) / 5,
            "clip_norm": 0.7,
            "label_smoothing": 0.1,
            "micro_step": 3 * step,
            "loss_scale": None,
            "segments": 4,
            "state": None,
        }
        inputs, targets = windows.batch(windows.indices(6 * step, 6))
        assert np.array_equal(np.concatenate([x for x, _ in micro_batches], axis=1), inputs)
        assert np.array_equal(np.concatenate([y for _, y in micro_batches], axis=1), targets)
        assert [x.shape for x, _ in micro_batches] == [(8, 2)] * 3


def test_the_first_update_moves_the_weights_however_long_the_warm_up(tiny, tmp_path, rows):
    """N12: a learning rate of 0 at the first step would waste it."""
    train(tiny({"train.steps": 1, "schedule.warmup": 10, "schedule.decay": 0}), tmp_path / "run")
    assert [row["lr"] for row in rows(tmp_path / "run")] == [2e-2 / 10]
    before, after = (load_checkpoint(checkpoint_at(tmp_path / "run", step)) for step in (0, 1))
    for name in before.model:
        assert not np.array_equal(before.model[name], after.model[name]), name


def test_the_checkpoint_before_training_holds_the_initial_weights_only(tiny, tmp_path):
    config = tiny({"train.steps": 1})
    train(config, tmp_path / "run")
    first, last = (load_checkpoint(checkpoint_at(tmp_path / "run", step)) for step in (0, 1))
    model = GRULM(first.config.model, seed=config.train.seed)
    model.initialise()
    assert all(np.array_equal(first.model[name], w) for name, w in model.arena.param.items())
    assert first.moments == {}
    assert first.optimizer == {"step": 0, "mu_product": 1.0}
    assert set(last.moments) == {"m", "v"}
    sizes = [os.path.getsize(checkpoint_at(tmp_path / "run", step)) for step in (0, 1)]
    assert sizes[1] > 2 * sizes[0]


def test_evaluations_samples_and_checkpoints_come_at_their_steps(tiny, tmp_path, rows, all_verify):
    cadence = {"train.eval_every": 2, "train.sample_every": 3, "train.checkpoint_every": 5}
    train(tiny({"train.steps": 7, **cadence}), tmp_path / "run")
    run = tmp_path / "run"
    assert [row["step"] for row in events_of(rows, run, "evaluation")] == [0, 2, 4, 6, 7]
    assert [row["step"] for row in rows(run, "samples")] == [0, 3, 6, 7]
    assert [row["step"] for row in events_of(rows, run, "checkpoint")] == [0, 5, 7]
    assert all_verify(run) == [0, 5, 7]
    best = min(events_of(rows, run, "evaluation"), key=lambda row: row["loss"])
    scalars = load_checkpoint(checkpoint_at(run, 7)).trainer
    assert (scalars["best_loss"], scalars["best_step"]) == (best["loss"], best["step"])


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_newest_checkpoints_and_the_best_are_kept(tiny, tmp_path, all_verify, monkeypatch, keep):
    losses = iter([5.0, 4.0, 1.0, 3.0, 2.0, 2.5])  # the best is after step 2
    evaluated = Trainer.evaluate

    def scripted(self):
        best = self.best or (math.inf, 0)
        evaluation = evaluated(self)
        self.best = min(best, (next(losses), self.step))
        return evaluation

    monkeypatch.setattr(Trainer, "evaluate", scripted)
    every = {"train.eval_every": 1, "train.checkpoint_every": 1, "train.keep_checkpoints": keep}
    train(tiny({"train.steps": 5, **every}), tmp_path / "run")
    assert all_verify(tmp_path / "run") == sorted({2, *range(6 - keep, 6)})
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2 * (1 + keep)  # with sidecars


def test_two_runs_with_one_seed_write_the_same_bytes(tiny, tmp_path, timeless):
    config = tiny({"model.dropout": 0.2, "train.checkpoint_every": 3})
    for name in ("a", "b"):
        train(config, tmp_path / name)
    train(tiny({"model.dropout": 0.2, "train.checkpoint_every": 3, "train.seed": 2}), tmp_path / "c")
    for step in (0, 3, 6):
        a, b, c = (checkpoint_at(tmp_path / name, step).read_bytes() for name in "abc")
        assert a == b
        assert a != c
    for log in ("metrics", "events", "samples"):
        assert timeless(tmp_path / "a", log) == timeless(tmp_path / "b", log)
    assert (tmp_path / "a/config.toml").read_bytes() == (tmp_path / "b/config.toml").read_bytes()


# Length


@pytest.mark.parametrize(
    ("epochs", "windows", "steps"), [(1.0, 10, 3), (3.0, 30, 8), (0.5, 5, 2), (0.0, 10, 3)]
)
def test_epochs_are_whole_even_where_the_last_step_is_partial(
    tiny, tmp_path, text, rows, monkeypatch, epochs, windows, steps
):
    """10 windows an epoch, 4 a step; no length at all means one epoch."""
    text.write_bytes(text.read_bytes()[:81])
    used = []
    indices = Windows.indices
    monkeypatch.setattr(Windows, "indices", lambda self, *args: used.append(indices(self, *args)) or used[-1])
    length = {"train.steps": 0, "train.epochs": epochs, "train.accumulation": 2, "schedule.decay": 1}
    config = tiny({"data.val_fraction": 0, **length})
    result = train(config, tmp_path / "run")
    assert (result.step, result.evaluation) == (steps, None)
    assert [len(step) for step in used] == [4] * (steps - 1) + [windows - 4 * (steps - 1)]
    flat = np.concatenate(used)
    for epoch in range(windows // 10):
        assert sorted(flat[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [4 * s // 10 for s in range(steps)]
    assert rows(tmp_path / "run")[-1]["lr"] == config.schedule.min_lr
    assert rows(tmp_path / "run")[-1]["tokens"] == 8 * windows


def test_a_skipped_step_of_the_last_epoch_does_not_train_on_nothing(tiny, tmp_path, text, rows, poison):
    """Its windows are used up, so the run ends one update short, and not with an update of no gradient."""
    text.write_bytes(text.read_bytes()[:81])
    poison(2, 5)  # also the very last attempt, after which the run must still be saved
    config = tiny({"data.val_fraction": 0, "train.steps": 0, "train.epochs": 1.0})
    result = train(config, tmp_path / "run")
    assert (result.step, result.finished) == (3, True)
    assert [(row["step"], row["skipped"]) for row in rows(tmp_path / "run")] == [(1, 0), (2, 1), (3, 1)]
    assert [event["step"] for event in events_of(rows, tmp_path / "run", "skipped")] == [2, 4]
    assert all(row["tokens_per_second"] > 0 for row in rows(tmp_path / "run"))
    assert load_checkpoint(result.checkpoint).trainer["cursor"] == 10


def test_a_text_too_short_for_a_window_is_an_error_that_leaves_nothing(tiny, tmp_path, text):
    """D01."""
    for size, fraction, message in (
        (8, 0, "the training text: .*has 8 tokens, needs at least T\\+1 = 9"),
        (60, 0.1, "the validation text: .*has 6 tokens, needs .*--val-fraction 0"),
    ):
        text.write_bytes(b"x" * size)
        with pytest.raises(DataError, match=message):
            train(tiny({"data.val_fraction": fraction}), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    text.write_bytes(b"x" * 9)
    assert train(tiny({"data.val_fraction": 0, "train.steps": 2}), tmp_path / "run").finished


# What is not finite


def test_a_skipped_step_is_counted_and_consumes_its_batch(tiny, tmp_path, rows, poison, all_verify):
    poison(3)
    train(tiny({"train.checkpoint_every": 1, "train.steps": 4}), tmp_path / "run")
    run = tmp_path / "run"
    table = rows(run)
    assert [(row["step"], row["skipped"]) for row in table] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [row["tokens"] for row in table] == [16, 32, 48, 64]
    (skipped,) = events_of(rows, run, "skipped")
    assert (skipped["step"], skipped["in_a_row"]) == (3, 1)
    assert skipped["nonfinite"].startswith("gradient of ")
    scalars = load_checkpoint(checkpoint_at(run, 4)).trainer
    assert (scalars["cursor"], scalars["skipped"], scalars["skipped_in_a_row"]) == (10, 1, 0)
    assert all_verify(run) == [0, 1, 2, 3, 4]


def test_too_many_skipped_steps_end_the_run_and_name_the_last_good_checkpoint(
    tiny, tmp_path, rows, poison, all_verify
):
    """C09."""
    poison(4, 5, 6, 7, 8)
    last = checkpoint_at(tmp_path / "run", 2)
    with pytest.raises(RunError, match=f"3 steps in a row .*after step 3.* checkpoint is {last}; a lower"):
        train(tiny({"train.checkpoint_every": 2, "train.max_skipped": 3}), tmp_path / "run")
    assert all_verify(tmp_path / "run") == [0, 2]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_a_stop_does_not_wait_for_a_skipped_step_and_loses_nothing(tiny, tmp_path, rows, poison):
    """The batch that was skipped is used up: the checkpoint of the same step is written anew."""
    poison(3)
    stop = Stop()
    result = train(
        tiny({"train.checkpoint_every": 2}),
        tmp_path / "run",
        stop=stop,
        observer=lambda event: stop.request() if event["event"] == "skipped" else None,
    )
    assert (result.step, result.finished) == (2, False)
    assert load_checkpoint(result.checkpoint).trainer["cursor"] == 6
    assert resume(tmp_path / "run").finished
    poison(3)
    train(tiny({"train.checkpoint_every": 2}), tmp_path / "straight")
    ends = [checkpoint_at(tmp_path / run, 6).read_bytes() for run in ("run", "straight")]
    assert ends[0] == ends[1]


def test_weights_that_overflow_are_never_saved(tiny, tmp_path, all_verify):
    """An absurd learning rate: the update itself overflows, in a step that was to be saved."""
    config = tiny({"schedule.lr": 1e39, "schedule.warmup": 0, "train.checkpoint_every": 1})
    last = checkpoint_at(tmp_path / "run", 0)
    with pytest.raises(RunError, match=f"overflowed parameter .*; stopped after step 0.* is {last}; a lower"):
        train(config, tmp_path / "run")
    assert all_verify(tmp_path / "run") == [0]


def test_a_model_that_predicts_nan_is_said_to_know_nothing(tiny, tmp_path):
    """Comparing with NaN is always false, which must not read as a top-1 of 100 %."""
    trainer = Trainer.start(tiny())
    trainer.model.arena.params[...] = np.nan
    evaluation = evaluate(trainer.model, trainer.data.train, batch_size=4)
    assert math.isnan(evaluation.loss)
    assert (evaluation.top1, evaluation.top5) == (0, 0)


# Figures


def test_an_evaluation_does_not_depend_on_how_it_is_batched(tiny):
    """N11: the partial last window counts by its tokens."""
    trainer = Trainer.start(tiny())
    figures = [evaluate(trainer.model, trainer.data.train, batch_size=B) for B in (1, 3, 7, 1000)]
    assert len({(f.tokens, f.top1, f.top5) for f in figures}) == 1
    assert figures[0].tokens == len(trainer.data.train.tokens) - 1
    assert all(f.loss == pytest.approx(figures[0].loss, rel=1e-6) for f in figures)


def test_a_uniform_model_needs_log2_of_the_vocabulary_bits_a_byte(tiny):
    """N11: 95 + 5 symbols are log2 100 = 6.6439 bits."""
    trainer = Trainer.start(tiny())
    trainer.model.arena.params[...] = 0
    tokens = trainer.data.token_bytes
    evaluation = evaluate(trainer.model, trainer.data.train, batch_size=4, token_bytes=tokens)
    assert evaluation.bpb == pytest.approx(math.log2(100), rel=1e-6)
    assert evaluation.bytes == evaluation.tokens


def test_an_evaluation_of_part_of_the_text_takes_evenly_spread_windows(tiny, monkeypatch):
    trainer = Trainer.start(tiny())
    windows, chosen = trainer.data.train, []
    batch = windows.batch
    monkeypatch.setattr(windows, "batch", lambda indices: chosen.extend(indices) or batch(indices))
    evaluation = evaluate(trainer.model, windows, batch_size=2, max_tokens=24)
    assert chosen == [0, (len(windows) - 1) // 2, len(windows) - 1]
    assert evaluation.tokens <= 24


def test_the_loss_before_training_is_that_of_the_vocabulary(tiny, tmp_path, rows):
    for fraction in (0.1, 0):
        run = tmp_path / f"run-{fraction}"
        train(tiny({"train.steps": 1, "data.val_fraction": fraction}), run)
        (event,) = events_of(rows, run, "before_training")
        assert event["ln_vocab"] == math.log(100)
        assert event["loss"] == pytest.approx(event["ln_vocab"], abs=0.15)


# Every setting trains

SETTINGS = {
    "nadam": {},
    "adamw": {"optimizer.name": "adamw", "optimizer.weight_decay": 0.01},
    "L2": {"optimizer.decoupled": False, "optimizer.weight_decay": 1e-4},
    "keras": {"optimizer.variant": "keras"},
    "constant-momentum": {"optimizer.variant": "constant"},
    "label-smoothing": {"train.label_smoothing": 0.1},
    "bf16": {"run.precision": "bf16"},
    "fp16": {"run.precision": "fp16"},
    "tied": {"model.tied": True},
    "reset-before": {"model.reset_after": False},
    "carry-state": {"train.carry_state": True},
    "dropout": {"model.dropout": 0.1, "model.layers": 2},
    "padded": {"model.vocab_padding": 64, "model.embedding": 5},
    "bytes": {"data.tokenizer": "bytes"},
    "numba": {"run.kernels": "numba"},
    "cosine": {"schedule.name": "cosine", "schedule.warmup": 2},
    "no-clipping": {"train.clip_norm": 0},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_lowers_the_loss_and_verifies(tiny, tmp_path, rows, all_verify, setting):
    config = tiny({"train.steps": 12, "train.batch_size": 4, **SETTINGS[setting]})
    result = train(config, tmp_path / "run")
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    first = events_of(rows, tmp_path / "run", "evaluation")[0]
    assert result.evaluation.loss < first["loss"] - 0.3
    assert all_verify(tmp_path / "run") == [0, 12]
    bpb = [row["bpb"] for row in rows(tmp_path / "run")]
    assert (None in bpb) is (setting == "label-smoothing")  # its loss is not one of the text alone


# The directory


def test_a_directory_with_a_run_is_refused_and_left_alone(tiny, tmp_path):
    """C13."""
    train(tiny({"train.steps": 1}), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    del before[tmp_path / "run/run.lock"]
    with pytest.raises(RunDirectoryError, match=r"holds a run already.*--resume"):
        train(tiny({"train.steps": 2}), tmp_path / "run")
    assert all(path.read_bytes() == content for path, content in before.items())
    (tmp_path / "run/config.toml").unlink()  # what is left is still a run
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        train(tiny(), tmp_path / "run")


@pytest.mark.parametrize("name", ["config.toml", "events.jsonl", "samples.jsonl"])
def test_a_directory_with_someones_own_file_of_that_name_is_refused(tiny, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunDirectoryError, match=f"holds {name}, which would be overwritten"):
        train(tiny(), tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_with_other_files_is_used_and_they_stay(tiny, tmp_path, text):
    assert train(tiny({"train.steps": 1}), tmp_path).finished
    assert text.exists()


@pytest.mark.parametrize("early", [False, True])
def test_a_run_killed_before_its_first_checkpoint_can_be_started_again(
    tiny, tmp_path, rows, all_verify, early
):
    """L03: neither `--resume`, which has nothing to go on from, nor `--out` may be the end of it."""

    def killed(event):
        if event["event"] == "sample":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run", observer=killed)
    assert (tmp_path / "run/config.toml").exists()
    if early:
        (tmp_path / "run/config.toml").unlink()
        (tmp_path / "run/samples.jsonl").unlink()
    (tmp_path / "run/checkpoints/.step-00000000.h5.999999999.tmp").write_bytes(b"half")
    train(tiny({"train.steps": 2}), tmp_path / "run")
    assert all_verify(tmp_path / "run") == [0, 2]
    assert [row["event"] for row in rows(tmp_path / "run", "events")].count("start") == 1
    assert [row["step"] for row in rows(tmp_path / "run", "samples")] == [0, 2]


def test_a_start_that_fails_leaves_no_directory(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for changes, error in (
        ({"data.files": ["missing.txt"]}, DataError),
        ({"model.vocab_size": 7}, DataError),
        ({"schedule.warmup": 5, "schedule.decay": 5}, ConfigError),
    ):
        with pytest.raises(error):
            train(tiny(changes))
        with pytest.raises(error):
            train(tiny(changes), "named")
        assert not (tmp_path / "named").exists()
    assert next_free().name == "run-001"
    assert train(tiny({"train.steps": 1})).path.name == "run-001"
    assert train(tiny({"train.steps": 1})).path.name == "run-002"


def test_an_out_below_a_regular_file_is_refused_before_anything_else(tiny, text):
    """C12."""
    for out in (text / "run", text):
        with pytest.raises(RunDirectoryError, match=f"{out}: cannot make the run directory"):
            train(tiny({"data.files": ["missing.txt"]}), out)


def test_of_many_that_want_a_directory_one_gets_it(tmp_path):
    """C13: the lock, not the look before it, decides."""
    for attempt in range(10):
        start, done = threading.Barrier(4), threading.Barrier(4)
        outcomes = []

        def contend(path, start=start, done=done, outcomes=outcomes):
            start.wait()
            try:
                with RunDirectory.create(path):
                    outcomes.append("won")
                    done.wait()
            except RunDirectoryError as error:
                outcomes.append(str(error))
                done.wait()

        threads = [threading.Thread(target=contend, args=(tmp_path / f"run-{attempt}",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("won") == 1
        others = [outcome for outcome in outcomes if outcome != "won"]
        assert all("in use by process" in outcome for outcome in others)


def test_a_dead_owner_does_not_keep_the_directory(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.lock").write_text("1\n")
    assert train(tiny({"train.steps": 1}), tmp_path / "run").finished
    assert (tmp_path / "run/run.lock").read_text() == f"{os.getpid()}\n"


def test_odd_names_survive_the_configuration(tiny, tmp_path, all_verify):
    """L04: spaces, quotes, other scripts, a leading minus, and a byte that is not UTF-8."""
    folder = tmp_path / "a b" / "é日'\"" / os.fsdecode(b"-x\xff")
    folder.mkdir(parents=True)
    text = folder / os.fsdecode(b"t\xfe.txt")
    text.write_bytes(b"some text, and some more of it. " * 20)
    train(tiny({"data.files": [str(text)], "train.steps": 1}), folder / "run")
    assert all_verify(folder / "run") == [0, 1]
    assert configuration.load(file=folder / "run/config.toml").data.files == (str(text),)
    with pytest.raises(UnicodeDecodeError):
        tomllib.loads((folder / "run/config.toml").read_text("utf-8"))  # it is really in there


# A full disk

CHILD = """
import json, resource, signal, sys
from gru_ref import config
from gru_ref.errors import GruRefError
from gru_ref.training import train

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    train(config.load(options=json.loads(sys.argv[3])), sys.argv[2])
except GruRefError as error:
    sys.exit(f"{error.exit_code} {type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("full_at", ["checkpoint", "log"])
def test_a_full_disk_is_one_line_and_the_older_checkpoint_is_whole(tiny, tmp_path, all_verify, full_at):
    """C12: the second checkpoint is three times the first one; or a row of the log is the one too many."""
    options = {f"{t}.{k}": v for t, table in tiny().to_dict().items() for k, v in table.items()}
    options |= {"train.checkpoint_every": 2 if full_at == "checkpoint" else 0, "train.steps": 200}
    train(tiny({"train.steps": 1}), tmp_path / "trial")
    limit = os.path.getsize(checkpoint_at(tmp_path / "trial", 0)) + 1000
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(limit), tmp_path / "run", json.dumps(options)],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert child.returncode == 1
    culprit = "step-00000002.h5: the checkpoint" if full_at == "checkpoint" else "metrics.jsonl:"
    assert child.stderr.startswith("1 RunError: ")
    assert f"{culprit} cannot be written: File too large" in child.stderr
    assert len(child.stderr.splitlines()) == 1
    assert all_verify(tmp_path / "run") == [0]
    assert verify_checkpoint(checkpoint_at(tmp_path / "run", 0)).notes == []


# A configuration built by hand


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("optimizer", {"name": "sgd"}), "optimizer.name must be one of nadam, adamw, not 'sgd'"),
        (("schedule", {"name": "foo"}), "schedule.name must be one of"),
        (("train", {"batch_size": 0}), "train.batch_size must be at least 1"),
        (("model", {"dropout": 1.5}), "model.dropout must be at least 0 and below 1"),
        (("data", {"files": ("",)}), "an empty name is no file"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_written(tiny, tmp_path, change, message):
    table, values = change
    with pytest.raises(ConfigError, match=message):
        train(tiny().replace(table, **values), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must be a gru_ref\.Config, not str; see gru_ref\.load_config"):
        train("x.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_files_of_someone_elses_is_refused_and_left_alone(tiny, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"holds config\.toml, which would be overwritten"):
        train(tiny(), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.toml"]
