"""`gru-ref eval`: how well a checkpoint predicts a text. The work is in gru_ref.training.evaluation."""

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gru_ref.data.corpus import Corpus
    from gru_ref.models import LanguageModel
    from gru_ref.training.evaluation import Evaluation


@click.command("eval")
@click.argument("checkpoint", metavar="CKPT|RUN")
@click.option("--data", multiple=True, metavar="F", help="Text, .jsonl, .gz, a folder, -, an encoded .h5, …")
@click.option(
    "--seq-len", type=click.IntRange(1), metavar="T", help="Tokens in a window; default as trained."
)
@click.option(
    "--batch-size", type=click.IntRange(1), metavar="B", help="Windows at a time; default as trained."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--kernels", default="numpy", show_default=True, help="numpy or numba.")
def command(
    checkpoint: str,
    data: tuple[str, ...],
    seq_len: int | None,
    batch_size: int | None,
    as_json: bool,
    kernels: str,
) -> None:
    """Loss, bits per byte, top-1 and top-5 on a text.

    From a run directory the newest checkpoint is taken. All of the text but its first token is predicted,
    window by window, each from the empty state: a longer --seq-len gives more context, the batch size only
    speed and last bits.
    """
    from gru_ref.checkpoint import load_checkpoint
    from gru_ref.checkpoint.find import newest_checkpoint
    from gru_ref.checkpoint.restore import restore_model, restore_tokenizer
    from gru_ref.data.corpus import load_corpus
    from gru_ref.errors import DataError, RunError, UsageError

    if not data:
        raise UsageError("--data is missing: name the text to evaluate, as in --data held-out.txt")
    path = newest_checkpoint(checkpoint)
    loaded = load_checkpoint(path, weights_only=True)
    config = loaded.config
    corpus = load_corpus(data, restore_tokenizer(loaded))
    count = len(corpus.tokens)
    if count < 2:
        raise DataError(f"{data[0]}: has 1 token; at least 2 are needed, one of them to predict")
    if corpus.unknown:
        click.echo(
            f"gru-ref: {corpus.unknown:,} of {count:,} tokens are bytes that tokenizer "
            f"'{corpus.tokenizer.name}' does not know; they count as its unknown token",
            err=True,
        )
    model = restore_model(loaded, kernels=kernels)
    if seq_len is not None and model.context is not None and seq_len > model.context:
        raise UsageError(
            f"--seq-len {seq_len} is more than the {model.context} tokens the model looks back on"
        )
    # a text shorter than a window is one window: the same figures without the padding
    seq_len = min(seq_len or config.train.seq_len, count - 1)
    started = time.perf_counter()
    result = _evaluate(model, corpus, seq_len, batch_size or config.train.batch_size)
    seconds = time.perf_counter() - started
    if not math.isfinite(result.loss):
        raise RunError(f"{path}: the loss on this text is {result.loss}; its weights give no finite logits")
    facts = {
        "checkpoint": str(path),
        **result.to_dict(),
        "unknown": corpus.unknown,
        "seq_len": seq_len,
        "seconds": seconds,
        "tokens_per_second": result.tokens / seconds,
    }
    click.echo(json.dumps(facts) if as_json else _table(facts))


def _evaluate(model: "LanguageModel", corpus: "Corpus", seq_len: int, batch_size: int) -> "Evaluation":
    """All windows of the corpus, with a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from gru_ref.data.windows import Windows
    from gru_ref.training.evaluation import evaluate

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("eval", total=None)
        return evaluate(
            model,
            Windows(corpus.tokens, seq_len, seed=0),
            batch_size=batch_size,
            token_bytes=corpus.tokenizer.token_bytes(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _table(facts: dict[str, Any]) -> str:
    """One figure a line; '-' where the bytes of a token are not known."""
    bpb, n_bytes = facts["bpb"], facts["bytes"]
    rows = {
        "checkpoint": facts["checkpoint"],
        "loss": f"{facts['loss']:.6f} nats a token",
        "BPB": "-" if bpb is None else f"{bpb:.6f} bits a byte",
        "top-1": f"{facts['top1']:.2%}",
        "top-5": f"{facts['top5']:.2%}",
        "tokens": f"{facts['tokens']:,}",
        "bytes": "-" if n_bytes is None else f"{n_bytes:,}",
        "unknown": f"{facts['unknown']:,}",
        "time": f"{facts['seconds']:.2f} s, {facts['tokens_per_second']:,.0f} tokens/s",
    }
    return "\n".join(f"{name:12}{value}" for name, value in rows.items())
