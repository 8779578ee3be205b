"""Write a recipe as a PTQ tool or a serving engine takes it, and say what it cannot say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoq import recipe as recipes
from autoq.api.applying import check_names
from autoq.cost.engines import ENGINES, loads
from autoq.errors import AutoqError, UserError, unknown
from autoq.exporters.consumer import ROUNDS, Consumer, same_numbers
from autoq.exporters.consumers import CONSUMERS, consumer_of
from autoq.exporters.fitting import Loss, fit, rounding_needed
from autoq.exporters.limits import priced_tokens
from autoq.exporters.subject import KV_ORIGINAL, Subject, bare_subject
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import KVFormat
from autoq.model.given import shapes_of
from autoq.model.units import find_units
from autoq.run_folder import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT = "export.json"
ALL = "all"


@dataclass(frozen=True, repr=False)
class ExportReport:
    """What an export wrote, and what it could not say.

    Attributes:
        consumer: its name.
        what: what is written for it, in words.
        files: what was written, none where it was refused.
        refused: why, in one sentence, or None.
        losses: every difference between the recipe and what the consumer has.
        notes: what holds for all recipes.
        bits: per weight of what was really exported, counted as the consumer stores it.
        bits_whole_model: the same over all parameters.
        kv_bits: per cached value.
        recipe_bits: per weight of the recipe.
        recipe_kv_bits: per cached value of the recipe.
        needs: the rounding for want of which it was refused, or "none".
    """

    consumer: str
    what: str
    files: tuple[Path, ...]
    refused: str | None
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]
    bits: float
    bits_whole_model: float
    kv_bits: float
    recipe_bits: float
    recipe_kv_bits: float
    needs: str = ROUNDS[0]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq export --json` prints, and export.json holds."""
        return {
            "consumer": self.consumer, "files": [str(f) for f in self.files], "refused": self.refused,
            "losses": [loss.to_json() for loss in self.losses], "notes": list(self.notes),
            "bits": self.bits, "bits_whole_model": self.bits_whole_model, "kv_bits": self.kv_bits,
            "recipe_bits": self.recipe_bits, "recipe_kv_bits": self.recipe_kv_bits,
        }  # fmt: skip

    def __repr__(self) -> str:
        from autoq.display.exports import export_view
        from autoq.display.text import as_text

        return as_text(export_view(self))


class ExportReports(list[ExportReport]):
    """What was written for every consumer; shown as one table."""

    def __repr__(self) -> str:
        from autoq.display.exports import export_table
        from autoq.display.text import as_text

        return as_text(export_table(self))


class ExportRefusedError(UserError):
    """A consumer lacks something of a recipe, and nothing was written; `report` says what."""

    def __init__(self, report: ExportReport) -> None:
        super().__init__(report.refused)
        self.report = report


def export(
    recipe: recipes.Recipe | Path | str,
    to: str,
    out: Path | str | None = None,
    rounding: str = "none",
    model: PreTrainedModel | str | None = None,
) -> ExportReport:
    """Write a recipe for one consumer.

    Args:
        to: a name in CONSUMERS. out: the folder; by default `export/<consumer>` beside the recipe.
        rounding: "none" refuses what the consumer lacks; "scales" lets it pick its own scales for the same bytes; "up" also takes
            the next better format it has.
        model: a loaded model or where it is, by default the one that the recipe names; its config is enough.

    Raises ExportRefusedError where something would be lost that `rounding` does not allow: its `report` names every loss.
    """
    subject = _subject(recipe, model)
    folder = _folder(subject, consumer_of(to).name, out)
    report = _export(subject, consumer_of(to), folder, _round(rounding))
    if report.refused is not None:
        raise ExportRefusedError(report)
    return report


def export_all(
    recipe: recipes.Recipe | Path | str,
    out: Path | str | None = None,
    rounding: str = "none",
    model: PreTrainedModel | str | None = None,
) -> ExportReports:
    """Write a recipe for every consumer that can have it; the reports say which cannot, and why."""
    allowed = _round(rounding)
    if out is not None and Path(folder_named(out)).exists() and not Path(out).is_dir():
        raise UserError(f"--out {str(out)!r} cannot be made: it is no folder")
    subject = _subject(recipe, model)
    found = ExportReports()
    for name, consumer in CONSUMERS.items():
        folder = _folder(subject, name, Path(out) / name if out is not None else None)
        try:
            found.append(_export(subject, consumer, folder, allowed))
        except UserError as error:  # names that the consumer has none for, a folder that cannot be made
            found.append(replace(_report(subject, consumer)[0], refused=str(error)))
    return found


