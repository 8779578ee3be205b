"""The command line."""

from autoq.cli import exchanging, searching, viewing
from autoq.cli.app import INTERRUPTED, app, main

__all__ = ["INTERRUPTED", "app", "exchanging", "main", "searching", "viewing"]
