"""The command `llama-ckpt`, run from outside."""

from __future__ import annotations

import subprocess
import sys


def program(*arguments, **options):
    """The command as a process of its own."""
    words = [sys.executable, "-m", "llama_ckpt_cli", *map(str, arguments)]
    return subprocess.run(words, text=True, check=False, **options)
