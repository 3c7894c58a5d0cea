"""A training run in memory: the model, its optimizer, its data, and where it stands.

`Trainer.start` builds one from a configuration, `Trainer.restore` from a checkpoint; both are then the same
object in every bit that matters, which is what makes a resumed run equal to one that never stopped. Not here:
files, signals, what is shown (gru_ref/training/loop.py).
"""

import dataclasses
import math
import time
from typing import Any

from gru_ref.backend import Backend
from gru_ref.checkpoint.layout import Checkpoint
from gru_ref.checkpoint.restore import restore_model, restore_tokenizer
from gru_ref.config import Config
from gru_ref.data.corpus import Corpus, load_corpus, split
from gru_ref.data.tokenizers import Tokenizer
from gru_ref.data.windows import Windows
from gru_ref.errors import DataError
from gru_ref.generate import generate
from gru_ref.models import LanguageModel, family
from gru_ref.schedules import learning_rate, phases
from gru_ref.training.evaluation import Evaluation, bits_per_byte, evaluate
from gru_ref.training.loss_scale import LossScale
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import StepResult, train_step
from gru_ref.types import Array


class Data:
    """The training and validation windows of a configuration, and the facts of them that are kept."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: of the run that goes on, and so of the data; None: as the configuration says."""
        data, train = config.data, config.train
        self.corpus: Corpus = load_corpus(
            data.files, tokenizer or data.tokenizer, config.model.vocab_size, "" if tokenizer else data.vocab
        )
        self.tokenizer = self.corpus.tokenizer
        self.token_bytes = self.tokenizer.token_bytes()
        self.facts: dict[str, Any] = {"train": self.corpus.facts()}
        tokens, held_out = self.corpus.tokens, None
        if data.val_files:
            val = load_corpus(data.val_files, self.tokenizer)
            self.facts["validation"] = val.facts()
            held_out = val.tokens
        elif data.val_fraction:
            tokens, held_out = split(tokens, data.val_fraction)
        lanes = train.batch_size * train.accumulation if train.carry_state else None
        self.train = _windows(tokens, config, "the training text", lanes)
        self.validation = None if held_out is None else _windows(held_out, config, "the validation text")


def _windows(tokens: Array, config: Config, what: str, lanes: int | None = None) -> Windows:
    try:
        return Windows(tokens, config.train.seq_len, seed=config.train.seed, lanes=lanes)
    except DataError as error:
        hint = ", or --val-fraction 0 to train without validation" if "validation" in what else ""
        raise DataError(f"{what}: {error}{hint}") from None


