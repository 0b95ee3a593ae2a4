"""llama-cpp-python's `Llama` as an engine.

States are read and written in memory, by `llama_state_seq_get_data` and `_set_data`. The native file functions are never
called: a file that is one byte short aborts the process there, and a save to a full disk can report success.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from llama_ckpt.engine import Progress, Vector, no_progress
from llama_ckpt.engine._llama import llama_cpp
from llama_ckpt.engine.digests import FileDigests, identity_of
from llama_ckpt.engine.identity import fingerprint_of, memory_kind_of, rotation_of
from llama_ckpt.engine.tracking import Tracking
from llama_ckpt.engine.vocabulary import completion_ids, text_of
from llama_ckpt.errors import BadInput, EngineFailed, EngineStateMismatch, Unsupported
from llama_ckpt.fingerprint import TokenIds, common_prefix
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import ModelDimensions

_SEQ = 0  # `Llama` keeps its one conversation in sequence 0
_NO_POOLING, _LAST_TOKEN = 0, 3  # enum llama_pooling_type


class LlamaCppEngine:
    """An engine around an existing `llama_cpp.Llama`.

    After `evaluate` the `Llama` continues as if it had evaluated the tokens itself: `n_tokens`, `input_ids` and the logits of the
    next token are right, completions reuse the prefix, and seed and sampler are not touched. After `load` the same holds, except
    that there are no logits: a completion evaluates the last token again. With `logits_all` the scores of loaded positions are
    NaN.

    The constructor decodes a single token if the `Llama` holds nothing yet, to learn the layout of its states. It hashes the file
    that is under the `Llama`'s path now, and reads LLAMA_ATTN_ROT_DISABLE now: so wrap a `Llama` soon after you made it.
    `from_path` detects a file that changes while it is loaded.

    Raises:
        BadInput: the model file cannot be read.
        EngineFailed: the engine gave no state.
        Unsupported: the layout of its state is not known.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        *,
        model_name: str | None = None,
        digests: FileDigests | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.llama = llama
        path = Path(llama.model_path)
        self.model_name = model_name or path.stem
        self.engine_name = f"llama-cpp-python {llama_cpp.__version__}"
        self.memory_kind = memory_kind_of(llama)
        # llama.cpp rounds the size of the context up; the wrapper's array of token ids has the size that was asked for.
        self.n_ctx = min(llama.n_ctx(), len(llama.input_ids))
        self._tracking = Tracking.attached_to(llama)
        self._memory = llama_cpp.llama_get_memory(llama.ctx)
        self._digests = digests or FileDigests(platformdirs.user_cache_path("llama-ckpt") / "digests.json")
        probe = self._probe()
        self.layout = probe.layout if probe else None
        self.dimensions = ModelDimensions(
            n_layer=probe.n_layer if probe else llama_cpp.llama_model_n_layer(llama.model),
            n_kv_head=llama_cpp.llama_model_n_head_kv(llama.model),
            kv_token_bytes=probe.token_bytes if probe else 0,
        )
        self.fingerprint = fingerprint_of(
            llama, probe, memory_kind=self.memory_kind, digests=self._digests, progress=progress
        )
        self.rotation = rotation_of(llama, probe, rotates="kv_rotation" in self.fingerprint.fields) if probe else None

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        *,
        model_name: str | None = None,
        digests: FileDigests | None = None,
        progress: Progress = no_progress,
        **llama_options: Any,
    ) -> LlamaCppEngine:
        """Loads a GGUF file and wraps it. `llama_options` go to `llama_cpp.Llama` (n_ctx=8192, flash_attn=True, …).

        Raises:
            BadInput: the file does not exist, or llama.cpp cannot load it.
        """
        file = Path(path)
        before = identity_of(file)
        try:
            llama = llama_cpp.Llama(str(file), **{"verbose": False, **llama_options})
        except (ValueError, RuntimeError, AssertionError) as error:
            raise BadInput(what="model file", value=str(file), reason=f"llama.cpp cannot load it: {error}") from error
        engine = cls(llama, model_name=model_name, digests=digests, progress=progress)
        if identity_of(file) != before:
            raise BadInput(what="model file", value=str(file), reason="it changed while it was loaded; load it again")
        return engine

    def __repr__(self) -> str:
        held = f"holds {self.llama.n_tokens} of {self.n_ctx} tokens"
        return f"{type(self).__name__}({self.model_name!r}, {self.memory_kind} memory, {held})"

    # -- what the engine is ------------------------------------------------------------------------------------------

    def _probe(self) -> kv_state.KvState | None:
        """A state of this context, parsed: of what it holds, or of one token that is decoded and removed again. None if its
        layout is not known and the memory is not full attention: such a model can be evaluated, but its states cannot be
        saved.
        """
        held = self.llama.n_tokens
        if not held:
            self._eval(np.array([max(self.llama.token_bos(), 0)], dtype=np.int32))
        try:
            return kv_state.parse(self._captured())
        except Unsupported:
            if self.memory_kind.can_be_truncated:
                raise
            return None
        finally:
            if not held:
                self._forget(clear_data=False)

    def token_ids(self, text: str) -> TokenIds:
        """The token ids that `llama(text)` would evaluate, with BOS and EOS if the model adds them; shape `[n_tokens]`.

        Raises:
            BadInput: the text gives no token.
        """
        llama = self.llama
        return completion_ids(llama._model, lambda data: llama.tokenize(data, add_bos=False, special=True), text)

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of token ids for people to read, with special tokens spelt out."""
        return text_of(self.llama._model, token_ids)

    # -- what the engine holds ---------------------------------------------------------------------------------------

    def held_token_ids(self) -> TokenIds:
        """The token ids whose state the engine holds, in order of position; shape `[n_tokens]`. They end before the first
        position that has no token: of an image or a sound.
        """
        n_tokens = min(self.llama.n_tokens, self._tracking.n_known)
        return self.llama.input_ids[:n_tokens].astype(np.int32)

    def capture(self) -> memoryview:
        """A copy of the state of the held tokens, as bytes.

        Raises:
            EngineFailed: the engine gave no state, or holds other cells than the wrapper says.
            Unsupported: some positions have no token: they are of an image or a sound.
        """
        if self.llama.n_tokens > self._tracking.n_known:
            raise Unsupported(
                what="a state with media", reason="its image or sound is in no token id, and so in no key"
            )
        return self._captured()

    def _captured(self) -> memoryview:
        n_tokens = self.llama.n_tokens
        # The wrapper may have lowered n_tokens and not told the engine yet; its eval() would remove these cells, too.
        llama_cpp.llama_memory_seq_rm(self._memory, _SEQ, n_tokens, -1)
        llama_cpp.llama_synchronize(self.llama.ctx)
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, _SEQ)
        if last != n_tokens - 1:
            raise EngineFailed(reason=f"the wrapper says {n_tokens} tokens, the engine's last position is {last}")
        size = llama_cpp.llama_state_seq_get_size(self.llama.ctx, _SEQ)
        try:
            buffer = np.empty(size, dtype=np.uint8)
        except MemoryError as error:
            raise EngineFailed(reason=f"there is no memory for {size} bytes of state") from error
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = llama_cpp.llama_state_seq_get_data(self.llama.ctx, pointer, size, _SEQ)
        if size == 0 or got != size:
            raise EngineFailed(reason=f"it gave {got} of {size} bytes of state")
        return buffer.data.toreadonly()

    def load(self, state: memoryview, token_ids: TokenIds) -> None:
        """Replaces the held state by `state`, which contains the cells of exactly these tokens. There are no logits afterwards.

        Raises:
            EngineFailed: the engine refused the state. Engine and wrapper then hold nothing, and the data is cleared.
            BadInput: more tokens than the context has cells.
        """
        n_tokens = len(token_ids)
        self._require_room(n_tokens)
        try:
            self._set_state(state, n_tokens)
        except BaseException:
            self._forget(clear_data=True)
            raise
        self.llama.input_ids[:n_tokens] = token_ids
        if self.llama._logits_all:
            self.llama.scores[:n_tokens, :] = np.nan
        self.llama.n_tokens = self._tracking.n_known = n_tokens

    def _set_state(self, state: memoryview, n_tokens: int) -> None:
        self._forget(clear_data=False)
        data = np.frombuffer(state, dtype=np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = llama_cpp.llama_state_seq_set_data(self.llama.ctx, pointer, data.nbytes, _SEQ)
        if got != data.nbytes:
            raise EngineFailed(reason=f"it took {got} of {data.nbytes} bytes of state")
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, _SEQ)
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, _SEQ)
        # A window or a recurrent state does not hold the first positions any more.
        if last != n_tokens - 1 or (first != 0 and self.memory_kind.can_be_truncated):
            raise EngineFailed(reason=f"after loading {n_tokens} tokens it holds positions {first} to {last}")

    def evaluate(self, token_ids: TokenIds, progress: Progress = no_progress, *, n_kept: int = 0) -> None:
        """Brings the `Llama` to the state of `token_ids`, of which it keeps the first `n_kept`. `progress` is called with the
        number of tokens done and the total.

        The last token is decoded by itself, as after a restore. So cold and restored runs compute it in the same batch shape, and
        continue with the same numbers.

        Raises:
            EngineFailed: the engine failed. Engine and wrapper then hold nothing, and the data is cleared.
            EngineStateMismatch: the first `n_kept` held tokens are not those of the input, or are all of it.
            BadInput: more tokens than the context has cells, or a token id that is not in the vocabulary.
        """
        total = len(token_ids)
        self._require_room(total)
        if (largest := int(token_ids.max())) >= self.llama.n_vocab():
            raise BadInput(what="token id", value=largest, reason=f"the model's vocabulary has {self.llama.n_vocab()}")
        self._require_held(token_ids, n_kept)
        try:
            self._drop_from(n_kept)
            for start in range(n_kept, total - 1, self.llama.n_batch):
                self._eval(token_ids[start : min(start + self.llama.n_batch, total - 1)])
                progress(self.llama.n_tokens, total)
            self._eval(token_ids[total - 1 :])
            progress(total, total)
        except BaseException:
            self._forget(clear_data=True)
            raise

    def next_token(self) -> tuple[int, float]:
        """The most likely next token, and its probability: the maximum of the softmax of the last logits, at temperature 1.

        Raises:
            EngineFailed: there are no logits.
        """
        pointer = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
        if not pointer:
            raise EngineFailed(reason="it has no logits: evaluate something first")
        logits = np.ctypeslib.as_array(pointer, shape=(self.llama.n_vocab(),)).astype(np.float64)
        best = int(logits.argmax())
        return best, float(1 / np.exp(logits - logits[best]).sum())

    def embedding(self) -> Vector | None:
        """The embedding of the evaluated input if the model pools (`embedding=True`), not normalised, shape `[n_embd]`; None
        if it does not pool.

        Only last-token pooling works with a restored prefix. The other kinds need all tokens to be evaluated in one call
        (llama_get_embeddings_seq).

        Raises:
            Unsupported: it pools in another way.
            EngineFailed: there is no embedding.
        """
        pooling = llama_cpp.llama_pooling_type(self.llama.ctx) if self.llama.context_params.embeddings else _NO_POOLING
        if pooling == _NO_POOLING:
            return None
        if pooling != _LAST_TOKEN:
            raise Unsupported(what=f"pooling of type {pooling}", reason="only last-token pooling goes with kept cells")
        pointer = llama_cpp.llama_get_embeddings_seq(self.llama.ctx, _SEQ)
        if not pointer:
            raise EngineFailed(reason="it has no embedding: evaluate something first")
        return np.ctypeslib.as_array(pointer, shape=(self.llama.n_embd(),)).astype(np.float32)

    def _require_room(self, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            reason = f"the context has {self.n_ctx}; set a larger n_ctx"
            raise BadInput(what="input", value=f"{n_tokens} tokens", reason=reason)

    def _require_held(self, token_ids: TokenIds, n_kept: int) -> None:
        held = self.held_token_ids()
        if not 0 <= n_kept <= min(len(held), len(token_ids) - 1):
            reason = f"{n_kept} tokens of {len(token_ids)} cannot be kept where it holds {len(held)}"
            raise EngineStateMismatch(reason=reason)
        if (n_common := common_prefix(held, token_ids)) < n_kept:
            raise EngineStateMismatch(reason=f"they differ from token {n_common} on")

    def _drop_from(self, n_tokens: int) -> None:
        """Removes all but the first `n_tokens` cells from engine and wrapper."""
        if n_tokens == 0:
            self._forget(clear_data=False)
        elif not llama_cpp.llama_memory_seq_rm(self._memory, _SEQ, n_tokens, -1):
            raise EngineFailed(reason=f"its memory cannot be truncated after {n_tokens} tokens")
        self.llama.n_tokens = n_tokens

    def _eval(self, token_ids: TokenIds) -> None:
        try:
            self.llama.eval(token_ids.tolist())
        except (RuntimeError, ValueError) as error:
            raise EngineFailed(reason=str(error)) from error

    def _forget(self, *, clear_data: bool) -> None:
        """Empties engine and wrapper. `clear_data` also zeroes the cells: a NaN in one of them would otherwise reach later
        prompts through masked attention.
        """
        if clear_data:
            llama_cpp.llama_memory_clear(self._memory, True)
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, _SEQ, -1, -1)
        self.llama.reset()  # type: ignore[no-untyped-call]
