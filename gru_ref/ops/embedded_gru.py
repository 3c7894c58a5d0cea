"""The first GRU layer of a language model, on rows of an embedding: embedding.py, then gru.py.

    x = W_e[ids]        y = GRU(x)        dW_e[v] = Σ dx[t, b] over all t, b with ids[t, b] = v

They are one operation for the sake of its twins: what x adds to the gates depends on a token's id alone.
Where the vocabulary V is smaller than T·B, products over V rows do for those over T·B, with W, b_i of gru.py:

    W x + b_i = (W_e Wᵀ)[ids] + b_i        dW_e = D W        dW = Dᵀ W_e        db_i = Σ_v D[v]

and D[v] = Σ da[t, b] over all t, b with ids[t, b] = v, the gates' gradients (V, 3H) summed by id.

    ids (T, B)   table (V, E) = W_e         h0 (B, H)   y (T, B, H)
    weight_ih (3H, E)   bias_ih (3H,)       weight_hh (3H, H)   bias_hh (3H,)
"""

from typing import Any

import numpy as np

from gru_ref.ops import embedding, gru
from gru_ref.ops.matmul import round_to
from gru_ref.types import Array


def forward(
    ids: Array,
    table: Array,
    h0: Array | None,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array,
    bias_hh: Array,
    *,
    reset_after: bool = True,
    precision: str = "fp32",
) -> tuple[Array, tuple[Any, ...]]:
    """ids integer in 0…V−1, h0 or None for zeros, the rest as above -> y, cache.

    cache = (table, what gru.forward's has after x, ids): rows are looked up again rather than kept.
    """
    x, _ = embedding.forward(ids, table)
    options: dict[str, Any] = {"reset_after": reset_after, "precision": precision}
    y, cache = gru.forward(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, **options)
    return y, (table, *cache[1:], ids)


def backward(
    dy: Array, cache: tuple[Any, ...], dh_T: Array | None = None, total: Array | None = None
) -> tuple[None, Array, Array | None, Array, Array, Array, Array]:
    """dy (T, B, H), and dh_T (B, H) where the last state was used by itself -> None for the ids,
    dtable (V, E), or `total`, where given, to which dtable is added, and the rest as gru.backward."""
    table, *others, ids = cache
    x, embedding_cache = embedding.forward(ids, table)
    x = round_to(x, others[-1])
    dx, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh = gru.backward(dy, (x, *others), dh_T)
    _, dtable = embedding.backward(dx, embedding_cache, total)
    return None, dtable, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh


CASES: dict[str, dict[str, Any]] = {
    "few tokens of a large vocabulary": {"V": 23, "T": 3, "B": 2},
    "many of a small one": {"V": 5, "T": 7},
    "reset_before": {"reset_after": False},
    "no h0": {"h0": False},
}


def example(
    rng: np.random.Generator,
    V: int = 5,
    T: int = 5,
    B: int = 3,
    E: int = 4,
    H: int = 6,
    h0: bool = True,
    reset_after: bool = True,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """ids (T, B) below V, some of which repeat, table (V, E), the weights and h0 (B, H) of gru.example."""
    inputs = gru.example(rng, T, B, E, H, h0, reset_after, dtype)
    del inputs["x"]
    return {
        "ids": rng.integers(0, V, (T, B)),
        "table": rng.standard_normal((V, E)).astype(dtype),
    } | inputs
