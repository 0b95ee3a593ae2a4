"""llama-cpp-python's `Llama` as an engine.

State goes through `llama_state_seq_get_data` and `_set_data` on memory. The native file functions are never called: a
file short by one byte aborts the process there, and a save that ran out of disk can report success.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from llama_ckpt.engine import Progress, Vector, no_progress
from llama_ckpt.engine.digests import FileDigests, identity_of
from llama_ckpt.engine.identity import fingerprint_of, memory_kind_of, rotation_of
from llama_ckpt.engine.tracking import Tracking
from llama_ckpt.engine.vocabulary import completion_ids, text_of
from llama_ckpt.errors import BadInput, EngineFailed, EngineMissing, EngineStateMismatch, Unsupported
from llama_ckpt.fingerprint import TokenIds
from llama_ckpt.formats.kv import state as kv_state
from llama_ckpt.values import MemoryKind, ModelDimensions

try:
    import llama_cpp
except (
    ImportError,
    OSError,
    RuntimeError,
) as error:  # not installed, or its native library does not load here
    raise EngineMissing(reason=str(error)) from error

_SEQ = 0  # `Llama` keeps its one conversation in sequence 0
_NO_POOLING, _LAST_TOKEN = 0, 3  # enum llama_pooling_type


class LlamaCppEngine:
    """An engine around an existing `llama_cpp.Llama`.

    After `evaluate` the `Llama` goes on as if it had evaluated the tokens itself: `n_tokens`, `input_ids` and the next token's
    logits are right, completions reuse the prefix, seed and sampler are untouched. After `load` the same holds but for the
    logits, which a state has not: a completion evaluates the last token again. With `logits_all` the scores of loaded positions
    are NaN.

    Making one decodes a single token when the `Llama` holds nothing yet, to learn the layout of its states. The weights are
    those of the file under the `Llama`'s path at this moment, and LLAMA_ATTN_ROT_DISABLE is read now: wrap a `Llama` soon
    after it was made. `from_path` notices a file that changes while it is loaded.

    Raises:
        BadInput: the model file cannot be read.
        EngineFailed: the engine gave no state.
        Unsupported: its state has a layout not known here.
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
        # llama.cpp rounds the context up; the wrapper's own array of token ids is not.
        self.n_ctx = min(llama.n_ctx(), len(llama.input_ids))
        self._tracking = Tracking.of(llama)
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
        """Loads a GGUF and wraps it; `llama_options` go to `llama_cpp.Llama` (n_ctx=8192, flash_attn=True, …).

        Raises:
            BadInput: the file is not there, or llama.cpp cannot load it.
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

    # -- what the engine is ------------------------------------------------------------------------------------------

    def _probe(self) -> kv_state.KvState | None:
        """A state of this context, parsed: of what it holds, or of one token that is decoded and taken away again. None for
        memory other than full attention in a layout not known here: it can be evaluated, and not be saved.
        """
        held = self.llama.n_tokens
        if not held:
            self._eval(np.array([max(self.llama.token_bos(), 0)], dtype=np.int32))
        try:
            return kv_state.parse(self._captured())
        except Unsupported:
            if self.memory_kind is MemoryKind.FULL:
                raise
            return None
        finally:
            if not held:
                self._forget(clear_data=False)

    def token_ids(self, text: str) -> TokenIds:
        """The token ids that `llama(text)` would evaluate, with BOS and EOS where the model adds them; shape `[n_tokens]`.

        Raises:
            BadInput: the text gives no token.
        """
        llama = self.llama
        return completion_ids(llama._model, lambda data: llama.tokenize(data, add_bos=False, special=True), text)

    def text_of(self, token_ids: TokenIds) -> str:
        """The text of some token ids, special tokens spelt out, for people to read."""
        return text_of(self.llama._model, token_ids)

    # -- what the engine holds ---------------------------------------------------------------------------------------

    def held_token_ids(self) -> TokenIds:
        """The token ids whose state the engine holds, in order of position, up to the first position that is of no token (an
        image, a sound); shape `[n_tokens]`.
        """
        n_tokens = min(self.llama.n_tokens, self._tracking.n_known)
        return self.llama.input_ids[:n_tokens].astype(np.int32)

    def capture(self) -> memoryview:
        """A copy of the state of the held tokens, as bytes.

        Raises:
            EngineFailed: the engine gave no state, or holds other cells than the wrapper says.
            Unsupported: some positions are of no token: an image or a sound.
        """
        if self.llama.n_tokens > self._tracking.n_known:
            raise Unsupported(
                what="a state with media", reason="its image or sound is in no token id, and so in no key"
            )
        return self._captured()

    def _captured(self) -> memoryview:
        n_tokens = self.llama.n_tokens
        # The wrapper may have gone back (n_tokens lowered) without telling the engine yet; eval() would cut here too.
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
        """Replaces the held state by `state`, the cells of exactly these tokens; the next token's logits are not there.

        Raises:
            EngineFailed: the engine refused; it then holds nothing, its data is cleared and the wrapper agrees.
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
        # A window, or a recurrent state, does not hold the first positions any more.
        if last != n_tokens - 1 or (first != 0 and self.memory_kind is MemoryKind.FULL):
            raise EngineFailed(reason=f"after loading {n_tokens} tokens it holds positions {first} to {last}")

    def evaluate(self, token_ids: TokenIds, progress: Progress = no_progress, *, n_kept: int = 0) -> None:
        """Brings the `Llama` to the state of `token_ids`, of which the first `n_kept` are held already; `progress` hears tokens
        done and in all.

        The last token is decoded by itself, also after a restore: so cold and restored runs compute the same numbers in the
        same batch shapes, and continue alike.

        Raises:
            EngineFailed: the engine failed; it then holds nothing, its data is cleared and the wrapper agrees.
            EngineStateMismatch: the first `n_kept` held tokens are not the input's, or they are all of it.
            BadInput: more tokens than the context has cells, or an id that the vocabulary has not.
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
        """The token that is most likely to follow what was evaluated last, and its probability: the maximum of the softmax of its
        logits, at temperature 1.

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
        """What a model that pools (`embedding=True`) gives for what was evaluated last, not normalised, shape `[n_embd]`; None
        where it does not pool.

        Only the pooling of the last token can be had from a restored prefix: the others need every token to be evaluated in the
        same call (llama_get_embeddings_seq).

        Raises:
            Unsupported: it pools otherwise.
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
        differ = (held[:n_kept] != token_ids[:n_kept]).nonzero()[0]
        if differ.size:
            raise EngineStateMismatch(reason=f"they differ from token {int(differ[0])} on")

    def _drop_from(self, n_tokens: int) -> None:
        """Leaves the first `n_tokens` cells in engine and wrapper."""
        if n_tokens == 0:
            self._forget(clear_data=False)
        elif not llama_cpp.llama_memory_seq_rm(self._memory, _SEQ, n_tokens, -1):
            raise EngineFailed(reason=f"its memory cannot be cut after {n_tokens} tokens")
        self.llama.n_tokens = n_tokens

    def _eval(self, token_ids: TokenIds) -> None:
        try:
            self.llama.eval(token_ids.tolist())
        except (RuntimeError, ValueError) as error:
            raise EngineFailed(reason=str(error)) from error

    def _forget(self, *, clear_data: bool) -> None:
        """Empties engine and wrapper together. `clear_data` also zeroes the cells: NaN in one of them would otherwise
        reach later prompts through masked attention.
        """
        if clear_data:
            llama_cpp.llama_memory_clear(self._memory, True)
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, _SEQ, -1, -1)
        self.llama.reset()  # type: ignore[no-untyped-call]
