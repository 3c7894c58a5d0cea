"""The folder of one run: its configuration, logs and checkpoints, and the lock that keeps it to one process.

    config.toml                         the resolved configuration
    metrics.jsonl                       one row a step
    events.jsonl                        what happened: evaluations, checkpoints, skipped steps, resumes
    samples.jsonl                       generated text
    checkpoints/step-00001000.h5        with .md5 beside it
    run.lock                            held by the process that writes here

Lines are valid JSON always (null, not NaN). A line torn by a crash is dropped on resume, and so are the rows
after the checkpoint that the run goes on from.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gru_ref import config as configuration
from gru_ref.config import Config
from gru_ref.errors import RunDirectoryError, RunError
from gru_ref.types import Event

METRICS, EVENTS, SAMPLES = "metrics.jsonl", "events.jsonl", "samples.jsonl"


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
        """A new run directory; raises RunDirectoryError where one is in use, finished or not writable."""
        run = cls(Path(path))
        try:
            (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot make the run directory: {error.strerror}") from None
        with run._locked():
            if (run.path / "config.toml").exists():
                raise RunDirectoryError(
                    f"{path}: holds a run already; choose another --out, or continue it with --resume {path}"
                )
            yield run

    @classmethod
    @contextmanager
    def resume(cls, path: str | Path) -> Iterator["RunDirectory"]:
        """An existing run directory; raises RunDirectoryError where there is none or it is in use."""
        run = cls(Path(path))
        if not (run.path / "config.toml").is_file():
            raise RunDirectoryError(f"{path}: not a run directory (it has no config.toml)")
        with run._locked():
            yield run

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold run.lock. The system frees it when the process ends, however it ends: no stale lock."""
        try:
            with open(self.path / "run.lock", "a+", encoding="utf-8") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.seek(0)
                    raise RunDirectoryError(
                        f"{self.path}: in use by process {lock.read().strip() or 'unknown'}; "
                        "wait for it or choose another --out"
                    ) from None
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
                try:
                    yield
                finally:
                    self.close()
        except PermissionError as error:
            raise RunDirectoryError(f"{error.filename}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def write_config(self, config: Config) -> None:
        """Write config.toml, whole or not at all."""
        self._replace("config.toml", configuration.to_toml(config))

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
            self._keep(name, lambda row: row["step"] <= step)
        self._keep(EVENTS, lambda row: True)

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
            temporary.write_text(text, "utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise RunError(f"{self.path / name}: cannot be written: {error.strerror}") from None


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity; null stands for both."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
