"""The recipe: one YAML file that says which format every weight, key and value takes, what that costs, and why to believe it.

It stands alone: every format used is written out in full, and every tensor is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from autoq.errors import UserError, unknown
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.recipe_formats import FormatEntry, NotNegative, Strict, decode_mean, format_of, kv_format_of
from autoq.run_folder import write_atomically
from autoq.yaml_file import read_yaml

SCHEMA_VERSION = 1


Count = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


class WeightEntry(Strict):
    """The format of one weight unit: tensors that share it."""

    format: str
    role: str
    layer: Count | None
    bits: NotNegative = Field(description="effective bits per value")
    numel: Count
    predicted_kl: NotNegative | None = Field(description="nats per token; null where it was not profiled")
    tensors: tuple[str, ...]


class CacheEntry(Strict):
    """The format of the K or the V cache of one layer."""

    format: str
    bits: NotNegative
    predicted_kl: NotNegative | None
    absmax: NotNegative = Field(description="largest magnitude in the profile's text; calibrates static scales")
    absmax_centered: NotNegative | None = Field(default=None, description="the same less the mean, where a format is around it")
    absmax_rotated: NotNegative | None = Field(default=None, description="the same of rotated values, where a format rotates them")
    mean: str | None = Field(
        default=None, description="of formats around a static mean: float16 [KV heads, head_dim], little endian, in base64"
    )


class KVEntry(Strict):
    """The cache of one attention layer."""

    layer: Count
    module: str
    values_per_token: Count = Field(description="KV heads x head_dim, for K and V each")
    key: CacheEntry
    value: CacheEntry


class ModelEntry(Strict):
    """The model a recipe is for."""

    id: str = Field(pattern=r"^[^\x00-\x1f\x7f]+$")
    fingerprint: str
    architecture: str
    parameters: Count


class BudgetEntry(Strict):
    """What was asked for."""

    weights: str | None
    kv: str | None
    memory: str | None = Field(default=None, description="for all weights and the cache together")
    context: Count = Field(description="tokens at which the cache is priced")
    batch: int = Field(default=1, ge=1, lt=2**31, description="sequences for which the cache is priced")
    engine: str = Field(default="none", description="serving engine whose limits the recipe keeps")
    consumer: str = Field(default="none", description="tool that computes every format")
    target: str = Field(default="any", description="device that can run every format")
    max_kl: float | None = Field(default=None, description="damage in nats per token within which the smallest recipe was wanted")

    def options(self) -> list[str]:
        """Return the command-line options that ask for the same."""
        found = [f"--max-kl {self.max_kl:g}"] if self.max_kl is not None else []
        if self.max_kl is None:
            asked = (("--budget", self.weights), ("--kv-budget", self.kv), ("--memory", self.memory))
            found += [f"{option} {text}" for option, text in asked if text]
        if self.kv is not None or self.memory is not None:
            found += [f"--context {self.context}", f"--batch {self.batch}"]
        return found + self.limits()

    def limits(self) -> list[str]:
        """Return the options that say for what and by what it has to run."""
        asked = (("--engine", self.engine, "none"), ("--consumer", self.consumer, "none"), ("--target", self.target, "any"))
        return [f"{option} {name}" for option, name, default in asked if name != default]


class TotalsEntry(Strict):
    """What the recipe stores."""

    bits: NotNegative = Field(description="effective bits of the searched weights, scales and padding counted")
    bits_whole_model: NotNegative = Field(description="the same over all parameters, embeddings and norms too")
    kv_bits: NotNegative = Field(description="bits per cached value at the context")
    weight_bytes: Count = Field(description="all weights")
    kv_bytes: Count = Field(description="the cache of the batch at the context")


class PredictedEntry(Strict):
    """The predicted damage."""

    kl: float
    stderr: NotNegative | None
    estimator: str


class UniformEntry(Strict):
    """A uniform format measured beside the recipe."""

    format: str
    bits: NotNegative
    kv_bits: NotNegative
    measured_kl: float
    recipe_minus_uniform: float = Field(description="difference of measured KL, paired by window; negative: the recipe is better")
    stderr: NotNegative


class TrialsEntry(Strict):
    """What Optuna's trials came to."""

    study: str
    measured: Count = Field(description="trials")
    windows: Count = Field(description="of text that trials were measured on")
    recipe_minus_solution: float = Field(description="measured KL of this recipe less the exact solution's, paired by window")
    stderr: NotNegative


