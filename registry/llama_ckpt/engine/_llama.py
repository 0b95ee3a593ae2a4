"""The one import of llama-cpp-python, with the error that says what to do if it is not there."""

from __future__ import annotations

from llama_ckpt.errors import EngineMissing

try:
    import llama_cpp
    from llama_cpp import _internals
    from llama_cpp.llama_cache import BaseLlamaCache
except (ImportError, OSError, RuntimeError) as error:  # not installed, or its native library does not load here
    raise EngineMissing(reason=str(error)) from error

__all__ = ["BaseLlamaCache", "_internals", "llama_cpp"]
