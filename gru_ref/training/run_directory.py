"""The folder of one run: its configuration, logs and checkpoints, and the lock that keeps it to one process.

    config.toml                         the resolved configuration
    metrics.jsonl                       one row a step
    events.jsonl                        what happened: evaluations, checkpoints, skipped steps, resumes, …
    samples.jsonl                       generated text
    checkpoints/step-00001000.h5        with .md5 beside it
    checkpoints/set-aside/run-001/      those after the checkpoint that a resume was told to go on from
    stdin.h5  stdin-validation.h5       text that was read from standard input
    run.lock                            held by the process that writes here

Lines are valid JSON always (null, not NaN). A line torn by a crash is dropped on resume, and so are the rows
after the checkpoint that the run goes on from. A run that was killed before its first checkpoint has nothing
to go on from: a new one may take its directory.

A row of metrics.jsonl has the counts, and in fp16 the loss scale, of a checkpoint after its step. An attempt
that was skipped has no row, because no step was made: it is the event `skipped`, and the next row counts it.
Where no step follows, because too many were skipped in a row, the event `failed` has the count.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from gru_ref import config as configuration
from gru_ref.checkpoint.find import checkpoints_of
from gru_ref.checkpoint.write import remove_stale_temporaries
from gru_ref.config import Config
from gru_ref.errors import RunDirectoryError, RunError
from gru_ref.types import Event

CONFIG, LOCK = "config.toml", "run.lock"
METRICS, EVENTS, SAMPLES = "metrics.jsonl", "events.jsonl", "samples.jsonl"
STDIN, STDIN_VALIDATION = "stdin.h5", "stdin-validation.h5"


def next_free(parent: str | Path = "runs") -> Path:
    """The first of PARENT/run-001, run-002, … that does not exist."""
    parent = Path(parent)
    number = 1
    while (parent / f"run-{number:03d}").exists():
        number += 1
    return parent / f"run-{number:03d}"


class RunDirectory:
    """Open a run directory with `RunDirectory.create` or `RunDirectory.resume`; both hold its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, TextIO] = {}

    @classmethod
    @contextmanager
    def create(cls, path: str | Path) -> Iterator["RunDirectory"]:
        """A new run directory; raises RunDirectoryError where one is in use, finished or not writable.

        Folders made here are removed again where the run ends before it wrote its configuration.
        """
        run = cls(Path(path))
        run._refuse_if_begun()
        made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot make the run directory: {error.strerror}") from None
        with run._locked():
            run._refuse_if_begun()
            for name in (EVENTS, SAMPLES):  # of a run that was killed before its first checkpoint
                (run.path / name).unlink(missing_ok=True)
            try:
                yield run
            finally:
                if made and not (run.path / CONFIG).exists():
                    run._remove(made)

    @classmethod
    @contextmanager
    def resume(cls, path: str | Path) -> Iterator["RunDirectory"]:
        """An existing run directory; raises RunDirectoryError where there is none or it is in use."""
        run = cls(Path(path))
        if not (run.path / CONFIG).is_file():
            raise RunDirectoryError(f"{path}: not a run directory (it has no {CONFIG})")
        with run._locked():
            yield run

    def _refuse_if_begun(self) -> None:
        """Raise RunDirectoryError where there is a run to go on with, or a file that is not of a run."""
        if checkpoints_of(self.path) or (self.path / METRICS).exists():
            raise RunDirectoryError(
                f"{self.path}: holds a run already; choose another --out, or continue it with "
                f"--resume {self.path}"
            )
        found = [name for name in (CONFIG, EVENTS, SAMPLES) if (self.path / name).exists()]
        if found and not self._was_started():
            raise RunDirectoryError(
                f"{self.path}: holds {found[0]}, which would be overwritten; choose another --out"
            )

    def _was_started(self) -> bool:
        """Whether events.jsonl, the first file of a run, begins as one does."""
        try:
            with open(self.path / EVENTS, "rb") as events:
                first = events.readline()
        except FileNotFoundError:
            return False
        return not first or b'"event": "start"' in first

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold run.lock. The system frees it when the process ends, however it ends: no stale lock."""
        path = self.path / LOCK
        try:
            lock = open(path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from None
        with lock:
            self._take(lock)
            try:
                yield
            finally:
                self.close()

    def _take(self, lock: BinaryIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(b"%d\n" % os.getpid())
            (self.path / "checkpoints").mkdir(exist_ok=True)
            for folder in (self.path, self.path / "checkpoints"):
                remove_stale_temporaries(folder)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read(20).decode("ascii", "replace").strip() or "unknown"
            raise RunDirectoryError(
                f"{self.path}: in use by process {owner}; wait for it or choose another directory"
            ) from None
        except OSError as error:
            raise RunDirectoryError(f"{self.path}: cannot be written: {error.strerror}") from None

    def _remove(self, made: list[Path]) -> None:
        """Remove the directory and its parents in `made`, but leave what someone else has put there."""
        self.close()
        for name in (EVENTS, STDIN, STDIN_VALIDATION, LOCK):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for folder in (self.path / "checkpoints", *made):
                folder.rmdir()

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            with contextlib.suppress(OSError):  # of a line that `append` has reported as not written
                log.close()
        self._logs.clear()

    def write_config(self, config: Config) -> None:
        """Write config.toml, whole or not at all."""
        self._replace(CONFIG, configuration.to_toml(config))

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / "checkpoints" / f"step-{step:08d}.h5"

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to one of the logs, at once visible to readers. Raises RunError where it cannot."""
        try:
            if name not in self._logs:
                self._logs[name] = open(self.path / name, "a", encoding="utf-8")  # noqa: SIM115
            self._logs[name].write(json.dumps(_without_nan(row), allow_nan=False) + "\n")
            self._logs[name].flush()
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written: {error.strerror}") from None

    def append_event(self, event: Event) -> None:
        """Add an event with the time of day (UTC)."""
        self.append(EVENTS, {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **event})

    def forget_after(self, step: int) -> None:
        """Repair the logs before going on from `step`: drop torn lines, and metrics and samples after it."""
        for name in (METRICS, SAMPLES):
            self._keep(name, lambda row: row.get("step", 0) <= step)
        self._keep(EVENTS, lambda row: True)

    def set_aside_after(self, step: int) -> list[str]:
        """Move the checkpoints after `step` out of the way, so that none is later taken for the newest."""
        later = [path for path in checkpoints_of(self.path) if int(path.stem.removeprefix("step-")) > step]
        aside = next_free(self.path / "checkpoints" / "set-aside")
        try:
            for path in later:
                aside.mkdir(parents=True, exist_ok=True)
                for name in (path.name, path.name + ".md5"):
                    if (path.parent / name).exists():
                        os.replace(path.parent / name, aside / name)
        except OSError as error:
            raise RunError(f"{error.filename}: cannot be moved: {error.strerror}") from None
        return [path.name for path in later]

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        if not (self.path / name).exists():
            return
        lines = []
        for line in (self.path / name).read_text("utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by a crash
            if isinstance(row, dict) and wanted(row):
                lines.append(line + "\n")
        self._replace(name, "".join(lines))

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        try:
            # A file name in the configuration need not be UTF-8.
            temporary.write_text(text, "utf-8", errors="surrogateescape")
            os.replace(temporary, self.path / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise RunError(f"{self.path / name}: cannot be written: {error.strerror}") from None


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity; null stands for both."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
