"""A `Policy` out of settings: text with units becomes seconds, bytes and counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llama_ckpt.config import count, seconds, size_bytes
from llama_ckpt.errors import BadInput
from llama_ckpt.retention.policy import Order, Policy

DURATIONS = ("max_age", "max_idle", "half_life", "stale_grace", "ghost_grace")
SIZES = ("max_bytes", "max_bytes_per_model", "max_bytes_per_label")
COUNTS = (
    "max_count",
    "max_count_per_model",
    "max_count_per_label",
    "keep_last_per_model",
    "keep_last_per_label",
)
SHARES = ("high_water", "low_water")
NAMES = (*DURATIONS, *SIZES, *COUNTS, "min_free", *SHARES, "order")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%")


def policy_of(values: Mapping[str, str]) -> Policy:
    """The policy that settings describe; a setting that is empty or not there keeps its default.

    Raises:
        BadInput: a value cannot be read, by the name of its setting.
    """
    given = {name: text for name in NAMES if (text := values.get(name, "").strip())}
    fields: dict[str, Any] = {}
    for name, text in given.items():
        told = "--" + name.replace("_", "-")
        if name in DURATIONS:
            fields[f"{name}_s"] = seconds(text, told)
        elif name in SIZES:
            fields[name] = size_bytes(text, told)
        elif name in COUNTS:
            fields[name] = count(text, told)
        elif name in SHARES:
            fields[name] = _share(text, told)
        elif name == "order":
            fields[name] = _order(text)
        elif text.endswith("%"):
            fields["min_free_share"] = _share(text, told)
        else:
            fields["min_free"] = size_bytes(text, told)
    return Policy(**fields)


def _share(text: str, what: str) -> float:
    match = _PERCENT.fullmatch(text)
    if match is None or float(match[1]) > 100:
        raise BadInput(what=what, value=text, reason="expected a share such as 90%")
    return float(match[1]) / 100


def _order(text: str) -> Order:
    if text.lower() not in list(Order):
        raise BadInput(what="--order", value=text, reason=f"expected one of {', '.join(Order)}")
    return Order(text.lower())
