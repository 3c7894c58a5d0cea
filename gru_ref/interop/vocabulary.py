"""The vocabulary of tokenizer bpe as a tokenizer.json, which Hugging Face's libraries and our --vocab read.

Not here: reading one, which gru_ref/data/bpe.py does. Unlike vocab.json with merges.txt, this format says
which tokens are special.
"""

from typing import Any

from gru_ref.data.tokenizers import Tokenizer

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_AS_IT_STANDS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_NO_VARIATIONS: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The JSON object for a tokenizer bpe; `bpe.load` of it has the same fingerprint."""
    definition, lengths = tokenizer.definition(), tokenizer.token_bytes()
    assert definition is not None
    assert lengths is not None
    tokens = definition["tokens"]
    special = [
        {"id": number, "content": token, "special": True, **_AS_IT_STANDS}
        for number, token in enumerate(tokens)
        if not lengths[number]
    ]
    model = {
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in definition["merges"]],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": _NO_VARIATIONS | model,
    }
