"""What `autoq doctor` found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoq.display.words import size

if TYPE_CHECKING:
    from autoq.api.installation import Installation


def doctor_view(found: Installation) -> RenderableType:
    """Return machine, packages, formats, kernels and tools, and what is wrong."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    capability = "" if found.capability is None else f", compute capability {found.capability[0]}.{found.capability[1]}"
    lines.add_row("autoq", f"{found.autoq}, Python {found.python}, {found.machine}")
    lines.add_row("device", f"{found.device}{capability}, {size(found.memory)} free; computes in {found.dtype}")
    packages = ", ".join(f"{p.name} {p.version}" for p in found.packages if p.version is not None)
    lines.add_row("packages", packages or "unknown: autoq is not installed as a package")
    lines.add_row("native formats", ", ".join(found.native) or "none: without a GPU every format is decoded before it is used")
    if found.native and found.decoded:
        lines.add_row("decoded first", ", ".join(found.decoded))
    where = "Triton's interpreter, on the CPU" if found.kernels_on == "interpreter" else found.kernels_on
    lines.add_row("kernels run", where)
    lines.add_row("kernels", ", ".join(k.name if k.state == "ok" else f"{k.name} (fails)" for k in found.kernels))
    lines.add_row("tools found", ", ".join(f"{name} ({version})" for name, version in found.tools.items()) or "none here")
    parts: list[RenderableType] = [lines]
    parts += [Text(f"problem: {problem}", style="yellow") for problem in found.problems]
    if not found.problems:
        parts.append(Text("ready: every kernel equals its reference, and every package fits", style="green"))
    return Group(*parts)
