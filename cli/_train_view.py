"""What a person sees of a training run: a progress display on a terminal, plain lines elsewhere.

An observer of the events that gru_ref/training/loop.py emits. Output that cannot be written, because its
reader, its terminal or the room on its disk is gone, does not end the training: the view falls silent.
"""

import math
import os
import time
from typing import TYPE_CHECKING, Any

from gru_ref.cli._terminal import clock, console
from gru_ref.types import Event

if TYPE_CHECKING:
    from rich.progress import Progress

    from gru_ref.training import TrainResult


class TrainView:
    """Call it with every event; use it as a context manager around the training."""

    def __init__(self) -> None:
        self.console = console()
        self.progress: Progress | None = None
        self.silent = False
        self.steps = self.log_every = 1
        self.resumed_at = 0
        self.started = 0.0
        self.sample = ""

    def __enter__(self) -> "TrainView":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_progress()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        getattr(self, f"_on_{event['event']}")(event)

    def finish(self, result: "TrainResult") -> None:
        """The last lines: what came out, and what to do next."""
        self._stop_progress()
        run, checkpoint = _short(result.path), _short(result.checkpoint) if result.checkpoint else None
        if result.finished and self.steps and not self.started:
            self.line(f"{run} is finished already (step {result.step}); nothing to do")
        elif result.finished:
            self.line(f"finished: {run}")
            self.line(f"  gru-ref verify {checkpoint}")
            self.line(f"  gru-ref sample {checkpoint}")
            self.line(f"  gru-ref plot {run} -o curve.svg")
        else:
            self.line(f"stopped after step {result.step}; go on with: gru-ref train --resume {run}")

    def line(self, text: str) -> None:
        """Print a line above the progress display, or simply print it."""
        if self.silent:
            return
        try:
            if self.progress is not None:
                self.progress.console.print(text, soft_wrap=True)
            else:  # rich would end the process where the reader is gone
                self.console.file.write(f"{text}\n")
            self.console.file.flush()
        except OSError:
            self._fall_silent()

    def _stop_progress(self) -> None:
        if self.progress is None:
            return
        try:
            self.progress.stop()
        except OSError:
            self._fall_silent()
        self.progress = None

    def _fall_silent(self) -> None:
        self.silent = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.file.fileno())

    def _on_start(self, event: Event) -> None:
        self._describe(event)
        if event["init"] is not None:
            self.line(f"starting with the weights of {_short(event['init'])}")
        self.line(f"writing to {_short(event['run'])}")

    def _on_resume(self, event: Event) -> None:
        self._describe(event)
        self.resumed_at = event["step"]
        for key, (old, new) in event["changed"].items():
            self.line(f"changed: {key} {old} -> {new}")
        if event["set_aside"]:
            self.line(f"set aside: {', '.join(event['set_aside'])}, which are after that step")
        self.line(f"resuming {_short(event['run'])} after step {event['step']}")
        self._begin()

    def _describe(self, event: Event) -> None:
        config, data = event["config"], event["data"]["train"]
        model, train, optimizer = config["model"], config["train"], config["optimizer"]
        names = [source["name"] for source in data["sources"]]
        files = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self.line(
            f"model: {model['kind']}, {model['layers']} × {model['hidden']}, "
            f"{event['parameters']:,} parameters, vocabulary {event['vocab_size']} ({data['tokenizer']})"
        )
        self.line(
            f"data: {files}: {data['tokens']:,} tokens, {event['train_windows']:,} windows to train on, "
            f"{event['validation_windows']:,} to validate"
        )
        if data["unknown"]:
            share = 100 * data["unknown"] / data["tokens"]
            self.line(
                f"notice: {data['unknown']:,} bytes ({share:.2g} %) are not in {data['tokenizer']} and "
                "became <unk>; --tokenizer bytes keeps them"
            )
        self.line(
            f"training: {event['steps']:,} steps of {train['accumulation']} × {train['batch_size']} windows "
            f"of {train['seq_len']}, {optimizer['name']}, {config['schedule']['name']} schedule, "
            f"seed {train['seed']}"
        )
        run = config["run"]
        gpu = " (auto: this version has no GPU kernels)" if run["device"] == "auto" else ""
        self.line(f"device: cpu{gpu}, {run['kernels']} kernels, {run['precision']}, {run['threads']} threads")
        self.steps, self.log_every = event["steps"], train["log_every"]

    def _on_compiling(self, event: Event) -> None:
        self.line("compiling kernels for this machine and version")

    def _on_compiled(self, event: Event) -> None:
        self.line(f"compiled {event['kernels']} kernels in {event['seconds']:.1f} s")

    def _on_before_training(self, event: Event) -> None:
        loss, untrained = event["loss"], event["ln_vocab"]
        line = f"before training: loss {loss:.4f}"
        if untrained is not None:
            near = abs(loss - untrained) < 0.25
            verdict = "as an untrained model should" if near else "NOT what an untrained model should give"
            line += f", ln(vocabulary) = {untrained:.4f}: {verdict}"
        self.line(line)
        self._begin()

    def _begin(self) -> None:
        self.started = time.perf_counter()
        if self.console.is_terminal:
            self.progress = _progress(self.console)
            self.progress.add_task("training", total=self.steps, completed=self.resumed_at, figures="")
            try:
                self.progress.start()
            except OSError:
                self._fall_silent()
                self.progress = None  # stop() would undo what start() has not come to, or has undone

    def _on_step(self, event: Event) -> None:
        figures = _figures(event, short=self.progress is not None and self.console.width < 100)
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=event["step"], figures=figures)
        elif event["step"] % self.log_every == 0 or event["step"] in (1, self.steps):
            elapsed = time.perf_counter() - self.started
            done = event["step"] - self.resumed_at
            left = elapsed / done * (self.steps - event["step"])
            self.line(
                f"step {event['step']:>{len(str(self.steps))}}/{self.steps}  {figures}  left {clock(left)}"
            )

    def _on_evaluation(self, event: Event) -> None:
        bpb = "" if event["bpb"] is None else f", {event['bpb']:.4f} bits/byte"
        self.line(
            f"validation at step {event['step']}: loss {event['loss']:.4f}{bpb}, "
            f"top-1 {100 * event['top1']:.1f} %, top-5 {100 * event['top5']:.1f} %"
        )

    def _on_sample(self, event: Event) -> None:
        self.line(f"sample at step {event['step']}:")
        for row in _printable(event["text"]).splitlines():
            self.line(f"  | {row}")

    def _on_checkpoint(self, event: Event) -> None:
        self.line(
            f"checkpoint at step {event['step']}: {_short(event['path'])}, {event['bytes'] / 1e6:.1f} MB, "
            f"{event['seconds']:.2f} s"
        )

    def _on_skipped(self, event: Event) -> None:
        scale = event["loss_scale"]
        lowered = "" if scale is None else f"; the loss scale is now {scale:g}"
        self.line(
            f"step {event['step']} skipped: {event['nonfinite']} is not finite "
            f"({event['in_a_row']} in a row){lowered}"
        )

    def _on_failed(self, event: Event) -> None:
        """The error that ends the run says it."""

    def _on_stopped(self, event: Event) -> None:
        self.line(f"stopping after step {event['step']} ({event['reason']})")

    def _on_finished(self, event: Event) -> None:
        self.line(f"trained {event['tokens']:,} tokens in {clock(time.perf_counter() - self.started)}")


def _progress(console: Any) -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        BarColumn(bar_width=20 if console.width >= 100 else 5),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


def _figures(event: Event, short: bool = False) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None or not math.isfinite(value) else format(value, form)

    loss, norm = number(event["loss"], ".4f"), number(event["grad_norm"], ".2f")
    speed = f"{event['tokens_per_second']:,.0f} tok/s"
    if short:  # what fits into 80 columns beside the step and the time left
        return f"loss {loss} lr {event['lr']:.1e} |g| {norm} {speed}"
    bpb = number(event["bpb"], ".3f")
    return f"loss {loss}  bpb {bpb}  lr {event['lr']:.2e}  norm {norm}  {speed}"


def _printable(text: str) -> str:
    """Control characters other than the newline shown as ·, so that no text can steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def _short(path: Any) -> str:
    """A path as the shell takes it, relative to here where that is shorter."""
    import shlex

    relative = os.path.relpath(path)
    return shlex.quote(relative if len(relative) < len(str(path)) else str(path))
