"""Wall seconds of `gru-ref --help` and of `import gru_ref`, whole processes."""

import subprocess
import sys
from collections.abc import Callable

from gru_ref.bench._rows import Row
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate

BAR = 0.15
COMMANDS = {
    "python that does nothing": ["-c", ""],
    "import gru_ref": ["-c", "import gru_ref"],
    "gru-ref --help": ["-m", "gru_ref.cli", "--help"],
}


def run(settings: Settings) -> list[Row]:
    """A row a command; the interpreter's own time has no bar."""
    times = alternate({name: _process(arguments) for name, arguments in COMMANDS.items()}, settings)
    return [
        Row(
            name,
            "wall time of the process",
            Spread.of(seconds),
            "s",
            bar=BAR if "gru" in name else None,
            at_most=True,
            note=f"least {min(seconds):.3f} s",
        )
        for name, seconds in times.items()
    ]


def _process(arguments: list[str]) -> Callable[[], object]:
    # -P: the folder that the user happens to stand in is not searched for modules
    command = [sys.executable, "-P", *arguments]
    return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
