"""A model's vocabulary without its weights: text to token ids and back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llama_ckpt.engine._llama import _internals, llama_cpp
from llama_ckpt.errors import BadInput
from llama_ckpt.fingerprint import TokenIds


class LlamaCppVocabulary:
    """The vocabulary of a GGUF file, read by llama.cpp without the weights. That takes some tens of milliseconds for any
    model size.

    Raises:
        BadInput: the file does not exist, llama.cpp cannot load it, or it has no vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        try:
            self._model = _internals.LlamaModel(path_model=str(Path(path)), params=params, verbose=False)
        except (ValueError, RuntimeError) as error:
            raise BadInput(what="model file", value=str(path), reason=f"llama.cpp cannot load it: {error}") from error
        if not _has_vocabulary(self._model):
            raise BadInput(what="model file", value=str(path), reason="it has no vocabulary")  # to use it would abort

    def token_ids(self, text: str) -> TokenIds:
        """The token ids of a text, the same that `LlamaCppEngine` gives; shape `[n_tokens]`.

        Raises:
            BadInput: the text gives no token.
        """
        return completion_ids(self._model, lambda data: self._model.tokenize(data, add_bos=False, special=True), text)

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of token ids for people to read, with special tokens spelt out."""
        return text_of(self._model, token_ids)


def completion_ids(model: _internals.LlamaModel, tokenize: Callable[[bytes], list[int]], text: str) -> TokenIds:
    """The token ids that a `Llama` would evaluate to complete a text, with BOS and EOS if the model adds them; shape
    `[n_tokens]`. `tokenize` gives those of the text alone.

    Raises:
        BadInput: the text gives no token.
    """
    if not _has_vocabulary(model):
        raise BadInput(what="input text", value=text[:40], reason="the model has no vocabulary: give token ids")
    # The same rule as in Llama._create_completion: with another one, a completion could not reuse the state.
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
    """The text of token ids, with special tokens spelt out. Ids that the model does not have and bytes that are not UTF-8 become
    U+FFFD. For a model without a vocabulary: the ids themselves.
    """
    if not _has_vocabulary(model):
        return " ".join(map(str, token_ids.tolist()))
    data = b"".join(_piece(model, int(token)) for token in token_ids)
    return data.decode(errors="replace")


def _has_vocabulary(model: _internals.LlamaModel) -> bool:
    """Without a vocabulary llama.cpp's functions to tokenise and detokenise abort the process."""
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
        size = -n  # the size that it needs
