"""What all commands share about the terminal: the console, tables, durations, signals."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 160  # columns where there is no terminal to ask: nothing is cut or wrapped needlessly


def console() -> "Console":
    """A console on standard output: colours on a terminal, plain text elsewhere."""
    from rich.console import Console

    plain = Console(markup=False, highlight=False, emoji=False)
    if plain.is_terminal and not plain.is_dumb_terminal:
        return plain
    return Console(
        file=sys.stdout,
        markup=False,
        highlight=False,
        emoji=False,
        force_terminal=False,
        no_color=True,
        width=PIPED_WIDTH,
    )


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does: no process and no temporary file is left."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
