"""draft"""
from gru_ref.config import ModelConfig
from gru_ref.models import padded_vocab


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape."""
    rows, hidden = padded_vocab(config), config.hidden
    width = config.embedding or hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (rows, width)}
    for layer in range(config.layers):
        shapes[f"gru.{layer}.weight_ih"] = (3 * hidden, width if layer == 0 else hidden)
        shapes[f"gru.{layer}.weight_hh"] = (3 * hidden, hidden)
        shapes[f"gru.{layer}.bias_ih"] = (3 * hidden,)
        shapes[f"gru.{layer}.bias_hh"] = (3 * hidden,)
    if not config.tied:
        shapes["classifier.weight"] = (rows, hidden)
    shapes["classifier.bias"] = (rows,)
    return shapes
