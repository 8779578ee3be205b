"""The verbs, one a file. The command line and `autoq.verbs` call these and nothing below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoq.api.applying import assignment_of, check_names, quantized, recipe_assignment
from autoq.api.checking import Checked, check
from autoq.api.confirming import UniformResult
from autoq.api.exporting import ALL, ExportRefusedError, ExportReport, export, export_all
from autoq.api.fronts import FrontResult, MeasuredPoint, front
from autoq.api.importing import Imported, import_recipe
from autoq.api.installation import Installation, doctor
from autoq.api.plan import Plan, make_plan
from autoq.api.pricing import Memory, memory
from autoq.api.profiling import ProfileResult, profile
from autoq.api.recipe import Recipe, read_recipe
from autoq.api.reporting import LoadedRun, load_run, report
from autoq.api.retrieving import Retrieval, retrieval
from autoq.api.searching import SearchResult, search
from autoq.api.showing import find_profile, find_recipe, show
from autoq.api.tradeoffs import measure_front, search_front
from autoq.api.working import Worked, worker
from autoq.display.findings import Findings, HasFindings

if TYPE_CHECKING:
    from autoq.api.validating import Validation, validate

__all__ = [
    "ALL",
    "Checked",
    "ExportRefusedError",
    "ExportReport",
    "Findings",
    "FrontResult",
    "HasFindings",
    "Imported",
    "Installation",
    "LoadedRun",
    "MeasuredPoint",
    "Memory",
    "Plan",
    "ProfileResult",
    "Recipe",
    "Retrieval",
    "SearchResult",
    "UniformResult",
    "Validation",
    "Worked",
    "assignment_of",
    "check",
    "check_names",
    "doctor",
    "export",
    "export_all",
    "find_profile",
    "find_recipe",
    "front",
    "import_recipe",
    "load_run",
    "make_plan",
    "measure_front",
    "memory",
    "profile",
    "quantized",
    "read_recipe",
    "recipe_assignment",
    "report",
    "retrieval",
    "search",
    "search_front",
    "show",
    "validate",
    "worker",
]


def __getattr__(name: str) -> Any:
    """Import what needs triton when it is asked for: the other verbs work without it."""
    if name in ("Validation", "validate"):
        from autoq.api import validating

        return getattr(validating, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
