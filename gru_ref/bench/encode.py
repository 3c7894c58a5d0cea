"""`gru-ref encode` of 200 MB of text to a corpus of ascii100, with `cat` to /dev/null as the floor.

The seconds are those of the whole process, with its start and the flush to disk; the memory is its peak.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gru_ref.bench._rows import Row
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate, ratios
from gru_ref.errors import RunError

MEGABYTES = 200
BAR, BAR_MEMORY = 250.0, 300.0


def run(settings: Settings) -> list[Row]:
    """Speed, peak memory, and how many times as long as `cat` it takes."""
    work = f"encode {MEGABYTES} MB, ascii100"
    with tempfile.TemporaryDirectory(prefix="gru-ref-bench-") as folder:
        text, corpus = Path(folder, "text.txt"), Path(folder, "corpus.h5")
        write_text(text)
        peaks: list[float] = []
        sides = {"ours": lambda: peaks.append(_encode(text, corpus))}
        if cat := shutil.which("cat"):
            sides["cat"] = lambda: _read([cat, str(text)])
        times = alternate(sides, settings)
    seconds = {name: Spread.of(values) for name, values in times.items()}
    rows = [
        Row(
            work, "text written", Spread.of(MEGABYTES / s for s in times["ours"]), "MB/s", BAR, sides=seconds
        ),
        Row(work, "peak resident memory", Spread.of(peaks), "MB", BAR_MEMORY, at_most=True),
    ]
    if cat:
        rows.append(Row(work, "times as long as cat", ratios(times["ours"], times["cat"])))
    return rows


def write_text(path: Path) -> None:
    """Lines of pseudo-random words, MEGABYTES · 10⁶ bytes."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 10))) for _ in range(5000)]
    text = ""
    while len(text) < 1_000_000:
        text += " ".join(rng.choices(words, k=12)) + ".\n"
    block = text[:1_000_000].encode()
    with path.open("wb") as file:
        for _ in range(MEGABYTES):
            file.write(block)


def _encode(text: Path, corpus: Path) -> float:
    """Peak memory of the process in MB. The corpus is a new file: to replace one takes longer."""
    corpus.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "gru_ref.cli", "encode", str(text), "-o", str(corpus)]
    command += ["--tokenizer", "ascii100", "--json"]
    printed = corpus.with_suffix(".json")
    with printed.open("w") as stdout, subprocess.Popen(command, stdout=stdout) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or json.loads(printed.read_text("utf-8"))["tokens"] != text.stat().st_size:
        raise RunError(f"gru-ref encode ended with {process.returncode} and not a token for each byte")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def _read(command: list[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
