"""A model's vocabulary alone: text to token ids and back, without loading its weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llama_ckpt.errors import BadInput, EngineMissing
from llama_ckpt.fingerprint import TokenIds

try:
    import llama_cpp
    from llama_cpp import _internals
except (
    ImportError,
    OSError,
    RuntimeError,
) as error:  # not installed, or its native library does not load here
    raise EngineMissing(reason=str(error)) from error


class LlamaCppVocabulary:
    """The vocabulary of a GGUF file, read by llama.cpp without the weights: some tens of milliseconds, whatever the model's size.

    Raises:
        BadInput: the file is not there, llama.cpp cannot load it, or it has no vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        try:
            self._model = _internals.LlamaModel(path_model=str(Path(path)), params=params, verbose=False)
        except (ValueError, RuntimeError) as error:
            raise BadInput(what="model file", value=str(path), reason=f"llama.cpp cannot load it: {error}") from error
        if not _has_vocabulary(self._model):
            raise BadInput(what="model file", value=str(path), reason="it has no vocabulary")  # to ask it would abort

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, the same that `LlamaCppEngine` gives; shape `[n_tokens]`.

        Raises:
            BadInput: the text gives no token.
        """
        return completion_ids(self._model, lambda data: self._model.tokenize(data, add_bos=False, special=True), text)

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of some token ids, special tokens spelt out, for people to read."""
        return text_of(self._model, token_ids)


def completion_ids(model: _internals.LlamaModel, tokenize: Callable[[bytes], list[int]], text: str) -> TokenIds:
    """The token ids that a `Llama` would evaluate to complete a text, with BOS and EOS where the model adds them; shape
    `[n_tokens]`. `tokenize` gives those of the text alone.

    Raises:
        BadInput: the text gives no token.
    """
    if not _has_vocabulary(model):
        raise BadInput(what="input text", value=text[:40], reason="the model has no vocabulary: give token ids")
    # The rule of Llama._create_completion: another one would leave a completion nothing to reuse.
    cls_id, sep_id = model.token_cls(), model.token_sep()
    bos = cls_id if cls_id != -1 else model.token_bos()
    eos = sep_id if sep_id != -1 else model.token_eos()
    ids = tokenize(text.encode())
    if model.add_bos_token() and bos != -1:
        ids = [bos, *ids]
    if model.add_eos_token() or sep_id != -1:
        ids = [*ids, eos]
    if not ids:
        raise BadInput(what="input text", value=text[:40], reason="the model's tokenizer gives no token for it")
    return np.array(ids, dtype=np.int32)


def text_of(model: _internals.LlamaModel, token_ids: TokenIds) -> str:
    """The text of some token ids, special tokens spelt out; what is no token of the model or no UTF-8 shows as U+FFFD. Of a model
    without a vocabulary the ids themselves.
    """
    if not _has_vocabulary(model):
        return " ".join(map(str, token_ids.tolist()))
    data = b"".join(_piece(model, int(token)) for token in token_ids)
    return data.decode(errors="replace")


def _has_vocabulary(model: _internals.LlamaModel) -> bool:
    """Without one, llama.cpp's tokenizer and its reverse abort the process."""
    return int(llama_cpp.llama_vocab_type(model.vocab)) != llama_cpp.LLAMA_VOCAB_TYPE_NONE


def _piece(model: _internals.LlamaModel, token: int) -> bytes:
    if not 0 <= token < model.n_vocab():
        return "\ufffd".encode()
    size = 64
    while True:
        buffer = (ctypes.c_char * size)()
        n = int(llama_cpp.llama_token_to_piece(model.vocab, token, buffer, size, 0, True))
        if n >= 0:
            return buffer.raw[:n]
        size = -n  # what it needs
