"""`gru-ref golden`: values to test another engine against. The work is done by gru_ref.interop.golden."""

import click


@click.command("golden")
@click.option("--op", metavar="OP", help="The operation, such as gru.")
@click.option("-o", "--output", metavar="FILE.npz", help="The file to write.")
@click.option("--seed", default=0, show_default=True, help="Of the inputs and cotangents.")
@click.option("--force", is_flag=True, help="Replace FILE.npz if it exists.")
@click.option("--list", "listing", is_flag=True, help="Print every operation with its cases.")
def command(op: str | None, output: str | None, seed: int, force: bool, listing: bool) -> None:
    """Write inputs, outputs, caches and gradients of an operation, in float64 and float32.

    docs/golden.md explains the names in the file and shows how to hold another engine against it.
    """
    from gru_ref import ops
    from gru_ref.errors import UsageError
    from gru_ref.interop.golden import cases, write_golden

    if listing:
        for name in ops.names() if op is None else [op]:
            click.echo(f"{name}: {', '.join(cases(name))}")
        return
    if op is None or output is None:
        raise UsageError("golden needs --op and -o, as in --op gru -o gru.npz; --list shows the operations")
    metadata = write_golden(op, output, seed=seed, overwrite=force)
    click.echo(f"wrote {click.format_filename(output)}: {op}, {', '.join(metadata['cases'])}, seed {seed}")
