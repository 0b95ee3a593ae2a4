"""llama-ckpt: registry and garbage collector for llama.cpp KV-cache checkpoints.

    from llama_ckpt import Registry
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

Importing this package loads no engine, no database driver and no numpy: names are fetched when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.integrity.verify import Verifier
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy

__version__ = "0.1.0"
__all__ = ["Collector", "Policy", "Registry", "Verifier", "__version__"]

_HOMES = {
    "Collector": "collector.collector",
    "Policy": "retention.policy",
    "Registry": "registry",
    "Verifier": "integrity.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llama_ckpt' has no attribute {name!r}")
    return getattr(import_module(f"llama_ckpt.{_HOMES[name]}"), name)