def previews(
    recipe: recipes.Recipe | Path, model: PreTrainedModel | str | None = None
) -> list[tuple[ExportReport, dict[str, str]]]:
    """Return what every consumer would get, rounded where need be, and its files by name; nothing is written."""
    subject, found = _subject(recipe, model), []
    for consumer in CONSUMERS.values():
        report, fitted = _report(subject, consumer)
        files: dict[str, str] = {}
        try:
            files = consumer.write(fitted)
        except UserError as error:  # names that the consumer has none for
            report = replace(report, refused=str(error))
        found.append((report, files))
    return found


def _round(rounding: str) -> int:
    if rounding not in ROUNDS:
        raise unknown("value of --round", rounding, ROUNDS)
    return ROUNDS.index(rounding)


def _subject(recipe: recipes.Recipe | Path | str, model: PreTrainedModel | str | None) -> Subject:
    path = None if isinstance(recipe, recipes.Recipe) else Path(recipe)
    loaded = recipe if isinstance(recipe, recipes.Recipe) else recipes.read_recipe(Path(recipe))
    return replace(subject_of(loaded, model), recipe=path)


def subject_of(recipe: recipes.Recipe, model: PreTrainedModel | str | None = None) -> Subject:
    """Return a recipe on its model, of which only the config is read; raises UserError if it names what the model does not have."""
    source, _, empty = shapes_of(model or recipe.model.id)
    if type(empty).__name__ != recipe.model.architecture:
        raise UserError(f"the recipe is for a {recipe.model.architecture}, and {source.name!r} is a {type(empty).__name__}")
    units = find_units(empty, ("lm_head",) if any(e.role == "head" for e in recipe.weights.values()) else ())
    check_names(recipe, units)
    for unit in units.weights:
        listed = recipe.weights[unit.name].tensors if unit.name in recipe.weights else ()
        if missing := [t.name for t in unit.tensors if t.name not in listed]:
            raise UserError(
                f"the recipe says nothing of {missing[0]}, which belongs to {unit.name}: `autoq check` names everything"
            )
    subject = bare_subject(empty, units, source.name, recipe.provenance.dtype)
    by_unit, by_cache = recipe.weight_formats(), recipe.cache_formats()
    weights = {layer.name: by_unit[layer.unit] for layer in subject.layers if layer.unit in by_unit}
    caches: dict[str, tuple[KVFormat, KVFormat]] = {
        a.name: (by_cache[f"{a.name}.key"], by_cache[f"{a.name}.value"]) for a in subject.attentions if f"{a.name}.key" in by_cache
    }
    subject = replace(subject, tokens=priced_tokens(recipe.budget), batch=recipe.budget.batch)
    return subject.with_formats(weights, caches)


def folder_named(out: Path | str) -> Path | str:
    """Return the folder asked for; raises UserError for an empty name, which would be the working folder."""
    if not str(out):
        raise UserError("--out is empty: give a folder, or leave the option out")
    return out


def _folder(subject: Subject, name: str, out: Path | str | None) -> Path:
    if out is not None:
        return Path(folder_named(out))
    return (subject.recipe.parent if subject.recipe is not None else Path()) / "export" / name


def _report(subject: Subject, consumer: Consumer) -> tuple[ExportReport, Subject]:
    """Return what an export loses and costs, with nothing written yet, and the subject as the consumer has it."""
    fitted, losses = fit(subject, consumer)
    cost, (kv_bits, kv_values) = fitted.weight_cost(consumer.overhead), fitted.kv_cost()
    report = ExportReport(
        consumer.name, consumer.what, (), None, tuple(losses), (*consumer.notes, *_not_loaded(consumer, fitted)), cost.effective, cost.whole_model,
        kv_bits / max(1, kv_values), subject.weight_cost().effective, subject.kv_cost()[0] / max(1, kv_values),
    )  # fmt: skip
    return report, fitted


