"""autoq: search the number format of every weight, key and value of a language model under one memory budget."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autoq import plots
    from autoq.api import (
        ExportRefusedError,
        ExportReport,
        FrontResult,
        Memory,
        ProfileResult,
        Recipe,
        SearchResult,
        Validation,
        doctor,
        load_run,
        read_recipe,
    )
    from autoq.errors import AutoqError, UserError
    from autoq.verbs import (
        check,
        export,
        front,
        import_recipe,
        load_model,
        memory,
        profile,
        quantized,
        report,
        retrieval,
        search,
        search_front,
        validate,
    )

# Where each name comes from: nothing is imported before it is asked for.
_WHERE = {
    "verbs": (
        "check", "export", "front", "import_recipe", "load_model", "memory", "profile", "quantized", "report", "retrieval", "search",
        "search_front", "validate",
    ),
    "api": (
        "ExportRefusedError", "ExportReport", "FrontResult", "Memory", "ProfileResult", "Recipe", "SearchResult", "Validation", "doctor", "load_run",
        "read_recipe",
    ),
    "errors": ("AutoqError", "UserError"),
}  # fmt: skip

__all__ = [
    "AutoqError",
    "ExportRefusedError",
    "ExportReport",
    "FrontResult",
    "Memory",
    "ProfileResult",
    "Recipe",
    "SearchResult",
    "UserError",
    "Validation",
    "check",
    "doctor",
    "export",
    "front",
    "import_recipe",
    "load_model",
    "load_run",
    "memory",
    "plots",
    "profile",
    "quantized",
    "read_recipe",
    "report",
    "retrieval",
    "search",
    "search_front",
    "validate",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "plots":
        return importlib.import_module("autoq.plots")
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"autoq.{module}"), name)
    raise AttributeError(f"module 'autoq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