class MeasuredEntry(Strict):
    """What was measured on text that was not profiled."""

    kl: float
    kl_stderr: NotNegative
    kl_percentiles: dict[str, float]
    top1_agreement: Share
    perplexity: NotNegative
    perplexity_original: NotNegative
    perplexity_ratio_stderr: NotNegative
    noise_floor: NotNegative
    windows: Count
    tokens_per_window: Count
    text: str
    uniform: tuple[UniformEntry, ...]
    chosen: str = Field(default="exact solution", description="what the recipe is: exact solution, trial N, uniform FORMAT")
    trials: TrialsEntry | None = None


class ProvenanceEntry(Strict):
    """How the recipe was made."""

    command: str
    created: str
    seed: int
    space: str
    profile_text: str
    profile_sequences: Count
    profile_tokens: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    versions: dict[str, str]


class ValidationEntry(Strict):
    """What `autoq validate` found when every tensor was packed and the model ran on the bytes."""

    kernels: str = Field(description="where the kernels ran: interpreter, or the GPU's name")
    passed: bool
    units: Count = Field(description="weight units packed by the kernels and compared with the reference")
    tensors: Count
    differing: Count = Field(description="tensors in which kernel and reference differ in a bit, or bytes and cost model")
    weight_bytes: Count = Field(description="all weights as packed; the original's are at 16 bit")
    weight_bytes_original: Count
    cache_bytes: Count = Field(description="held by the packed cache at the end of one measuring batch")
    cache_bytes_original: Count
    kl: float = Field(description="nats per token, on the recipe's measuring text, chunked prefill and token-by-token decode")
    kl_stderr: NotNegative
    top1_agreement: Share
    perplexity: NotNegative
    greedy_agreement: Share = Field(description="share of greedily generated tokens before the first that differs")
    attention_difference: NotNegative | None = Field(
        default=None,
        description="one token's hidden state, attention over packed bytes against decoded tokens; of the largest value",
    )
    created: str


class Recipe(Strict):
    """A recipe; field order is the order in the file."""

    schema_version: Literal[1]
    model: ModelEntry
    budget: BudgetEntry
    totals: TotalsEntry
    predicted: PredictedEntry | None = Field(description="null for a recipe that was imported")
    measured: MeasuredEntry | None
    validation: ValidationEntry | None = None
    formats: dict[str, FormatEntry]
    kv_formats: dict[str, FormatEntry]
    weights: dict[str, WeightEntry]
    kv: tuple[KVEntry, ...]
    left_out: dict[str, int] = Field(description="reason -> parameters that stay in 16 bit")
    provenance: ProvenanceEntry

    def weight_formats(self) -> dict[str, Format]:
        """Return unit -> Format as the file defines it."""
        return {name: format_of(entry.format, self.formats) for name, entry in self.weights.items()}

    def cache_formats(self) -> dict[str, KVFormat]:
        """Return cache unit -> KVFormat as the file defines it."""
        found = {}
        for layer in self.kv:
            for kind in ("key", "value"):
                found[f"{layer.module}.{kind}"] = kv_format_of(getattr(layer, kind).format, self.kv_formats)
        return found

    def calibration(self) -> dict[str, Calibration]:
        """Return cache unit -> what its static scale and mean come from."""
        found = {}
        for layer in self.kv:
            for kind in ("key", "value"):
                entry: CacheEntry = getattr(layer, kind)
                _check_calibration(f"{layer.module}.{kind}", entry, kv_format_of(entry.format, self.kv_formats))
                mean = None if entry.mean is None else decode_mean(entry.mean, layer.values_per_token, f"{layer.module}.{kind}")
                found[f"{layer.module}.{kind}"] = Calibration(
                    entry.absmax, entry.absmax_centered or 0.0, entry.absmax_rotated or 0.0, mean
                )
        return found

    def write(self, path: Path) -> None:
        """Write the YAML file atomically."""
        write_atomically(path, to_yaml(self))


