"""Names of files that are being written, and removing those that a killed process left.

    .<name>.<pid>.tmp      takes the place of <name> once it is whole

Not here: writing them.
"""

import contextlib
import os
import re
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_stale(folder: str | Path, pattern: re.Pattern[str]) -> list[Path]:
    """Remove and return the files whose whole name the pattern matches, with the number of a dead process.

    The number is the pattern's first group. Files of other live processes stay. To be called before this
    process writes any: temporaries under its own number are then those of an earlier process that had the
    same one, as happens in containers.
    """
    removed = []
    for path in sorted(Path(folder).iterdir()):
        match = pattern.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def remove_stale_of(path: Path) -> None:
    """`remove_stale` for the temporaries of one file; where they cannot be removed, writing it will tell."""
    with contextlib.suppress(OSError):
        remove_stale(path.parent, re.compile(rf"\.{re.escape(path.name)}\.([0-9]{{1,9}})\.tmp"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, another user's
    return True
