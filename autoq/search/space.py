"""A search space: candidate formats for weights, keys and values, from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoq.errors import UserError, unknown
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure.damage import Candidates
from autoq.yaml_file import read_yaml

FOLDER = Path(__file__).resolve().parent.parent / "search_spaces"
KEYS = ("weights", "keys", "values")


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
        if key not in KEYS:
            raise unknown(f"key in the search space {path.name}:", str(key), KEYS)
    lists = {key: _names(data.get(key), key, path) for key in KEYS}
    if not lists["weights"] and not lists["keys"] and not lists["values"]:
        raise UserError(f"the search space {str(path)!r} names no format")
    return Candidates(
        tuple(weight_format(n) for n in lists["weights"]),
        tuple(kv_format(n) for n in lists["keys"]),
        tuple(kv_format(n) for n in lists["values"]),
    )


def _names(value: Any, key: str, path: Path) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UserError(f"the search space {str(path)!r}: {key} must be a list of format names")
    return list(dict.fromkeys(v for v in value if v != "bf16"))