def _not_loaded(consumer: Consumer, subject: Subject) -> Iterator[str]:
    """Say which formats an engine would not load from the checkpoint that the consumer makes."""
    formats = {layer.format for layer in subject.layers if not layer.format.is_original}
    for name in consumer.engines:
        if lacking := sorted({f.name for f in formats if not loads(ENGINES[name], f, WEIGHT_FORMATS)}):
            yield f"{name} loads no weights in {', '.join(lacking)}: search with --engine {name} as well if it is to serve this"


def _export(subject: Subject, consumer: Consumer, folder: Path, allowed: int) -> ExportReport:
    """Fit, write in memory, read back by the consumer's own rules, and only then write the files."""
    report, fitted = _report(subject, consumer)
    losses = report.losses
    beyond = [loss for loss in losses if ROUNDS.index(loss.needs) > allowed]
    if beyond:
        return replace(report, refused=_refusal(consumer, beyond), needs=rounding_needed(beyond))
    files = consumer.write(fitted)
    if consumer.read is not None:
        _check(consumer, fitted, files)
    return _write(replace(report, files=tuple(folder / name for name in files)), files, folder)


def _refusal(consumer: Consumer, losses: list[Loss]) -> str:
    needed = rounding_needed(losses)
    first = next(loss for loss in losses if loss.needs == needed)
    same = sum(loss.why == first.why for loss in losses) - 1
    more = f" and {same} more" if same else ""
    if others := len(losses) - same - 1:
        picked = sum(loss.needs == "scales" for loss in losses if loss.why != first.why)
        more_words = (
            f"{picked} more in formats whose scales it picks in its own way"
            if picked == others
            else f"{others} more differ otherwise"
        )
        more += f"; {more_words}"
    effect = "lets it pick its own scales" if needed == "scales" else "takes the next better format it has"
    return f"{first.why} ({first.what}{more}): --round {needed} {effect}, or search for it with --consumer {consumer.name}"


def _check(consumer: Consumer, subject: Subject, files: dict[str, str]) -> None:
    """Raise AutoqError if the consumer would not make of the files what was meant, or if tied layers come apart."""
    assert consumer.read is not None
    found = consumer.read(files, subject)
    problems = [*found.problems, *found.notes]
    for layer in subject.layers:
        got = found.weights.get(layer.name)
        if (got is None) != layer.format.is_original or (got is not None and not same_numbers(got, layer.format)):
            problems.append(f"{layer.name} would be {got.name if got else 'bf16'}, not {layer.format.name}")
    for attention in subject.attentions:
        pair = found.caches.get(attention.name, (KV_ORIGINAL, KV_ORIGINAL))
        if (pair[0].name, pair[1].name) != (attention.key.name, attention.value.name):
            problems.append(f"the cache of {attention.name} would be {pair[0].name} and {pair[1].name}")
    for unit in subject.units.weights:
        if len({found.weights[t.name].name if t.name in found.weights else "bf16" for t in unit.tensors}) > 1:
            problems.append(f"the tensors of {unit.name} would differ")
    if problems:
        raise AutoqError(f"the export for {consumer.name} is wrong, please report it: {problems[0]} ({len(problems)} problems)")


def _write(report: ExportReport, files: dict[str, str], folder: Path) -> ExportReport:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {str(folder)!r} cannot be made: {error.strerror}") from error
    before = _written_before(folder)
    for name in files:
        if (folder / name).exists() and name not in before:
            raise UserError(f"--out {str(folder)!r} holds a {name} that no export wrote: give another folder")
    for name, text in files.items():
        write_atomically(folder / name, text)
    write_atomically(folder / REPORT, json.dumps(report.to_json(), indent=1) + "\n")
    for name in before - set(files):
        with suppress(OSError):
            (folder / name).unlink()
    return report


def _written_before(folder: Path) -> set[str]:
    """Return the names of the files that an earlier export wrote into the folder."""
    try:
        found = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        names = [Path(name).name for name in found["files"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {name for name in names if (folder / name).is_file() and name != REPORT}
