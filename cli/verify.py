"""`gru-ref verify`: is a checkpoint what was written? The work is done by gru_ref.checkpoint."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from gru_ref.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from gru_ref.checkpoint.verify import TensorReport, VerifyReport

_NO_LIMIT = 10_000  # columns
_COLUMNS = ("tensor", "shape", "dtype", "md5", "NaN", "Inf", "min", "max", "mean", "std", "range")


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="CKPT|RUN...")
@click.option("--json", "as_json", is_flag=True, help="Print the reports as a JSON list.")
@click.option("--quiet", is_flag=True, help="Print problems only, nothing if there are none.")
def command(paths: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Check structure, md5 and values of checkpoints.

    RUN is a run directory and means every checkpoint in it. Ends with 0 if all are good, else with 1.
    """
    if as_json and quiet:
        raise UsageError("--json and --quiet contradict each other; give one")
    files = [file for path in paths for file in _checkpoints(path)]
    from rich.console import Console

    from gru_ref.checkpoint.verify import verify_checkpoint

    # A file or a pipe has no width to fit: each tensor stays on one line there.
    width = None if sys.stdout.isatty() else _NO_LIMIT
    console = Console(file=sys.stdout, width=width, highlight=False, soft_wrap=True)
    reports = []
    for file in files:
        report = verify_checkpoint(file)
        reports.append(report)
        if quiet:
            for problem in report.problems:
                console.print(f"{report.path}: {problem}", markup=False)
        elif not as_json:
            _print(console, report)
    if as_json:
        click.echo(json.dumps([report.to_dict() for report in reports], allow_nan=False))
    failed = [report for report in reports if not report.ok]
    if failed:
        more = _count(sum(len(report.problems) for report in failed), "problem") + " in all"
        raise CheckpointError(f"{failed[0].path}: {failed[0].problems[0]} ({more})")


def _checkpoints(name: str) -> "Iterator[Path]":
    """The file itself, or the checkpoints of a run directory in the order of their steps."""
    from pathlib import Path

    path = Path(name)
    if path.is_dir():
        files = sorted(path.glob("checkpoints/*.h5"))
        if not files:
            raise UsageError(f"{path}: not a run directory: no checkpoints/*.h5; name a run or a file")
        yield from files
    elif path.exists():
        yield path
    else:
        raise UsageError(f"{path}: no such file; name a checkpoint or a run directory")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print(console: "Console", report: "VerifyReport") -> None:
    console.print(report.path, style="bold", markup=False)
    if report.tensors:
        _print_tensors(console, report)
    for problem in report.problems:
        console.print("[red]problem[/red] ", end="")
        console.print(problem, markup=False)
    for note in report.notes:
        console.print(f"note {note}", markup=False)
    if report.ok:
        console.print(
            f"[green]ok[/green]: step {report.step:,}, {report.n_parameters:,} parameters, "
            f"{len(report.tensors):,} tensors, md5 and values verified"
        )
    else:
        console.print(f"[red]FAILED[/red]: {_count(len(report.problems), 'problem')}")


def _print_tensors(console: "Console", report: "VerifyReport") -> None:
    """A table where it fits, otherwise two lines a tensor, which any width can wrap."""
    from rich.table import Table

    rows = [_cells(tensor) for tensor in report.tensors]
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:4] else "right")
    for row in rows:
        table.add_row(*row)
    unbounded = console.options.update(max_width=_NO_LIMIT)
    if console.measure(table, options=unbounded).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        console.print(" ".join(row[:3]))
        console.print(
            "  " + ", ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS[3:], row[3:], strict=True))
        )


def _cells(tensor: "TensorReport") -> tuple[str, ...]:
    return (
        tensor.name,
        "x".join(map(str, tensor.shape)),
        tensor.dtype,
        "ok" if tensor.md5_ok else "[red]wrong[/red]",
        *(f"[red]{count:,}[/red]" if count else "0" for count in (tensor.nan, tensor.inf)),
        *(f"{value:.4g}" for value in (tensor.min, tensor.max, tensor.mean, tensor.std)),
        {True: "ok", False: "[red]out[/red]", None: "-"}[tensor.in_range],
    )
