"""Text from a model: the distribution of the next token, the draw, and the loop that feeds it back.

With z the logits over the true vocabulary V (padded rows are cut off first), sorted from the largest down,
equal ones by id, the next token is drawn so:

    temperature   p ∝ exp((z − max z)/T)             T = 0: all of it on the first, which is greedy decoding
    top-k         keep the first k                   0, or k ≥ V, keeps all
    top-p         keep the fewest first ones whose share of what top-k left reaches p        1 keeps all
    draw          the first id whose cumulative probability is above u

u of position i is a function of (seed, SAMPLING, i) alone, so there is no generator state to carry, and a
longer sample begins with the shorter one. All in float64. Every id below V can be drawn, special tokens too;
a trained model gives those it never saw as a target a small probability, not zero.

Not here: files, terminals and the prompt's encoding.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gru_ref import random
from gru_ref.errors import RunError, UsageError
from gru_ref.models import LanguageModel
from gru_ref.types import Array

PROMPT_CHUNK = 1024  # prompt tokens in one forward pass: bounds memory, changes nothing else
MAX_POSITION = 2**32  # a position is one word of the random counter


def probabilities(logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Array:
    """logits (V,) -> probabilities (V,) float64 of the next token, 0 where filtered out.

    Filters rank by the logits themselves: a huge temperature rounds probabilities to equal ones. A logit of
    −inf is a token that is never drawn. Raises UsageError for a setting out of range, RunError where the
    largest logit is not finite.
    """
    check_settings(temperature, top_k, top_p)
    z = logits.astype(np.float64)
    if not np.isfinite(z.max()):
        raise RunError(f"the largest logit is {z.max()}; the weights do not suit the model's precision")
    p = np.zeros(len(z))
    if temperature == 0:
        p[z.argmax()] = 1
        return p
    with np.errstate(over="ignore"):  # a tiny temperature: −inf, whose exponential is the 0 that is meant
        weights = np.exp((z - z.max()) / temperature)
    if (not top_k or top_k >= len(z)) and top_p == 1:  # all are kept: no need to sort a large vocabulary
        return weights / weights.sum()
    kept = np.argsort(-z, kind="stable")[: top_k or None]
    if top_p < 1:
        share = np.cumsum(weights[kept])
        kept = kept[: np.searchsorted(share / share[-1], top_p) + 1]
    p[kept] = weights[kept] / weights[kept].sum()
    return p


def choose(logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, u: float) -> int:
    """The id drawn from logits (V,) by u in [0, 1); settings and errors as for `probabilities`."""
    cumulative = np.cumsum(probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p))
    return int(np.searchsorted(cumulative / cumulative[-1], u, side="right"))


def check_settings(temperature: float, top_k: int, top_p: float) -> None:
    """Raise UsageError for a setting out of range."""
    if not 0 <= temperature < np.inf:
        raise UsageError(f"temperature must be at least 0 and finite, not {temperature}; 0 is greedy")
    if top_k < 0:
        raise UsageError(f"top-k must be at least 0, not {top_k}; 0 turns it off")
    if not 0 < top_p <= 1:
        raise UsageError(f"top-p must be above 0 and at most 1, not {top_p}; 1 turns it off")


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Array,
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    start: int = 0,
) -> Iterator[int]:
    """Yield the n tokens that follow the prompt `ids`, which has at least one; both may be of any length.

    The state starts empty and is carried. A model with a `context` reads the last tokens of a longer prompt,
    and once its state is full, the last `context` tokens of the text anew for each token; so every token
    depends on those before it as if nothing were carried. start: the position of the first draw, for a
    caller that goes on from an earlier sample. Raises UsageError at once, RunError while generating.
    """
    check_settings(temperature, top_k, top_p)
    prompt = np.asarray(ids)
    V = model.config.vocab_size
    if prompt.size == 0:
        raise UsageError("the prompt has no token; start an empty one with the tokenizer's start_id")
    outside = prompt[(prompt < 0) | (prompt >= V)]
    if outside.size:
        raise UsageError(f"the prompt has token id {outside[0]}, which is not in 0…{V - 1}")
    if n < 0:
        raise UsageError(f"n must be at least 0, not {n}")
    if not 0 <= start <= MAX_POSITION - n:
        raise UsageError(f"positions lie in 0…2^32−1, which {n} from {start} on do not")
    if not 0 <= seed <= random.MAX_SEED:
        raise UsageError(f"seed must lie in 0…2^64−1, not {seed}")

    def tokens() -> Iterator[int]:
        context, text = model.context, prompt.astype(np.int64)
        if context is not None:
            text = text[-context:]
        state, pending = None, text
        for position in range(start, start + n):
            with np.errstate(over="ignore", invalid="ignore"):  # `probabilities` reports what comes of it
                for i in range(0, len(pending), PROMPT_CHUNK):
                    logits, state, _ = model.forward(pending[i : i + PROMPT_CHUNK, None], state)
            (u,) = random.uniform(1, seed=seed, stream=random.SAMPLING, step=position)
            token = choose(logits[-1, 0, :V], temperature=temperature, top_k=top_k, top_p=top_p, u=u)
            yield token
            pending = np.array([token])
            if context is not None:
                text = np.append(text, token)
                if len(text) > context:
                    text = text[1:]
                    state, pending = None, text

    return tokens()


def stream_text(pieces: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 text piece by piece, a character once its last byte is there; invalid bytes become U+FFFD.

    Joined, it is what decoding all bytes at once gives. A piece may be empty; one more comes at the end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)
