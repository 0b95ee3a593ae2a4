"""Adopt files of llama.cpp's own programs (ggsq, ggsn): they are proven to belong to a model, and rewritten as LLAM."""

from __future__ import annotations

from pathlib import Path

from llama_ckpt.checkpoints import save
from llama_ckpt.context import RegistryContext
from llama_ckpt.errors import BadInput, StoreFull
from llama_ckpt.exchange.adoption import Adoption, AdoptOptions, adoptable, adopted, already_registered
from llama_ckpt.exchange.convert import convert, layout_of
from llama_ckpt.exchange.duplicates import count_padding, find_registered
from llama_ckpt.fingerprint import tokens_hash
from llama_ckpt.formats.engine_files import EngineFile
from llama_ckpt.values import SaveOutcome


def adopt_engine_file(context: RegistryContext, path: Path, file: EngineFile, options: AdoptOptions) -> Adoption:
    """Rewrites a verified ggsq or ggsn file as a checkpoint and registers it. The order is that of a save.

    Raises:
        BadInput: there is no engine for it in the options, or the engine needs its context size.
        Incompatible, Unsupported, CorruptFile, EngineFailed: as `convert`.
        StoreFull, StoreUnavailable, DatabaseUnavailable: it cannot be saved.
    """
    if options.engine_for is None:
        raise BadInput(what="file", value=str(path), reason="it names no model: give the GGUF with --model")
    engine = options.engine_for(layout_of(file, options.n_ctx))
    captured = convert(file, str(path), engine, text=options.text, context_is_known=options.n_ctx is not None)
    kind, n_tokens = f"{file.format} {file.version}", len(captured.token_ids)
    digest, ids_hash = engine.fingerprint.digest, tokens_hash(captured.token_ids)
    if duplicate := find_registered(context, digest, captured.input_hash, ids_hash, dry_run=options.dry_run):
        return already_registered(path, duplicate)
    if options.dry_run:
        return adoptable(path, n_tokens, kind)
    count_padding(context, path, file.padding)
    saved = save.write(context, captured, options.save_options)
    if saved.checkpoint is None:
        raise StoreFull(needed=captured.payload.nbytes, path=context.store.root, reason=saved.reason)
    if saved.outcome is SaveOutcome.DEDUPLICATED:  # another process saved the same input first
        return already_registered(path, saved.checkpoint)
    return adopted(path, saved.checkpoint, kind)
