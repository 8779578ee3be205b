"""Read what other tools wrote, and write it: JSON and YAML, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from autoq.errors import UserError
from autoq.yaml_file import parse_yaml


def to_json(data: Any) -> str:
    """Return JSON as people read it."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def to_yaml(data: Any) -> str:
    """Return YAML in the given order, long names on one line."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    return text


def parse(name: str, text: str) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file (JSON is YAML, but tabs may indent it); raises UserError naming the file."""
    try:
        data = json.loads(text, object_pairs_hook=_unique) if name.endswith(".json") else parse_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError, TypeError) as error:
        raise UserError(f"{name!r} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(data, dict):
        raise UserError(f"{name!r} is not a mapping of keys")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def at(data: Mapping[str, Any], path: str, name: str, kind: type = dict) -> Any:
    """Return what stands at a dotted path; raises UserError that names the first key that is missing or of another kind."""
    found: Any = data
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise UserError(f"{name!r} has no {path!r}: is it of another tool?")
        found = found[part]
    if not isinstance(found, kind):
        raise UserError(f"{name!r}: {path!r} must be a {kind.__name__}, and is {type(found).__name__}")
    return found
