"""Services that tests need. Where one is missing its tests are skipped, or fail if LLAMA_CKPT_REQUIRE names it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

# Read before a fixture takes it away. In CI: "postgresql server swa plsql".
REQUIRED = frozenset(os.environ.get("LLAMA_CKPT_REQUIRE", "").split())


def missing(service: str, reason: str) -> NoReturn:
    """Ends the test: skipped, or failed where the service is required."""
    if service in REQUIRED:
        pytest.fail(f"{service} is required here: {reason}")
    pytest.skip(reason)
