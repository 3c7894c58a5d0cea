"""Which checkpoint a path names: a checkpoint file itself, or the newest one of a run directory.

Not here: reading it. The newest is the one with the highest step in its name, whatever the clock says.
"""

import re
from pathlib import Path

from gru_ref.errors import RunDirectoryError

_NAME = re.compile(r"step-(\d{8,})\.h5")


def checkpoints_of(run: str | Path) -> list[Path]:
    """The files checkpoints/step-XXXXXXXX.h5 of a run directory, oldest first; empty where there are none."""
    folder = Path(run) / "checkpoints"
    found = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and path.is_file()
    ]
    return [path for _, path in sorted(found)]


def newest_checkpoint(path: str | Path) -> Path:
    """`path` where it is a file, the newest checkpoint in it where it is a run directory.

    Raises RunDirectoryError, a UsageError, where there is neither.
    """
    path = Path(path)
    try:
        if path.is_file():
            return path
        if not path.is_dir():
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise RunDirectoryError(f"{path}: {problem}; name a checkpoint or a run directory")
        checkpoints = checkpoints_of(path)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror}") from None
    if not checkpoints:
        raise RunDirectoryError(
            f"{path}: holds no checkpoints/step-*.h5; name a checkpoint or a run directory"
        )
    return checkpoints[-1]
