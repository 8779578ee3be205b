"""The command line; commands are listed in the order of these imports."""

from autoq.cli import searching

# isort: split
from autoq.cli import viewing

# isort: split
from autoq.cli import exchanging
from autoq.cli.app import INTERRUPTED, app, main

__all__ = ["INTERRUPTED", "app", "exchanging", "main", "searching", "viewing"]