def _check_calibration(unit: str, entry: CacheEntry, fmt: KVFormat) -> None:
    """Raise UserError for a cache entry that lacks what its format is calibrated with."""
    for one in fmt.chain:
        needed = {"mean": one.center, "absmax_centered": one.center, "absmax_rotated": one.rotate}
        for name, needs in needed.items():
            is_static = name == "mean" or one.calibration == "absmax"
            if needs and is_static and getattr(entry, name) is None:
                raise UserError(f"the recipe's {unit} has no {name}, which its format {one.name} needs")


_COMMENTS = {
    "model": "What this recipe is for.",
    "budget": "What was asked for.",
    "totals": "What it stores. bits: effective bits per searched weight, scales and padding counted.",
    "predicted": "Nats of KL per token, summed over the units, with its standard error over the profile's sequences.",
    "measured": "On text that was not profiled; errors are over windows, comparisons are paired by window.",
    "validation": "The same on packed bytes, with the real kernels.",
    "formats": "Every weight format used, written out in full.",
    "kv_formats": "Every KV format used.",
    "weights": "Tensors of one unit share a format (serving engines fuse them).",
    "kv": "The cache, layer by layer, keys apart from values.",
    "left_out": "Parameters that stay in 16 bit, and why.",
    "provenance": "How this file was made.",
}


def to_yaml(recipe: Recipe) -> str:
    """Return the file's text: a fixed order, one entry a line where it fits, comments before each section."""
    data = recipe.model_dump(mode="json")
    lines = [
        f"# autoq recipe for {recipe.model.id}: {recipe.totals.bits:.4f} bits per weight, {recipe.totals.kv_bits:.4g} per cached value."
    ]
    lines.append("# `autoq show` prints it as a table.")
    for key, value in data.items():
        if key == "validation" and value is None:
            continue
        lines.append(f"\n# {_COMMENTS[key]}" if key in _COMMENTS else "")
        entry_a_line = None if key in ("formats", "kv_formats", "weights", "kv") else False
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=entry_a_line)
        lines.append(text.rstrip("\n"))
    return "\n".join(lines) + "\n"


def read_recipe(path: Path | str) -> Recipe:
    """Read a recipe strictly: an unknown key, an unknown format or a missing field is a UserError that names it."""
    path = Path(path)
    data = read_yaml(path, "recipe")
    if not isinstance(data, dict):
        raise UserError(f"the recipe {str(path)!r} is not a mapping of keys")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"the recipe {str(path)!r} has schema_version {version!r}, this autoq reads {SCHEMA_VERSION}")
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(f"the recipe {str(path)!r} is not valid: {_first_problem(error)}") from error
    for unit, entry in recipe.weights.items():
        if entry.format not in recipe.formats:
            raise unknown(f"format in the recipe's unit {unit}:", entry.format, recipe.formats)
    for layer in recipe.kv:
        for cache in (layer.key, layer.value):
            if cache.format not in recipe.kv_formats:
                raise unknown(f"format in the recipe's layer {layer.layer}:", cache.format, recipe.kv_formats)
    layers = [layer.layer for layer in recipe.kv]
    if twice := {n for n in layers if layers.count(n) > 1}:
        raise UserError(f"the recipe {str(path)!r} has layer {min(twice)} twice under kv")
    for name in recipe.formats:
        format_of(name, recipe.formats)
    for name in recipe.kv_formats:
        kv_format_of(name, recipe.kv_formats)
    recipe.calibration()
    return recipe


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(p) for p in problem["loc"])
    if problem["type"] == "extra_forbidden":
        owner: Any = Recipe
        for part in problem["loc"][:-1]:
            owner = _field_type(owner, part)
        names = list(owner.model_fields) if _is_model(owner) else []
        return str(unknown(f"key at {where}:", str(problem["loc"][-1]), names))
    return f"{where}: {problem['msg']}"


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _field_type(owner: Any, part: int | str) -> Any:
    """Follow one step of an error's location: into a model's field, or into what a container holds."""
    if _is_model(owner):
        field = owner.model_fields.get(str(part))
        owner = None if field is None else field.annotation
        optional = [a for a in getattr(owner, "__args__", ()) if _is_model(a)]
        return optional[0] if optional and type(None) in owner.__args__ else owner
    return next((a for a in getattr(owner, "__args__", ()) if _is_model(a)), None)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe."""
    return Recipe.model_json_schema()
