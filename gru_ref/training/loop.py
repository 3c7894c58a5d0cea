"""From a configuration to a finished run directory: the loop, the resume, and when things happen.

After each step, in this order: its row in metrics.jsonl, an evaluation, a sample and a checkpoint where they
are due, and only then the question whether to stop. So a run that was stopped and resumed has done exactly
what one that never stopped had done by then.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gru_ref import config as configuration
from gru_ref import threads
from gru_ref.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gru_ref.checkpoint.find import checkpoints_of, newest_checkpoint
from gru_ref.checkpoint.restore import restore_tokenizer
from gru_ref.config import Config
from gru_ref.data.corpus import encode_files
from gru_ref.errors import CheckpointError, ConfigError, RunDirectoryError, RunError
from gru_ref.training.evaluation import Evaluation
from gru_ref.training.run_directory import (
    CONFIG,
    METRICS,
    SAMPLES,
    STDIN,
    STDIN_VALIDATION,
    RunDirectory,
    next_free,
)
from gru_ref.training.step import StepResult
from gru_ref.training.trainer import Trainer
from gru_ref.training.warm_up import warm_up
from gru_ref.types import Event, Observer


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands after `train` or `resume`."""

    path: Path  # the run directory
    step: int
    finished: bool  # False where it was stopped; `resume` goes on
    checkpoint: Path | None  # the last one written
    evaluation: Evaluation | None  # the last one, on the validation text


