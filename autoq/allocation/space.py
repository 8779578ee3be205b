"""A search space: candidate formats for weights, keys and values, from a YAML file, which may define formats of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoq.errors import UserError, unknown
from autoq.formats.catalog import define, kv_format, weight_format
from autoq.formats.format import Format, IntElement, KVFormat
from autoq.measure.damage import Candidates
from autoq.recipe_formats import FormatEntry, format_of, kv_format_of
from autoq.yaml_file import read_yaml

FOLDER = Path(__file__).resolve().parent.parent / "search_spaces"
KEYS = ("weights", "keys", "values")
OWN = ("formats", "kv_formats")
OWN_BLOCKS = (16, 32, 64, 128, 256)
OWN_SYMMETRIC, OWN_ASYMMETRIC = (4, 5, 6, 8), (2, 3, 4, 6, 8)


def space_names() -> list[str]:
    """Return the names of the bundled search spaces."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml"))


def load_space(name: str) -> Candidates:
    """Load a bundled space by name, or a YAML file; raises UserError that names what is wrong."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.suffix and path.parent != FOLDER:
            raise UserError(f"there is no search space file {name!r}")
        raise unknown("search space", name, space_names())
    data = read_yaml(path, "search space")
    if not isinstance(data, dict):
        raise UserError(f"the search space {str(path)!r} must map weights, keys and values to lists of formats")
    for key in data:
        if key not in (*KEYS, *OWN):
            raise unknown(f"key in the search space {path.name}:", str(key), (*KEYS, *OWN))
    for key in OWN:
        _define(data.get(key), key, path)
    lists = {key: _names(data.get(key), key, path) for key in KEYS}
    if not lists["weights"] and not lists["keys"] and not lists["values"]:
        raise UserError(f"the search space {str(path)!r} names no format")
    return Candidates(
        tuple(weight_format(n) for n in lists["weights"]),
        tuple(kv_format(n) for n in lists["keys"]),
        tuple(kv_format(n) for n in lists["values"]),
    )


def _define(entries: Any, key: str, path: Path) -> None:
    """Add the formats that a space writes out in full, as a recipe does; raises UserError that names what is wrong."""
    if entries is None:
        return
    if not isinstance(entries, dict) or not all(isinstance(v, dict) for v in entries.values()):
        raise UserError(f"the search space {str(path)!r}: {key} must map names to element, block, scale and rule")
    written = {}
    for name, entry in entries.items():
        try:
            written[str(name)] = FormatEntry.model_validate(entry)
        except ValidationError as error:
            problem = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # a misspelt key is missing too
            if problem["type"] == "extra_forbidden":
                raise unknown(f"key in {key}.{name} of {path.name}:", str(problem["loc"][-1]), FormatEntry.model_fields) from error
            where = ".".join(str(part) for part in problem["loc"])
            raise UserError(f"the search space {str(path)!r}: {key}.{name}.{where}: {problem['msg']}") from error
    formats = [format_of(name, written) if key == "formats" else kv_format_of(name, written) for name in written]
    for fmt in formats:
        _check_own(fmt, path)
    for fmt in formats:  # all of them or none
        define(fmt)


def _check_own(fmt: Format | KVFormat, path: Path) -> None:
    """Raise UserError for an element, block, scale and rule that the kernels and the reference do not have together."""
    values, where = fmt.values if isinstance(fmt, KVFormat) else fmt, f"the search space {str(path)!r}: {fmt.name}"
    element, own = values.element, values.activation is None
    if element is None or not own:
        raise UserError(f"{where}: give an element such as INT6, and no activation")
    bits: tuple[int, ...]
    if isinstance(element, IntElement):
        bits, rules = (
            (OWN_ASYMMETRIC, ("minmax",)) if element.asymmetric else (OWN_SYMMETRIC, ("absmax", "full_range", "half_step"))
        )
        if isinstance(fmt, KVFormat) and element.asymmetric:
            bits = (2, 4, 8)  # zero points of a cache fill whole bytes
        if element.bits not in bits:
            raise UserError(f"{where}: {element.name} is not supported, choose {', '.join(f'{b} bits' for b in bits)}")
        scales = {"fp16": (*rules, "least_squares")}
    else:
        scales = {"e8m0": ("floor", "ceil", "even", "least_squares"), "e4m3": ("absmax", "least_squares")}
    if values.scale not in scales:
        raise UserError(f"{where}: blocks of {element.name} take a scale in {' or '.join(scales)}, not {values.scale}")
    if values.rule not in scales[values.scale]:
        raise UserError(
            f"{where}: the rule {values.rule} does not go with {element.name}, choose {', '.join(scales[values.scale])}"
        )
    if values.tensor_scale and values.scale != "e4m3":
        raise UserError(f"{where}: a tensor scale goes with e4m3 scales, not {values.scale}: leave tensor_scale out")
    if values.block not in OWN_BLOCKS:
        block = values.block or "the whole row (null)"
        raise UserError(f"{where}: a block of {block} is not supported, choose {', '.join(map(str, OWN_BLOCKS))}")


def _names(value: Any, key: str, path: Path) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UserError(f"the search space {str(path)!r}: {key} must be a list of format names")
    return list(dict.fromkeys(v for v in value if v != "bf16"))
