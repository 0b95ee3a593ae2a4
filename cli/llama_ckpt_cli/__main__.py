"""`python -m llama_ckpt_cli`, and the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command and ends the process with its exit code."""
    from llama_ckpt_cli.app import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
