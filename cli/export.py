"""`gru-ref export`: a checkpoint's weights for other programs. The work is done by gru_ref.interop."""

import json

import click


@click.command("export")
@click.argument("checkpoint", metavar="CKPT|RUN")
@click.option(
    "--to",
    type=click.Choice(["torch", "keras", "hf-gpt2", "safetensors", "npz"]),
    required=True,
    help="Names and layouts: PyTorch's, Keras's (an npz), Hugging Face's GPT-2, or our own.",
)
@click.option("-o", "--output", required=True, metavar="FILE", help="The .safetensors or .npz file to write.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(checkpoint: str, to: str, output: str, force: bool, as_json: bool) -> None:
    """Write the weights of a checkpoint for another program.

    From a run directory the newest checkpoint is taken. For hf-gpt2 FILE may be a folder; config.json is
    written beside the weights, and for other programs the vocabulary of a bpe, as a tokenizer.json. torch and
    hf-gpt2 are safetensors, which the extra gru-ref[interop] writes.
    """
    from gru_ref.interop.exchange import export_checkpoint

    facts = export_checkpoint(checkpoint, to, output, overwrite=force)
    if as_json:
        click.echo(json.dumps(facts))
        return
    files = " and ".join(click.format_filename(file) for file in facts["files"])
    click.echo(f"wrote {files}: {facts['tensors']} tensors, {facts['numbers']:,} numbers")
