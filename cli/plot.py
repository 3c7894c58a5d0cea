"""`gru-ref plot`: the curves of runs as a figure. The work is done by gru_ref.report.curves."""

import click


@click.command("plot")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    help="The figure to write or replace: .svg, .png or .pdf.",
)
@click.option("--title", help="A heading above the runs.")
def command(runs: tuple[str, ...], output: str, title: str | None) -> None:
    """Draw the curves of one or several runs over each other.

    RUN is a directory that train --out wrote; it may still be running. Needs the extra gru-ref[report].
    """
    from gru_ref.report.curves import draw, load_run

    draw([load_run(run) for run in runs], output, title=title)
    click.echo(f"wrote {click.format_filename(output)}")
