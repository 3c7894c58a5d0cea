"""A training step of GPT-2, against PyTorch with scaled_dot_product_attention and fused AdamW, eager."""

from dataclasses import dataclass

from gru_ref.bench import _ours
from gru_ref.bench._peer import NO_TORCH, torch_peers
from gru_ref.bench._rows import Row, faster, missing
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import alternate
from gru_ref.config import ModelConfig

BAR = 1.8


@dataclass(frozen=True)
class Shape:
    """A size of the work."""

    layers: int
    width: int
    context: int
    B: int
    V: int
    heads: int


SHAPES = (Shape(4, 128, 64, 12, 65, 4), Shape(6, 384, 256, 4, 65, 6), Shape(12, 768, 256, 2, 50304, 12))


def run(settings: Settings) -> list[Row]:
    """A row a shape."""
    return [compare(shape, settings, "torch, eager", BAR, compiled=False) for shape in SHAPES]


def compare(s: Shape, settings: Settings, peer: str, bar: float, *, compiled: bool) -> Row:
    """Ours and the peer on one shape; every sequence fills the context."""
    work = f"GPT step, {s.layers} layers, {s.width} wide, ctx {s.context}, B {s.B}, V {s.V}"
    peers = torch_peers()
    if peers is None:
        return missing(work, f"faster than {peer}", bar, NO_TORCH)
    config = ModelConfig(
        kind="gpt2",
        layers=s.layers,
        hidden=s.width,
        heads=s.heads,
        context=s.context,
        vocab_size=s.V,
        tied=True,
    )
    model = _ours.language_model(config, settings.kernels)
    batch = _ours.random_batch(config, s.context, s.B)
    theirs = peers.training(peers.same_model(model, settings.threads), batch, compiled=compiled)
    ours = _ours.Training(model, _ours.ADAMW, batch)
    _ours.check_same_losses(ours, theirs, work)
    return faster(work, alternate({"ours": ours, peer: theirs}, settings), peer, bar)
