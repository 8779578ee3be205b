"""`python -m autoq.recipe_schema` writes recipe.schema.json, the JSON Schema of recipe.yaml."""

from __future__ import annotations

import json
from pathlib import Path

from autoq.recipe import json_schema

PATH = Path(__file__).with_name("recipe.schema.json")


def text() -> str:
    """Return the file's text."""
    return json.dumps(json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
