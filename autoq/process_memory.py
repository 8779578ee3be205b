"""How much memory this process has needed, and how much it may still take."""

from __future__ import annotations

import sys
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def peak_bytes() -> int | None:
    """Return the largest resident memory of this process so far, or None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Return what can still be taken without swapping, within a container's limit; 0 where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no container, or the older kind of limits
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
