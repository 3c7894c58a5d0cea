"""`gru-ref sample`: text from a checkpoint. The draws are made by gru_ref.generate."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

import click

if TYPE_CHECKING:
    from gru_ref.data.tokenizers import Tokenizer

FLUSH_SECONDS = 0.05

# What would move the cursor, change colours or ring: shown as \x1b and so on by a terminal, kept elsewhere.
_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n\r"}


@click.command("sample")
@click.argument("checkpoint", metavar="CKPT|RUN")
@click.option("--prompt", metavar="S", help="What the text goes on from; token ids for tokenizer ids.")
@click.option(
    "--prompt-file", type=click.File("rb"), metavar="F", help="The same, every byte of a file or -."
)
@click.option("-n", "--n", "n", default=256, show_default=True, metavar="N", help="Tokens to generate.")
@click.option("--temperature", default=1.0, show_default=True, metavar="T", help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, metavar="K", help="Keep the K likeliest; 0 keeps all.")
@click.option(
    "--top-p", default=1.0, show_default=True, metavar="P", help="Keep the likeliest that make up P."
)
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same text.")
@click.option("--special-tokens", is_flag=True, help="For bpe: <|endoftext|> in the prompt is that token.")
@click.option("--raw", is_flag=True, help="Write the bytes as they are, and no newline at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when all is done.")
@click.option("--kernels", default="numpy", show_default=True, help="numpy or numba.")
def command(
    checkpoint: str,
    prompt: str | None,
    prompt_file: BinaryIO | None,
    n: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    special_tokens: bool,
    raw: bool,
    as_json: bool,
    kernels: str,
) -> None:
    """Print the prompt and the text that a model writes after it.

    From a run directory the newest checkpoint is taken. Without a prompt the text starts as after
    a newline. Tokenizer ids has no text: its ids are printed.
    """
    from gru_ref.checkpoint import load_checkpoint
    from gru_ref.checkpoint.find import newest_checkpoint
    from gru_ref.checkpoint.restore import restore_model, restore_tokenizer
    from gru_ref.errors import UsageError
    from gru_ref.generate import generate

    if raw and as_json:
        raise UsageError("--raw and --json contradict each other; give one")
    data = _prompt_bytes(prompt, prompt_file)
    path = newest_checkpoint(checkpoint)
    loaded = load_checkpoint(path, weights_only=True)
    tokenizer = restore_tokenizer(loaded)
    if special_tokens:
        tokenizer = tokenizer.with_special_tokens()
    prompt_ids = _prompt_ids(data, tokenizer)
    model = restore_model(loaded, kernels=kernels)
    if model.context is not None and len(prompt_ids) > model.context:
        click.echo(
            f"gru-ref: the prompt has {len(prompt_ids):,} tokens and the model looks back on "
            f"{model.context:,}: it reads the last ones",
            err=True,
        )
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    ids = generate(model, prompt_ids, n, **settings)
    if as_json:
        generated = list(ids)
        text = _text(tokenizer, generated).decode("utf-8", "replace")
        facts = {
            "checkpoint": str(path),
            "prompt": data.decode("utf-8", "replace"),
            "text": text,
            "prompt_ids": prompt_ids,
            "ids": generated,
            "settings": {"n": n, **settings, "kernels": kernels},
        }
        click.echo(json.dumps(facts))
        return
    pieces = chain([data], (_text(tokenizer, [token]) for token in ids))
    _write(pieces if raw else _printable(pieces))


def _prompt_bytes(prompt: str | None, prompt_file: BinaryIO | None) -> bytes:
    from gru_ref.errors import UsageError

    if prompt_file is None:
        return os.fsencode(prompt or "")
    if prompt is not None:
        raise UsageError("--prompt and --prompt-file contradict each other; give one")
    try:
        return prompt_file.read()
    except OSError as error:
        raise UsageError(f"{prompt_file.name}: cannot be read: {error.strerror}") from None


def _prompt_ids(data: bytes, tokenizer: "Tokenizer") -> list[int]:
    """The token ids that the model reads; unknown bytes are counted on standard error."""
    from gru_ref.errors import UsageError

    if tokenizer.name == "ids":
        try:
            ids = [int(word) for word in data.split()]
        except ValueError:
            raise UsageError(
                "the prompt of a model with tokenizer 'ids' must be token ids, as in '5 17'"
            ) from None
        if not ids:
            raise UsageError("a model with tokenizer 'ids' has no token to start from; give --prompt '5 17'")
        return ids
    if not data:
        return [] if tokenizer.start_id is None else [tokenizer.start_id]
    ids = tokenizer.encode(data).tolist()
    unknown = 0 if tokenizer.unknown_id is None else ids.count(tokenizer.unknown_id)
    if unknown:
        click.echo(
            f"gru-ref: {unknown:,} of the prompt's {len(data):,} bytes are unknown to tokenizer "
            f"'{tokenizer.name}' and are read as its unknown token",
            err=True,
        )
    return ids


def _text(tokenizer: "Tokenizer", ids: list[int]) -> bytes:
    """What generated ids are printed as; those of tokenizer 'ids' as numbers, each behind a space."""
    if tokenizer.name == "ids":
        return "".join(f" {token}" for token in ids).encode()
    return tokenizer.decode(ids)


def _printable(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole characters, and a final newline, in the encoding of standard output; it never fails for one."""
    from gru_ref.generate import stream_text

    is_terminal, encoding = sys.stdout.isatty(), sys.stdout.encoding
    for text in chain(stream_text(pieces), ["\n"]):
        shown = text.translate(_CONTROLS) if is_terminal else text
        yield shown.encode(encoding, "backslashreplace")


def _write(pieces: Iterable[bytes]) -> None:
    """Write piece by piece; a reader sees each at once, or as often as is worth a system call."""
    out = sys.stdout.buffer
    flushed = 0.0
    for piece in pieces:
        out.write(piece)
        if time.monotonic() - flushed > FLUSH_SECONDS:
            out.flush()
            flushed = time.monotonic()
    out.flush()
