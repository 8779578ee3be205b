"""Check every format's column of the prediction against the truth: one uniform measurement per format."""

from __future__ import annotations

from collections.abc import Callable

from autoq.measure.divergence import Yardstick
from autoq.measure.profile import Profile, UniformKL
from autoq.measure.profiling import Progress
from autoq.model.quantized import Assignment


def measure_uniform(
    profile: Profile,
    yardstick: Callable[[], Yardstick],
    sequences: int,
    window: int,
    uniform: dict[str, Assignment],
    progress: Progress = lambda done, total: None,
) -> bool:
    """Add to `profile.uniform_kl` what was not measured yet on so many sequences in such windows; return whether anything was.

    Args:
        yardstick: makes the measure on that text, if it is needed.
        uniform: "kind/format" -> the assignment of that format to all units of that kind.
    """
    todo = {k: a for k, a in uniform.items() if k not in profile.uniform_kl or profile.uniform_kl[k][1:] != (sequences, window)}
    measure = yardstick().measure if todo else None
    for i, (key, assignment) in enumerate(todo.items()):
        progress(i, len(todo))
        assert measure is not None
        profile.uniform_kl[key] = UniformKL(measure(assignment).mean_kl, sequences, window)
    progress(len(todo), len(todo))
    return bool(todo)
