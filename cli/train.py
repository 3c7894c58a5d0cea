"""`gru-ref train`: train a new run, or go on with one."""

import contextlib
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from gru_ref.cli._configuration import check_file_name, dotted, named_options, set_option, with_length

if TYPE_CHECKING:
    from gru_ref.config import Config
    from gru_ref.data.tokenizers import Tokenizer
    from gru_ref.training import Stop, TrainResult


@click.command("train")
@click.argument("config_file", metavar="[CONFIG.toml]", required=False)
@click.option("--preset", metavar="NAME", help="default, gru-l3-v3a, gpt-16m or gpt2-124m.")
@click.option(
    "--data", multiple=True, metavar="FILE", help="Text, .jsonl, .gz, a folder, -, an encoded .h5, …"
)
@click.option("--val-data", multiple=True, metavar="FILE", help="Validate on this text instead of a share.")
@click.option("--out", metavar="RUN", help="New run directory; without it runs/run-001 and so on.")
@click.option("--resume", "resume_path", metavar="RUN", help="Go on with this run, or from its checkpoint.")
@click.option("--init", metavar="CKPT", help="Start with the weights, model and tokenizer of it, at step 0.")
@named_options()
@click.option("--carry-state", is_flag=True, default=None, help="Carry the hidden state between windows.")
@set_option
@click.option("--override", is_flag=True, help="With --resume: allow changes that change the run.")
@click.option("--stop-at", type=click.IntRange(0), default=0, metavar="N", help="Leave after step N.")
@click.option("--dry-run", is_flag=True, help="Print parameters and predicted memory, and train nothing.")
def command(
    config_file: str | None,
    preset: str | None,
    data: tuple[str, ...],
    val_data: tuple[str, ...],
    out: str | None,
    resume_path: str | None,
    init: str | None,
    carry_state: bool | None,
    assignments: tuple[str, ...],
    override: bool,
    stop_at: int,
    dry_run: bool,
    **named: Any,
) -> int:
    """Train a model on text; without arguments a small one.

    Settings come from the preset, then CONFIG.toml, then the options; the later wins. Ctrl-C finishes the
    step, writes a checkpoint and prints the line that resumes.
    """
    others = {"data.files": data, "data.val_files": val_data, "train.carry_state": carry_state}
    options = dotted(named, others, assignments)
    check_file_name(config_file)
    if resume_path is not None:
        if init is not None:
            raise click.UsageError("--init cannot go with --resume: the run has its own weights")
        for value, name in ((config_file, "CONFIG.toml"), (preset, "--preset"), (out, "--out")):
            if value is not None:
                raise click.UsageError(f"{name} cannot go with --resume: the run has its own; use --set")
        if dry_run:
            raise click.UsageError("--dry-run cannot go with --resume")
    elif override:
        raise click.UsageError("--override goes with --resume only")

    from gru_ref import config as configuration

    if resume_path is None:
        first, tokenizer = (None, None) if init is None else _told_by(init)
        config = configuration.load(preset=preset, file=config_file, options=options, init=first)
        if dry_run:
            return _dry_run(config, tokenizer)
    with _Signals() as signals:  # from here on, because importing takes a while too
        from gru_ref.cli._train_view import TrainView
        from gru_ref.training import Stop, resume, train

        stop = signals.ask(Stop())
        with TrainView() as view:
            common: dict[str, Any] = {"observer": view, "stop": stop, "stop_at": stop_at}
            if resume_path is None:
                result = train(config, out, init=init, **common)
            else:
                result = resume(resume_path, changes=options, override=override, **common)
            view.finish(result)
    return _exit_code(result, signals)


class _Signals:
    """While a run lasts: the first Ctrl-C, SIGTERM or SIGHUP asks it to stop, a second one quits at once.

    SIGHUP stays ignored where nohup asked for that; the others count even where a script's & ignores them.
    A second SIGHUP means nothing: closing a terminal sends one from the system and one from the shell.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._stop: Stop | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, stop: "Stop") -> "Stop":
        """Pass what was and will be received on to `stop`, which is returned."""
        self._stop = stop
        if self.received is not None:
            stop.request(signal.Signals(self.received).name)
        return stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._stop is not None:
                self._stop.request(signal.Signals(number).name)
            behind_ctrl_c = b"\n" if os.isatty(2) else b""
            _write(2, behind_ctrl_c + b"gru-ref: stopping after this step; once more quits at once\n")
        elif number != signal.SIGHUP:
            if os.isatty(1):
                _write(1, b"\x1b[?25h")  # the progress display had hidden the cursor
            os._exit(128 + number)  # files are written under temporary names: nothing is torn


def _write(descriptor: int, text: bytes) -> None:
    """Unbuffered, because a signal may interrupt a print; and a terminal that hung up takes no text."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text)


def _exit_code(result: "TrainResult", signals: _Signals) -> int:
    if signals.received is not None and not result.finished:
        return 128 + signals.received
    return 0


def _told_by(init: str) -> tuple["Config", "Tokenizer"]:
    """The configuration and the tokenizer of a checkpoint, or of the newest of a run."""
    from gru_ref.checkpoint import load_checkpoint
    from gru_ref.checkpoint.find import newest_checkpoint
    from gru_ref.checkpoint.restore import restore_tokenizer

    checkpoint = load_checkpoint(newest_checkpoint(init), weights_only=True)
    return checkpoint.config, restore_tokenizer(checkpoint)


def _dry_run(config: "Config", tokenizer: "Tokenizer | None") -> int:
    """The table of parameters, which of them decay, and the predicted memory."""
    import psutil
    from rich.table import Table

    from gru_ref import plan
    from gru_ref.cli._terminal import console
    from gru_ref.schedules import phases

    config, steps = with_length(config, tokenizer)
    phases(config.schedule, steps)
    table = Table("parameter", "shape")
    table.add_column("count", justify="right")
    table.add_column("weight decay")
    decay = f"{config.optimizer.weight_decay:g}"
    rows = plan.parameters(config)
    for row in rows:
        shape = " × ".join(map(str, row.shape))
        table.add_row(row.name, shape, f"{row.count:,}", decay if row.decayed else "never")
    screen = console()
    screen.print(table)
    total = sum(row.count for row in rows)
    screen.print(f"{total:,} parameters ({total / 1e6:.1f} M), {steps:,} steps")
    parts = plan.memory(config)
    for name, n_bytes in {**parts, "predicted memory of a step": sum(parts.values())}.items():
        screen.print(f"{name:28}{n_bytes / 2**20:12,.1f} MiB")
    free = psutil.virtual_memory().available
    screen.print(f"{'available on this machine':28}{free / 2**20:12,.1f} MiB")
    screen.print("nothing was trained or written (--dry-run)")
    return 0
