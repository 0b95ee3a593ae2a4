"""`python -m llama_ckpt_cli`, and the console script."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Runs the command and ends the process with its exit code."""
    from llama_ckpt_cli.app import main as run

    code = run()
    # The interpreter looks through everything for garbage before it ends: with what is imported here, a sixth of a short command.
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
