"""FLOPs a token, by the formula that the field quotes as MFU's numerator.

    6·N          N: weights in matrix products, 2 FLOPs forward and 4 backward for each token
    + 6·L·C·T    gpt2: causal attention over a window of T, where a query sees half of the keys on average

Counted is what the model asks for, not what an engine does: tables that are only looked up, elementwise work,
the optimizer and the recomputation of checkpointed activations do not count, products that our twins spare
themselves (ops/embedded_gru.py) do, so the share of a peak compares engines. A tied embedding is
the classifier and counts once; rows that pad the vocabulary count.
"""

from gru_ref.config import Config
from gru_ref.plan.memory import parameters

FORMULA = {
    "gru-lm": "6 N for N weights in products: 2 forward, 4 backward",
    "gpt2": "6 N for N weights in products: 2 forward, 4 backward; 6 L C T for attention",
}


def flops_per_token(config: Config) -> dict[str, int]:
    """FLOPs of one training token, by part; their sum is the formula's. The vocabulary size must be known."""
    model = config.model
    parts: dict[str, int] = {}
    for row in parameters(config):
        part = _part(row.name, model.tied)
        if part and len(row.shape) == 2:
            parts[part] = parts.get(part, 0) + 6 * row.count
    if model.kind == "gpt2":
        parts["attention"] = 6 * model.layers * model.hidden * config.train.seq_len
    return parts


def _part(name: str, tied: bool) -> str | None:
    """Which product a parameter is in; None for a table that is only looked up."""
    if name == "classifier.weight" or (tied and name == "embedding.weight"):
        return "classifier"
    if name.startswith("gru."):
        return "products with the state" if name.endswith("weight_hh") else "products with the input"
    return "products of the blocks" if name.startswith("block.") else None
