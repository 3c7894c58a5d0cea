"""`gru-ref diff`: how far two sets of tensors are apart. The work is done by gru_ref.interop.compare."""

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gru_ref.interop.compare import Comparison, Difference


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--tolerance",
    type=float,
    default=0.0,
    show_default=True,
    metavar="X",
    help="Largest L2-relative difference of a tensor that is accepted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def command(a: str, b: str, tolerance: float, as_json: bool) -> int:
    """Compare the tensors and settings of A and B.

    Each is a checkpoint, a run directory (its newest checkpoint), a .safetensors or .npz file that export
    or golden wrote or that import reads, or any other of named tensors. Ends with 1 where a tensor differs
    by more than the tolerance, is of another shape, or is missing. Settings are shown, and decide nothing.
    """
    from gru_ref.interop.compare import compare

    result = compare(a, b, tolerance=tolerance)
    if as_json:
        click.echo(json.dumps(result.to_dict(), allow_nan=False))
    else:
        _print(result)
    return 0 if result.ok else 1


def _print(result: "Comparison") -> None:
    from rich.table import Table

    from gru_ref.cli._terminal import console

    table = Table("tensor", "shape", "dtype", box=None, pad_edge=False)
    for heading in ("L2-relative", "largest", "at", ""):
        table.add_column(heading, justify="right")
    for tensor in result.tensors:
        table.add_row(*_cells(tensor), style=None if tensor.within else "red")
    screen = console()
    if result.tensors:
        screen.print(table)
    for side, names in ((result.a, result.only_a), (result.b, result.only_b)):
        for name in names:
            screen.print(f"only in {side}: {name}")
    for key, (old, new) in result.settings.items():
        screen.print(f"setting {key}: {old} -> {new}")
    for note in result.notes:
        screen.print(f"note {note}")
    screen.print(_verdict(result))


def _cells(tensor: "Difference") -> tuple[str, ...]:
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in tensor.shapes]
    if shapes[0] != shapes[1]:
        return tensor.name, " -> ".join(shapes), "", "-", "-", "", "BEYOND"
    at = "" if tensor.where is None else ",".join(map(str, tensor.where))
    dtype = " -> ".join(dict.fromkeys(tensor.dtypes))
    verdict = "" if tensor.within else "BEYOND"
    return tensor.name, shapes[0], dtype, f"{tensor.relative:.3g}", f"{tensor.largest:.3g}", at, verdict


def _verdict(result: "Comparison") -> str:
    count = len(result.tensors)
    if result.identical:
        return f"equal: all {count} tensors have the same values"
    compared = sum(tensor.shapes[0] == tensor.shapes[1] for tensor in result.tensors)
    figures = "nothing compared"
    if compared:
        some = f"all {count} tensors" if compared == count else f"the {compared} of equal shapes"
        figures = f"L2-relative {result.relative:.3g}, largest {result.largest:.3g} over {some}"
    if result.ok:
        return f"within {result.tolerance:g}: {figures}"
    beyond = sum(not tensor.within for tensor in result.tensors)
    missing = len(result.only_a) + len(result.only_b)
    alone = f", {missing} in one of them only" if missing else ""
    return f"BEYOND {result.tolerance:g}: {beyond} of {count} tensors{alone}; {figures}"
