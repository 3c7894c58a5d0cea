"""`gru-ref gradcheck`: hand-written gradients against finite differences (gru_ref.gradient_check)."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gru_ref.gradient_check import GradcheckResult

MAX_SEED = 2**64 - 1


@click.command("gradcheck")
@click.argument("names", nargs=-1, metavar="[OP|MODEL]...")
@click.option(
    "--kernels",
    type=click.Choice(["numpy", "numba"]),
    default="numpy",
    show_default=True,
    help="Whose backward is checked.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    help="Of the inputs and cotangents.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every result as JSON.")
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], kernels: str, seed: int, as_json: bool) -> None:
    """Check hand-written gradients against finite differences.

    Without names, every operation that has a backward and every model is checked, in float64. The exit code
    is 1 where a gradient is off by more than 1e-6.
    """
    from gru_ref.gradient_check import TOLERANCE, gradcheck

    results = gradcheck(names, seed=seed, tolerance=TOLERANCE, backend=kernels)
    good = all(result.ok for result in results)
    if as_json:
        rows = [_row(result) for result in results]
        click.echo(json.dumps({"ok": good, "tolerance": TOLERANCE, "seed": seed, "results": rows}))
    else:
        _print_table(results)
        click.echo(_verdict(results, TOLERANCE))
    ctx.exit(0 if good else 1)


def _row(result: "GradcheckResult") -> dict[str, Any]:
    """The result for JSON, which has no infinity: `worst` is null where a gradient is not finite."""
    import dataclasses

    return dataclasses.asdict(result) | {"worst": result.worst if math.isfinite(result.worst) else None}


def _print_table(results: list["GradcheckResult"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("name", "case", "input", "checked", "worst relative error", "at", ""):
        table.add_column(heading, overflow="fold")
    for r in results:
        at = ",".join(str(i) for i in r.where)
        verdict, style = ("ok", None) if r.ok else ("WRONG", "bold red")
        table.add_row(r.name, r.case, r.input, str(r.checked), f"{r.worst:.1e}", at, verdict, style=style)
    # a terminal folds what is too wide; a pipe or a file gets every column whole
    Console(width=None if sys.stdout.isatty() else 10_000, markup=False).print(table)


def _verdict(results: list["GradcheckResult"], tolerance: float) -> str:
    wrong = [r for r in results if not r.ok]
    far = max(results, key=lambda r: r.worst)
    if not wrong:
        return (
            f"all {len(results)} gradients are right: worst relative error {far.worst:.1e} in "
            f"{far.name} ({far.case}) {far.input}, tolerance {tolerance:.0e}"
        )
    listed = "; ".join(f"{r.name} ({r.case}) {r.input}" for r in wrong)
    return f"{len(wrong)} of {len(results)} gradients are wrong by more than {tolerance:.0e}: {listed}"
