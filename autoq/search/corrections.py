"""Check every format's column of the prediction against the truth: one uniform measurement per format."""

from __future__ import annotations

from autoq.measure.divergence import Yardstick
from autoq.measure.estimate import damage_table
from autoq.measure.profile import Profile, Progress
from autoq.model.quantized import Assignment
from autoq.model.units import ModelUnits
from autoq.search.baselines import Uniform


def correct(
    profile: Profile,
    units: ModelUnits,
    yardstick: Yardstick,
    weights: list[Uniform],
    caches: tuple[dict[str, Assignment], dict[str, Assignment]],
    noise_floor: float,
    progress: Progress = lambda done, total: None,
) -> None:
    """Add to `profile.corrections` the ratio measured / predicted of every uniform recipe that has none yet.

    Both are taken on the same sequences, the first of the profile, so that how hard these happen to be cancels.

    Args:
        yardstick: on the first sequences of the profile's own text. caches: format name -> assignment of that format to all keys, to all values.
        noise_floor: a measurement below twice this says nothing, and its column is left as it is.
    """
    table = damage_table(profile.first(len(yardstick.ids)), units, corrected=False)
    kinds = {u.name: u.kind for u in units.units}
    todo: list[tuple[str, str, Assignment]] = [("weight", u.weights, u.assignment) for u in weights]
    for kind, by_format in zip(("key", "value"), caches, strict=True):
        todo += [(kind, name, assignment) for name, assignment in by_format.items()]
    todo = [t for t in todo if f"{t[0]}/{t[1]}" not in profile.corrections]
    for i, (kind, fmt, assignment) in enumerate(todo):
        progress(i, len(todo))
        chosen = assignment.weights if kind == "weight" else assignment.caches
        predicted = sum(table[u][fmt] for u in chosen if kinds[u] == kind)
        measured = yardstick.measure(assignment).mean_kl
        known = predicted > 0 and measured > 2 * noise_floor
        profile.corrections[f"{kind}/{fmt}"] = measured / predicted if known else 1.0
    progress(len(todo), len(todo))
