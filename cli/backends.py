"""`gru-ref backends`: which function serves each operation, the definition or a compiled twin."""

import json
from typing import Any

import click


@click.command("backends")
@click.option("--errors", is_flag=True, help="Measure how far the twins' results are from the definitions'.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(errors: bool, as_json: bool) -> None:
    """Show which function computes each operation, for each backend.

    numpy has the definitions alone; numba has compiled twins of some, and the definitions of the others.
    """
    if errors:
        _show_errors(as_json)
        return
    served_by, unusable = _tables()
    functions = [(row["op"], row["function"]) for row in served_by["numpy"]]
    rows: list[dict[str, Any]] = [{"op": op, "function": function} for op, function in functions]
    for name, table in served_by.items():
        for row, served in zip(rows, table, strict=True):
            row[name] = served["served_by"]
    if as_json:
        click.echo(json.dumps({"functions": rows, "unusable": unusable}))
        return
    _print_table(rows, list(served_by))
    for name, reason in unusable.items():
        click.echo(f"{name}: not usable: {reason}")


def _show_errors(as_json: bool) -> None:
    import numpy as np
    from rich.table import Table

    from gru_ref import accuracy, ops
    from gru_ref.backend import Backend
    from gru_ref.cli._terminal import console

    twins = Backend("numba")
    rows = [
        row
        for op in ops.names()
        if twins.twins(op)
        for dtype in (np.float32, np.float64)
        for row in accuracy.errors(op, dtype, twins)
    ]
    elementary = accuracy.elementary_errors()
    if as_json:
        click.echo(json.dumps({"errors": rows, "elementary": elementary}))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("op", "function", "result", "dtype"):
        table.add_column(heading)
    table.add_column("twin", justify="right")
    table.add_column("definition", justify="right")
    for row in rows:
        own = "" if row["definition"] is None else f"{row['definition']:.2f}"
        table.add_row(row["op"], row["function"], row["result"], row["dtype"], f"{row['twin']:.2f}", own)
    console().print(table)
    click.echo(
        "float32: largest error against the definition in float64; float64: largest difference of the two.\n"
        "Unit: a unit in the last place of the result's largest value."
    )
    for row in elementary:
        click.echo(f"{row['function']} in kernels, float32: within {row['ulp']:.2f} ULP of each value")


def _tables() -> tuple[dict[str, list[dict[str, str]]], dict[str, str]]:
    """The table of each backend that works here, and why another does not."""
    from gru_ref.backend import KERNEL_FOLDERS, Backend
    from gru_ref.errors import BackendError

    tables, unusable = {}, {}
    for name in KERNEL_FOLDERS:
        try:
            tables[name] = Backend(name).table()
        except BackendError as error:
            unusable[name] = str(error)
    return tables, unusable


def _print_table(rows: list[dict[str, Any]], backends: list[str]) -> None:
    """A twin stands out from the definitions, by colour where there is one, by its folder always."""
    from rich.table import Table
    from rich.text import Text

    from gru_ref.cli._terminal import console

    table = Table(box=None, pad_edge=False)
    for heading in ("op", "function", *backends):
        table.add_column(heading, overflow="fold")
    for row in rows:
        served = [
            Text(row[name].removeprefix("gru_ref."), style="green" if ".kernels." in row[name] else "")
            for name in backends
        ]
        table.add_row(row["op"], row["function"], *served)
    console().print(table)