class Trainer:
    """`step` counts optimizer updates, `cursor` windows consumed, `micro_step` micro-batches."""

    def __init__(self, config: Config, data: Data, model: LanguageModel, optimizer: Optimizer) -> None:
        self.config, self.data, self.model, self.optimizer = config, data, model, optimizer
        self.step = self.tokens = self.cursor = self.micro_step = 0
        self.skipped = self.skipped_in_a_row = 0
        self.best: tuple[float, int] | None = None  # lowest validation loss and its step
        self.state: Array | None = None
        train = config.train
        in_fp16 = config.run.precision == "fp16"
        self.loss_scale = LossScale(train.loss_scale, train.loss_scale_growth) if in_fp16 else None
        self._set_length()

    @classmethod
    def start(cls, config: Config, init: Checkpoint | None = None) -> "Trainer":
        """A run at step 0: vocabulary from the tokenizer, weights from the seed, or both from `init`."""
        data = Data(config, None if init is None else restore_tokenizer(init))
        config = resolve_tokenizer(config, data.tokenizer)
        backend = Backend(config.run.kernels)
        if init is not None:
            model = restore_model(dataclasses.replace(init, config=config), kernels=config.run.kernels)
            return cls(config, data, model, Optimizer(config.optimizer, backend))
        model = family(config.model.kind).Model(
            config.model, seed=config.train.seed, backend=backend, precision=config.run.precision
        )
        model.initialise()
        return cls(config, data, model, Optimizer(config.optimizer, backend))

    @classmethod
    def restore(cls, checkpoint: Checkpoint, config: Config) -> "Trainer":
        """The run as it stood at the checkpoint, going on with `config`; the data must be the same bytes."""
        data = Data(config, restore_tokenizer(checkpoint))
        for part, names, option in (
            ("train", config.data.files or ("the embedded corpus",), "--data"),
            ("validation", config.data.val_files or ("no file",), "--val-data"),
        ):
            if _fingerprint(data.facts, part) != _fingerprint(checkpoint.data, part):
                raise DataError(
                    f"{', '.join(names)}: not the {part} text of this run (its md5 differs); "
                    f"name the original with {option}, or start a new run"
                )
        model = restore_model(checkpoint, kernels=config.run.kernels, precision=config.run.precision)
        trainer = cls(config, data, model, Optimizer(config.optimizer, model.ops))
        for kind, tensors in checkpoint.moments.items():
            views = model.arena.views(getattr(model.arena, kind))
            for name, values in tensors.items():
                views[name][...] = values
        trainer.optimizer.restore(checkpoint.optimizer)
        scalars = checkpoint.trainer
        for name in ("step", "tokens", "cursor", "micro_step", "skipped", "skipped_in_a_row"):
            setattr(trainer, name, int(scalars[name]))
        if "best_loss" in scalars:
            trainer.best = (float(scalars["best_loss"]), int(scalars["best_step"]))
        trainer.state = checkpoint.hidden
        trainer._set_length()
        if trainer.loss_scale is not None:
            trainer.loss_scale.restore(scalars)
        return trainer

    def _set_length(self) -> None:
        attempts = self.step + self.skipped
        self.total_steps = total_steps(self.config, self.data.train, attempts=attempts, cursor=self.cursor)
        phases(self.config.schedule, self.total_steps)  # contradictory lengths are found before a step

    def checkpoint(self) -> Checkpoint:
        """Everything that `restore` needs. Moments are left out at step 0, where they are all zero."""
        arena = self.model.arena
        scalars: dict[str, int | float] = {
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.data.train.epoch(self.cursor),
            "cursor": self.cursor,
            "micro_step": self.micro_step,
            "seed": self.config.train.seed,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        if self.best is not None:
            scalars["best_loss"], scalars["best_step"] = self.best
        if self.loss_scale is not None:
            scalars |= self.loss_scale.scalars()
        hidden = None
        if self.config.train.carry_state and self.step:
            hidden = self._carried_state()
        return Checkpoint(
            config=self.config,
            model=arena.param,
            moments={"m": arena.views(arena.m), "v": arena.views(arena.v)} if self.step else {},
            optimizer=self.optimizer.scalars(),
            trainer=scalars,
            hidden=hidden,
            data=self.data.facts,
            tokenizer=self.data.tokenizer.definition(),
        )

    @property
    def finished(self) -> bool:
        """Whether the configured length is reached; in epochs, a skipped step has used its windows too."""
        if self.config.train.steps:
            return self.step >= self.config.train.steps
        return self.cursor >= total_windows(self.config, self.data.train)

    def advance(self) -> tuple[dict[str, Any], StepResult]:
        """One step; returns its row of metrics.jsonl, with the counts after it, and its result.

        A non-finite step changes no weight, no moment and no step number. The batch is consumed all the
        same: tried again, it would give the same numbers.
        """
        started = time.perf_counter()
        config, windows = self.config.train, self.data.train
        epoch = windows.epoch(self.cursor)
        lr = learning_rate(self.config.schedule, self.step + 1, self.total_steps)
        state = self._carried_state() if config.carry_state else None
        micro_batches = self._next_micro_batches()
        result = train_step(
            self.model,
            self.optimizer,
            micro_batches,
            lr=lr,
            clip_norm=config.clip_norm,
            label_smoothing=config.label_smoothing,
            micro_step=self.micro_step,
            state=state,
            loss_scale=self.loss_scale,
            segments=config.segments,
        )
        self.cursor += sum(inputs.shape[1] for inputs, _ in micro_batches)
        self.micro_step += len(micro_batches)
        if config.carry_state:
            self.state = result.state
        attempted = self.step + 1
        if result.nonfinite is None:
            self.step += 1
            self.tokens += result.tokens
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        seconds = time.perf_counter() - started
        n_bytes = None
        if self.data.token_bytes is not None and not config.label_smoothing:
            n_bytes = sum(int(self.data.token_bytes[t[t >= 0]].sum()) for _, t in micro_batches)
        row = {
            "step": attempted,
            "loss": result.loss,
            "bpb": bits_per_byte(result.loss * result.tokens, n_bytes),
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": result.tokens / seconds,
            "seconds": seconds,
            "epoch": epoch,
            "skipped": self.skipped,
            **({} if self.loss_scale is None else self.loss_scale.scalars()),
        }
        return row, result

    def evaluate(self) -> Evaluation | None:
        """Figures on the validation text, or None where there is none; remembers the best."""
        if self.data.validation is None:
            return None
        evaluation = evaluate(
            self.model,
            self.data.validation,
            batch_size=self.config.train.batch_size,
            token_bytes=self.data.token_bytes,
            max_tokens=self.config.train.eval_tokens,
        )
        if math.isfinite(evaluation.loss) and (self.best is None or evaluation.loss < self.best[0]):
            self.best = (evaluation.loss, self.step)
        return evaluation

    def training_loss(self) -> float:
        """Loss on about one batch of training windows, for a run without validation."""
        train = self.config.train
        tokens = train.batch_size * train.seq_len
        return evaluate(self.model, self.data.train, batch_size=train.batch_size, max_tokens=tokens).loss

    def sample(self, n: int = 200) -> str:
        """`n` tokens of text from the current weights: the same draws every time, so samples compare."""
        tokenizer = self.data.tokenizer
        start = tokenizer.start_id or 0
        ids = list(generate(self.model, [start], n, temperature=0.8, seed=self.config.train.seed))
        if tokenizer.name == "ids":
            return " ".join(map(str, ids))
        return tokenizer.decode(ids).decode("utf-8", errors="replace")

    def _carried_state(self) -> Array:
        """The hidden state to go on from: zeros at the start of an epoch."""
        if self.state is None or self.data.train.starts_epoch(self.cursor):
            train = self.config.train
            return self.model.initial_state(train.batch_size * train.accumulation)
        return self.state

    def _next_micro_batches(self) -> list[tuple[Array, Array]]:
        """The step's windows, A micro-batches of B; fewer only at the very end of a run given in epochs."""
        train, windows = self.config.train, self.data.train
        count = train.batch_size * train.accumulation
        if not train.steps and not train.carry_state:
            count = min(count, total_windows(self.config, windows) - self.cursor)
        indices = windows.indices(self.cursor, count)
        return [
            windows.batch(indices[start : start + train.batch_size])
            for start in range(0, count, train.batch_size)
        ]


def total_windows(config: Config, windows: Windows) -> int:
    """Windows in the epochs that the configuration asks for: one, where it asks for no length at all."""
    return max(1, round((config.train.epochs or 1.0) * windows.per_epoch))


def total_steps(config: Config, windows: Windows, *, attempts: int = 0, cursor: int = 0) -> int:
    """The run's length in steps: train.steps, or as many as train.epochs need.

    attempts, cursor: the steps tried so far and the windows they used, perhaps in batches of another size.
    """
    train = config.train
    if train.steps:
        return train.steps
    left = max(0, total_windows(config, windows) - cursor)
    return attempts + -(-left // (train.batch_size * train.accumulation))


def resolve_tokenizer(config: Config, tokenizer: Tokenizer) -> Config:
    """The configuration with the name and the vocabulary of the data's tokenizer."""
    return config.replace("model", vocab_size=tokenizer.vocab_size).replace("data", tokenizer=tokenizer.name)


def _fingerprint(facts: dict[str, Any], part: str) -> Any:
    return facts.get(part, {}).get("fingerprint")
