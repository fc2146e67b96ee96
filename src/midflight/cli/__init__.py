"""The command line. Nothing here imports torch, and `--help` imports no configuration either."""

from midflight.cli.commands import main

__all__ = ["main"]
