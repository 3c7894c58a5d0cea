"""Text to training windows: tokenizers, a corpus from files, and the windows that a step sees.

    tokenizers  bytes ↔ token ids
    bpe         the tokenizer that needs a vocabulary, and vocabularies on disk
    bpe_training  a vocabulary made in another process
    sources     files → documents
    parallel    pieces of text → token ids in several processes
    corpus      files → one array of token ids; encoded corpora on disk
    windows     token ids → (T, B) inputs and targets, in an order that a cursor names

Not here: the model, and anything that downloads. Names are loaded when first used; h5py only where a file
needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gru_ref.data.corpus import Corpus as Corpus
    from gru_ref.data.corpus import encode_files as encode_files
    from gru_ref.data.corpus import load_corpus as load_corpus
    from gru_ref.data.corpus import split as split
    from gru_ref.data.tokenizers import Tokenizer as Tokenizer
    from gru_ref.data.tokenizers import get_tokenizer as get_tokenizer
    from gru_ref.data.windows import Windows as Windows

_HOME = {
    "Corpus": "corpus",
    "encode_files": "corpus",
    "load_corpus": "corpus",
    "split": "corpus",
    "Tokenizer": "tokenizers",
    "get_tokenizer": "tokenizers",
    "Windows": "windows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
