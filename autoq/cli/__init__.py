"""The command line."""

from autoq.cli import searching, viewing
from autoq.cli.app import INTERRUPTED, app, main

__all__ = ["INTERRUPTED", "app", "main", "searching", "viewing"]
