"""llama-ckpt: registry and garbage collector for llama.cpp KV-cache checkpoints.

    from llama_ckpt import Registry
    from llama_ckpt.engine.llamacpp import LlamaCppEngine

Every name that users need comes from here. Importing this package loads no engine, no database driver and no numpy: each
name loads its module at its first use.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llama_ckpt.humanize import printable

if TYPE_CHECKING:
    from llama_ckpt.checkpoints.inputs import SaveOptions
    from llama_ckpt.collector.collector import Collector
    from llama_ckpt.collector.purge import Purge, Purger
    from llama_ckpt.collector.schedule import CollectorSchedule
    from llama_ckpt.doctor import Diagnosis, examine
    from llama_ckpt.errors import LlamaCkptError
    from llama_ckpt.exchange.adopt import adopt
    from llama_ckpt.exchange.adoption import Adoption, AdoptOptions, AdoptOutcome
    from llama_ckpt.exchange.export import Export, ExportFormat, ExportOptions, export
    from llama_ckpt.exchange.survey import survey
    from llama_ckpt.formats.identification import identify
    from llama_ckpt.integrity.reconcile import Reconciler
    from llama_ckpt.integrity.repair import FileRepairer
    from llama_ckpt.integrity.verify import Verifier
    from llama_ckpt.registry import Registry
    from llama_ckpt.retention.policy import Policy
    from llama_ckpt.values import Checkpoint, Outcome, SaveOutcome, Status
    from llama_ckpt.warm.batch import BatchInput, BatchOutcome, BatchRecord

__version__ = "0.1.0"
__all__ = [
    "AdoptOptions",
    "AdoptOutcome",
    "Adoption",
    "BatchInput",
    "BatchOutcome",
    "BatchRecord",
    "Checkpoint",
    "Collector",
    "CollectorSchedule",
    "Diagnosis",
    "Export",
    "ExportFormat",
    "ExportOptions",
    "FileRepairer",
    "LlamaCkptError",
    "Outcome",
    "Policy",
    "Purge",
    "Purger",
    "Reconciler",
    "Registry",
    "SaveOptions",
    "SaveOutcome",
    "Status",
    "Verifier",
    "__version__",
    "adopt",
    "examine",
    "export",
    "identify",
    "survey",
]

# The module of each name, below llama_ckpt.
_HOMES = {
    "AdoptOptions": "exchange.adoption",
    "AdoptOutcome": "exchange.adoption",
    "Adoption": "exchange.adoption",
    "BatchInput": "warm.batch",
    "BatchOutcome": "warm.batch",
    "BatchRecord": "warm.batch",
    "Checkpoint": "values",
    "Collector": "collector.collector",
    "CollectorSchedule": "collector.schedule",
    "Diagnosis": "doctor",
    "Export": "exchange.export",
    "ExportFormat": "exchange.export",
    "ExportOptions": "exchange.export",
    "FileRepairer": "integrity.repair",
    "LlamaCkptError": "errors",
    "Outcome": "values",
    "Policy": "retention.policy",
    "Purge": "collector.purge",
    "Purger": "collector.purge",
    "Reconciler": "integrity.reconcile",
    "Registry": "registry",
    "SaveOptions": "checkpoints.inputs",
    "SaveOutcome": "values",
    "Status": "values",
    "Verifier": "integrity.verify",
    "adopt": "exchange.adopt",
    "examine": "doctor",
    "export": "exchange.export",
    "identify": "formats.identification",
    "survey": "exchange.survey",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llama_ckpt' has no attribute {name!r}")
    return getattr(import_module(f"llama_ckpt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _make_printable(record: logging.LogRecord) -> bool:
    """Escapes control characters in the arguments of a log message: a path or a name may come from another program's file or row,
    and must not control a terminal.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(a if isinstance(a, int | float) else printable(str(a)) for a in record.args)
    return True


logging.getLogger("llama_ckpt").addFilter(_make_printable)
