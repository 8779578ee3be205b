"""Check every format's column of the prediction against the truth: one uniform measurement per format."""

from __future__ import annotations

from autoq.measure.divergence import Yardstick
from autoq.measure.profile import Profile, Progress
from autoq.model.quantized import Assignment


def measure_uniform(
    profile: Profile, yardstick: Yardstick, uniform: dict[str, Assignment], progress: Progress = lambda done, total: None
) -> bool:
    """Add to `profile.uniform_kl` what is not measured yet on so many sequences; return whether anything was.

    Args:
        yardstick: on the first sequences of the profile's own text.
        uniform: "kind/format" -> the assignment of that format to all units of that kind.
    """
    sequences = len(yardstick.ids)
    todo = {key: a for key, a in uniform.items() if profile.uniform_kl.get(key, (0.0, 0))[1] != sequences}
    for i, (key, assignment) in enumerate(todo.items()):
        progress(i, len(todo))
        profile.uniform_kl[key] = (yardstick.measure(assignment).mean_kl, sequences)
    progress(len(todo), len(todo))
    return bool(todo)