class Stop:
    """Ask a running loop to end after its current step: call `request`, say from a signal handler."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str = "requested") -> None:
        """Stop after the current step, with a checkpoint."""
        self.reason = reason


def train(
    config: Config | None = None,
    out: str | Path | None = None,
    *,
    init: str | Path | None = None,
    observer: Observer | None = None,
    stop: Stop | None = None,
    stop_at: int = 0,
) -> TrainResult:
    """Train a new run and write its directory.

    config: `gru_ref.config.load(…)`; None trains the default preset. out: the run directory, new or without
    a run; None takes the first free runs/run-NNN. init: a checkpoint, or a run for its newest, to start with:
    its weights, its tokenizer and its model, whatever `config` says of them, but with the model.dropout of
    `config`; the optimizer is new and the step 0. observer: called with every event and step. stop: see
    `Stop`. stop_at: leave after this step, with a checkpoint, as if stopped there.
    Raises the family of gru_ref/errors.py.
    """
    if out == "":
        raise RunDirectoryError("--out is empty; name a new directory, or leave it out")
    config = config or configuration.load()
    first = None
    if init is not None:
        init = newest_checkpoint(os.path.abspath(init))
        first = load_checkpoint(init, weights_only=True)
        config = configuration.started_from(configuration.validated(config), first.config)
    config = _resolve(config)
    path = next_free() if out is None else Path(out)
    with RunDirectory.create(path) as run, _threads(config):
        trainer = Trainer.start(_keep_stdin(config, run, first), first)
        first = None  # its weights are in the model now, and need not be in memory twice
        loop = _Loop(run, trainer, observer, stop or Stop(), stop_at)
        return loop.run_from_start(init)


def resume(
    path: str | Path,
    *,
    changes: dict[str, Any] | None = None,
    override: bool = False,
    observer: Observer | None = None,
    stop: Stop | None = None,
    stop_at: int = 0,
) -> TrainResult:
    """Go on with a run from its newest checkpoint, or from the checkpoint file given.

    changes: dotted configuration keys with new values. Free ones (config.FREE_ON_RESUME) are applied; fixed
    ones raise ConfigError; all others, such as the learning rate, need `override`. Going on from an earlier
    checkpoint moves the later ones to checkpoints/set-aside. A finished run is left as it is.
    """
    path = os.path.abspath(path)
    with RunDirectory.resume(_run_of(newest_checkpoint(path))) as run:
        checkpoint_path = newest_checkpoint(path)  # again, now that no one else can add one
        checkpoint = _at_home(_load(checkpoint_path), run)
        config = changed_config(checkpoint.config, changes or {}, override=override)
        with _threads(config):
            loop = _Loop(run, Trainer.restore(checkpoint, config), observer, stop or Stop(), stop_at)
            changed = configuration.differences(checkpoint.config, config)
            return loop.run_from_checkpoint(checkpoint_path, changed)


def _run_of(checkpoint: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    run = checkpoint.parent.parent
    if not (run / CONFIG).is_file():
        raise RunDirectoryError(
            f"{checkpoint}: lies in no run directory, so there is no run to go on with; "
            f"--init {checkpoint} starts a new one with its weights"
        )
    return run


def _load(path: Path) -> Checkpoint:
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        names = [other.name for other in checkpoints_of(path.parent.parent)]
        at = names.index(path.name) if path.name in names else 0
        hint = f"; to go on from the one before it: --resume {path.with_name(names[at - 1])}" if at else ""
        raise CheckpointError(f"{error}{hint}") from None


def _at_home(checkpoint: Checkpoint, run: RunDirectory) -> Checkpoint:
    """Text that was kept from standard input lies in the run directory, wherever that was moved."""
    for key, name in (("files", STDIN), ("val_files", STDIN_VALIDATION)):
        names = [os.path.basename(path) for path in getattr(checkpoint.config.data, key)]
        if names == [name] and (run.path / name).exists():
            kept = {key: (os.path.abspath(run.path / name),)}
            checkpoint = dataclasses.replace(checkpoint, config=checkpoint.config.replace("data", **kept))
    return checkpoint


def changed_config(config: Config, changes: dict[str, Any], *, override: bool = False) -> Config:
    """`config` with the changes that a resumed run may make; raises ConfigError for the others."""
    changed = configuration.merge(config, changes, "options")
    if "train.steps" in changes and changed.train.steps and "train.epochs" not in changes:
        changed = changed.replace("train", epochs=0.0)
    differences = configuration.differences(config, changed)
    for key, (old, new) in differences.items():
        if key in configuration.FIXED_ON_RESUME:
            raise ConfigError(f"{key} cannot change on resume ({old} -> {new}); start a new run for it")
        lanes = key in ("train.batch_size", "train.accumulation") and config.train.carry_state
        if lanes:
            raise ConfigError(f"{key} cannot change on resume where the state is carried ({old} -> {new})")
        implied = key == "train.epochs" and "train.epochs" not in changes
        if not (key in configuration.FREE_ON_RESUME or implied or override):
            raise ConfigError(
                f"{key} {old} -> {new} would change the run; add --override to do it all the same"
            )
    if "-" in (*changed.data.files, *changed.data.val_files):
        raise ConfigError("-: a resumed run cannot read standard input; name a file with the text")
    return _resolve(changed)


def _resolve(config: Config) -> Config:
    """Fill in what depends on this machine: the threads, and absolute paths so that a resume finds them."""
    config = configuration.validated(config)
    cores = config.run.threads or threads.available_cores()
    files, val_files = (
        tuple(name if name == "-" else os.path.abspath(name) for name in names)
        for names in (config.data.files, config.data.val_files)
    )
    vocab = os.path.abspath(config.data.vocab) if config.data.vocab else ""
    return config.replace("run", threads=cores).replace("data", files=files, val_files=val_files, vocab=vocab)


def _threads(config: Config) -> AbstractContextManager[None]:
    return threads.limited(config.run.threads, pool=config.run.kernels == "numba")


def _keep_stdin(config: Config, run: RunDirectory, init: Checkpoint | None) -> Config:
    """Standard input cannot be read again on resume: keep what came from it in the run directory."""
    tokenizer = config.data.tokenizer if init is None else restore_tokenizer(init)
    for key, name in (("files", STDIN), ("val_files", STDIN_VALIDATION)):
        files = getattr(config.data, key)
        if "-" in files:
            path = run.path / name
            encode_files(files, path, tokenizer, vocab=config.data.vocab, overwrite=True)
            config = config.replace("data", **{key: (os.path.abspath(path),)})
    return config


class _Loop:
    """One process's part of a run."""

    def __init__(
        self, run: RunDirectory, trainer: Trainer, observer: Observer | None, stop: Stop, stop_at: int
    ) -> None:
        self.run, self.trainer, self.stop, self.stop_at = run, trainer, stop, stop_at
        self.observer: Callable[[Event], None] = observer or (lambda event: None)
        self.saved: Path | None = None
        self.saved_cursor = trainer.cursor
        self.evaluation: Evaluation | None = None

    def run_from_start(self, init: str | Path | None = None) -> TrainResult:
        """Write the configuration, look at the model, untrained or of the checkpoint `init`, then train."""
        trainer = self.trainer
        self._event("start", init=None if init is None else str(init), **self._description())
        self.run.write_config(trainer.config)  # after the event, which tells it from someone's own file
        self._warm_up()
        self._evaluate()
        loss = self.evaluation.loss if self.evaluation else trainer.training_loss()
        ln_vocab = math.log(trainer.model.config.vocab_size)
        self._event("before_training", loss=loss, ln_vocab=ln_vocab if init is None else None)
        self._sample()
        self._save()
        return self._train()

    def run_from_checkpoint(self, path: Path, changed: dict[str, tuple[Any, Any]]) -> TrainResult:
        """Repair the logs, then train on; a finished run is left as it is."""
        trainer = self.trainer
        self.saved = path
        if trainer.finished:
            return self._result()
        set_aside = self.run.set_aside_after(trainer.step)
        self.run.forget_after(trainer.step)
        self.run.write_config(trainer.config)
        self._event(
            "resume",
            step=trainer.step,
            checkpoint=str(path),
            changed={key: list(values) for key, values in changed.items()},
            set_aside=set_aside,
            **self._description(),
        )
        self._warm_up()
        return self._train()

    def _warm_up(self) -> None:
        """Only shown: whether kernels were compiled or kept is not the run's doing."""
        started = time.perf_counter()
        kernels = warm_up(self.trainer.config, lambda: self.observer({"event": "compiling"}))
        if kernels:
            seconds = time.perf_counter() - started
            self.observer({"event": "compiled", "kernels": kernels, "seconds": seconds})

    def _train(self) -> TrainResult:
        trainer, config = self.trainer, self.trainer.config.train
        while not trainer.finished and not self._stopping():
            result = self._advance()
            if result.nonfinite is not None:
                self._skipped(result)
                if not trainer.finished:
                    continue
            last = trainer.finished
            if last or _due(trainer.step, config.eval_every):
                self._evaluate()
            if last or _due(trainer.step, config.sample_every):
                self._sample()
            if last or _due(trainer.step, config.checkpoint_every):
                self._save()
        if not trainer.finished:
            if self.saved_cursor != trainer.cursor:
                self._save()
            self._event("stopped", step=trainer.step, reason=self.stop.reason or f"--stop-at {self.stop_at}")
        else:
            self._event("finished", step=trainer.step, tokens=trainer.tokens)
        return self._result()

    def _stopping(self) -> bool:
        return self.stop.reason is not None or 0 < self.stop_at <= self.trainer.step

    def _advance(self) -> StepResult:
        try:
            row, result = self.trainer.advance()
        except RunError as error:
            raise self._giving_up(str(error)) from None
        if result.nonfinite is None:
            self.run.append(METRICS, row)
            self.observer({"event": "step", **row})
        return result

    def _skipped(self, result: StepResult) -> None:
        """A run that is only finding its loss scale goes on: that ends at scale 1."""
        trainer, culprit, lowered = self.trainer, result.nonfinite, result.loss_scale_lowered
        self._event(
            "skipped",
            step=trainer.step + 1,
            nonfinite=culprit,
            skipped=trainer.skipped,
            in_a_row=trainer.skipped_in_a_row,
            loss_scale=trainer.loss_scale.value if trainer.loss_scale and lowered else None,
        )
        if not lowered and trainer.skipped_in_a_row >= trainer.config.train.max_skipped:
            raise self._giving_up(
                f"{trainer.skipped_in_a_row} steps in a row were not finite (last: {culprit})"
            )

    def _giving_up(self, problem: str) -> RunError:
        trainer = self.trainer
        scale = None if trainer.loss_scale is None else trainer.loss_scale.value
        self._event("failed", step=trainer.step, reason=problem, skipped=trainer.skipped, loss_scale=scale)
        return RunError(
            f"{problem}; stopped after step {self.trainer.step}. The last good checkpoint is {self.saved}; "
            "a lower schedule.lr or train.clip_norm may help"
        )

    def _evaluate(self) -> None:
        started = time.perf_counter()
        self.evaluation = self.trainer.evaluate()
        if self.evaluation is not None:
            seconds = time.perf_counter() - started
            self._event("evaluation", step=self.trainer.step, **self.evaluation.to_dict(), seconds=seconds)

    def _sample(self) -> None:
        sample = {"step": self.trainer.step, "text": self.trainer.sample()}
        self.run.append(SAMPLES, sample)
        self.observer({"event": "sample", **sample})

    def _save(self) -> None:
        started = time.perf_counter()
        path = self.run.checkpoint_path(self.trainer.step)
        n_bytes = save_checkpoint(path, self.trainer.checkpoint())
        self.saved, self.saved_cursor = path, self.trainer.cursor
        seconds = time.perf_counter() - started
        self._event("checkpoint", step=self.trainer.step, path=str(path), bytes=n_bytes, seconds=seconds)
        self._prune()

    def _prune(self) -> None:
        """Keep the newest checkpoints and the best one, where the configuration limits them."""
        keep, best = self.trainer.config.train.keep_checkpoints, self.trainer.best
        if not keep:
            return
        for path in checkpoints_of(self.run.path)[:-keep]:
            if best is None or path != self.run.checkpoint_path(best[1]):
                path.unlink()
                path.with_name(path.name + ".md5").unlink(missing_ok=True)

    def _event(self, kind: str, **facts: Any) -> None:
        event = {"event": kind, **facts}
        self.run.append_event(event)
        self.observer(event)

    def _description(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "run": str(self.run.path),
            "parameters": trainer.model.arena.size,
            "vocab_size": trainer.model.config.vocab_size,
            "data": trainer.data.facts,
            "train_windows": len(trainer.data.train),
            "validation_windows": 0 if trainer.data.validation is None else len(trainer.data.validation),
            "steps": trainer.total_steps,
            "config": trainer.config.to_dict(),
        }

    def _result(self) -> TrainResult:
        trainer = self.trainer
        return TrainResult(self.run.path, trainer.step, trainer.finished, self.saved, self.evaluation)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
