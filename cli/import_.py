"""`gru-ref import`: weights of other programs as a checkpoint. The work is done by gru_ref.interop."""

import json

import click


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option(
    "--as", "kind", type=click.Choice(["gru-lm", "gpt2"]), required=True, help="The kind of model it is."
)
@click.option("-o", "--output", required=True, metavar="CKPT.h5", help="The checkpoint to write.")
@click.option("--set", "assignments", multiple=True, metavar="KEY.SUB=VALUE", help="What FILE does not tell.")
@click.option("--rename", "renames", multiple=True, metavar="OLD=NEW", help="Names that begin with OLD.")
@click.option("--force", is_flag=True, help="Replace CKPT.h5 if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was read as JSON.")
def command(
    file: str,
    kind: str,
    output: str,
    assignments: tuple[str, ...],
    renames: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Make a checkpoint, at step 0, of another program's weights.

    FILE is a .safetensors or .npz file, or a folder of Hugging Face's. Layouts and names are recognised;
    docs/exchange.md lists them. Pickles (.pt, .pth, .bin) are refused.
    """
    from gru_ref.interop.exchange import import_file

    facts = import_file(
        file,
        kind,
        output,
        settings=_pairs(assignments, "--set", "train.seq_len=64"),
        rename=_pairs(renames, "--rename", "rnn.=gru."),
        overwrite=force,
    )
    for notice in facts["notices"]:
        click.echo(f"gru-ref: notice: {notice}", err=True)
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"wrote {click.format_filename(output)}: {facts['parameters']:,} parameters from the layout "
        f"{facts['layout']}, vocabulary {facts['model']['vocab_size']}, tokenizer {facts['tokenizer']}"
    )


def _pairs(assignments: tuple[str, ...], option: str, example: str) -> dict[str, str]:
    pairs = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise click.UsageError(f"{option} {assignment}: write it with a =, as in {option} {example}")
        pairs[key.strip()] = value.strip()
    return pairs
