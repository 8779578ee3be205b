"""Read a YAML file strictly: a key that occurs twice is an error, not a silent choice of the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from autoq.errors import UserError


class _Strict(yaml.SafeLoader):
    """The safe loader, with unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; raises a YAMLError for a key that occurs twice."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML document; raises a YAMLError, a ValueError or a RecursionError for what is none."""
    return yaml.load(text, _Strict)


def read_yaml(path: Path, what: str) -> Any:
    """Return the data of a YAML file; raises UserError that calls the file `what`."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {what} {str(path)!r}") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError, TypeError) as error:
        raise UserError(f"the {what} {str(path)!r} is not YAML: {' '.join(str(error).split())[:200]}") from error
