"""Measure everything and put the table into benchmarks/README.md: `python benchmarks/run.py [OPTIONS]`.

Options are those of `gru-ref bench`, such as --seconds 20. Takes about half an hour; torch and a C and a C++
compiler are needed for all the peers. What was there before stays where a measurement is broken off.
"""

import subprocess
import sys
from pathlib import Path

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


def main(options: list[str]) -> int:
    """The exit code of `gru-ref bench`."""
    command = [sys.executable, "-P", "-m", "gru_ref.cli", "bench", "--all", "--markdown", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        return done.returncode
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    changes = " and changes" if _git("status", "--porcelain") else ""
    facts = f"- commit {_git('rev-parse', '--short', 'HEAD')}{changes}"
    README.write_text(f"{before}{BEGIN}{facts}\n{done.stdout}{END}{after}", "utf-8")
    return done.returncode


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(README.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
