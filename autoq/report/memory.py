"""How much memory this process has needed."""

from __future__ import annotations

import sys


def peak_bytes() -> int | None:
    """Return the largest resident memory of this process so far, or None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
