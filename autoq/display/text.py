"""What the command line prints, as plain text: how results show themselves where there is no HTML."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 110


def as_text(view: RenderableType, width: int = WIDTH) -> str:
    """Return what would be printed, without colours and trailing blanks."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_jupyter=False)
    with console.capture() as printed:
        console.print(view, crop=False)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
