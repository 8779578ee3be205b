"""The verbs: search, profile, front, show, memory. The command line and notebooks call these and nothing below."""

from autoq.api.applying import assignment_of, check_names, quantized, recipe_assignment
from autoq.api.fronts import FrontResult, front
from autoq.api.plan import Plan, make_plan
from autoq.api.pricing import memory
from autoq.api.profiling import Profiled, profile
from autoq.api.recording import UniformResult
from autoq.api.searching import SearchResult, search
from autoq.api.showing import find_recipe, show

__all__ = [
    "FrontResult",
    "Plan",
    "Profiled",
    "SearchResult",
    "UniformResult",
    "assignment_of",
    "check_names",
    "find_recipe",
    "front",
    "make_plan",
    "memory",
    "profile",
    "quantized",
    "recipe_assignment",
    "search",
    "show",
]
