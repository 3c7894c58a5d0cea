"""`gru-ref encode`: text files into one encoded corpus. The work is done by gru_ref.data.corpus."""

import json
import sys
import time
from typing import Any

import click


@click.command("encode")
@click.argument("files", nargs=-1, required=True, metavar="F...")
@click.option("-o", "--output", required=True, metavar="CORPUS.h5", help="The encoded corpus to write.")
@click.option(
    "--tokenizer",
    type=click.Choice(["ascii100", "bytes"]),
    default="ascii100",
    show_default=True,
    help="ascii100 knows printable ASCII and newline, bytes keeps every byte.",
)
@click.option("--force", is_flag=True, help="Replace CORPUS.h5 if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(files: tuple[str, ...], output: str, tokenizer: str, force: bool, as_json: bool) -> None:
    """Encode text into a corpus for train --data.

    F is a text file, a .gz file, a folder, or - for standard input. Several files become several documents,
    with a separator token between two.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from gru_ref.data.corpus import encode_files

    start = time.perf_counter()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("encode", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        facts = encode_files(files, output, tokenizer, overwrite=force, progress=show)
    seconds = time.perf_counter() - start
    facts["output"] = output
    facts["seconds"] = seconds
    facts["mb_per_second"] = sum(source["bytes"] for source in facts["sources"]) / seconds / 1e6
    click.echo(json.dumps(facts) if as_json else _line(facts))


def _line(facts: dict[str, Any]) -> str:
    unknown = f"{facts['unknown']:,} unknown bytes"
    if facts["unknown"]:
        unknown += f" ({facts['unknown'] / facts['tokens']:.2%}; --tokenizer bytes keeps every byte)"
    return (
        f"{facts['output']}: {facts['tokens']:,} tokens ({facts['tokenizer']}), {unknown}, "
        f"{facts['mb_per_second']:.0f} MB/s, md5 {facts['fingerprint']}"
    )
