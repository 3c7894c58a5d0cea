"""`gru-ref encode`: text files into one encoded corpus. The work is done by gru_ref.data.corpus."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gru_ref.data.corpus import Progress


@click.command("encode")
@click.argument("files", nargs=-1, required=True, metavar="F...")
@click.option("-o", "--output", required=True, metavar="CORPUS.h5", help="The encoded corpus to write.")
@click.option(
    "--tokenizer",
    type=click.Choice(["ascii100", "bytes", "bpe"]),
    help="ascii100 (the default) knows printable ASCII and newline, bytes keeps every byte, bpe too.",
)
@click.option(
    "--vocab",
    default="",
    metavar="PATH",
    help="For bpe: a folder with GPT-2's vocab.json and merges.txt, a tokenizer.json, or an encoded corpus.",
)
@click.option(
    "--train-bpe",
    type=click.IntRange(257, 2**16),
    metavar="N",
    help="Make a vocabulary of N tokens from the files first.",
)
@click.option("--special-tokens", is_flag=True, help="For bpe: text like <|endoftext|> is that token.")
@click.option(
    "--field", default="text", show_default=True, metavar="NAME", help="Key or column of the text in records."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that encode bpe; default: one a core. The corpus is the same for any number.",
)
@click.option("--force", is_flag=True, help="Replace CORPUS.h5 if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    files: tuple[str, ...],
    output: str,
    tokenizer: str | None,
    vocab: str,
    train_bpe: int | None,
    special_tokens: bool,
    field: str,
    workers: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Encode text into a corpus for train --data.

    F is a text file, a .jsonl or .parquet file of records, one of them packed as .gz, a folder, or - for
    standard input. A text file or a record is a document; a separator token stands between two.
    """
    from gru_ref.cli._terminal import signals_end_it
    from gru_ref.data.corpus import encode_files
    from gru_ref.threads import available_cores

    start = time.perf_counter()
    with signals_end_it(), _progress_shown(train_bpe) as show:
        facts = encode_files(
            files,
            output,
            _tokenizer(tokenizer, vocab, train_bpe),
            vocab=vocab,
            train_bpe=train_bpe or 0,
            special_tokens=special_tokens,
            text_field=field,
            workers=workers or available_cores(),
            overwrite=force,
            progress=show,
        )
    seconds = time.perf_counter() - start
    facts["output"] = output
    facts["seconds"] = seconds
    facts["mb_per_second"] = sum(source["bytes"] for source in facts["sources"]) / seconds / 1e6
    click.echo(json.dumps(facts) if as_json else _line(facts))


@contextlib.contextmanager
def _progress_shown(train_bpe: int | None) -> Iterator["Progress | None"]:
    """A bar on a terminal; elsewhere one line where it may take long, and no time spent on loading rich."""
    if not sys.stderr.isatty():
        if train_bpe:
            line = f"gru-ref: making a vocabulary of {train_bpe:,} tokens, which may take a while"
            click.echo(line, err=True)
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    figures = (rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeElapsedColumn())
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *figures, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encode", total=None)

        def show(done: int, total: int) -> None:
            what = "encode" if total else "making the vocabulary"
            bar.update(task, completed=done, total=total or None, description=what)

        yield show


def _tokenizer(name: str | None, vocab: str, train_bpe: int | None) -> str:
    """The name, which a vocabulary implies; contradictions are errors."""
    from gru_ref.errors import UsageError

    if vocab and train_bpe:
        raise UsageError("--vocab and --train-bpe contradict each other; give one")
    if (vocab or train_bpe) and name not in (None, "bpe"):
        option = "--vocab" if vocab else "--train-bpe"
        raise UsageError(f"{option} goes with --tokenizer bpe, not with {name}")
    return name or ("bpe" if vocab or train_bpe else "ascii100")


def _line(facts: dict[str, Any]) -> str:
    unknown = f"{facts['unknown']:,} unknown bytes"
    if facts["unknown"]:
        unknown += f" ({facts['unknown'] / facts['tokens']:.2%}; --tokenizer bytes keeps every byte)"
    name = facts["tokenizer"] + (f", {facts['vocab_size']:,}" if facts["tokenizer"] == "bpe" else "")
    return (
        f"{facts['output']}: {facts['tokens']:,} tokens ({name}), {unknown}, "
        f"{facts['mb_per_second']:.1f} MB/s, md5 {facts['fingerprint']}"
    )
