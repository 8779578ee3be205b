"""A file imports only from layers above its own (docs/design.md); optuna and torch stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "autoq"
LAYERS = [
    {"errors", "kinds", "config", "process_memory", "urls", "__init__"},
    {"yaml_file", "budget", "formats", "display.progress", "run_folder"},
    {"codec", "kernels"},
    {"recipe_formats"},
    {"recipe", "recipe_schema"},
    {"model"},
    {"cost"},
    {"exporters"},
    {"measure"},
    {"allocation"},
    {"trials"},
    {"display", "plots"},
    {"api"},
    {"verbs", "arguments"},
    {"cli", "__main__"},
]


def layer_of(module: str) -> int:
    for depth, names in enumerate(LAYERS):
        if any(module == n or module.startswith(n + ".") for n in names):
            return depth
    raise AssertionError(f"autoq.{module} belongs to no layer: add it to LAYERS")


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        if relative.parts[0] in ("kernels", "search_spaces"):
            continue
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    for path in (ROOT.parent / "kernels").glob("*.py"):  # autoq/kernels is a link
        found[f"kernels.{path.stem}".removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def is_typing_only(node: ast.AST, tree: ast.Module) -> bool:
    return any(
        isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING" and node in ast.walk(block)
        for block in ast.walk(tree)
    )


def test_every_import_points_to_a_layer_above() -> None:
    wrong = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("autoq") or is_typing_only(node, tree):
                continue
            base = (node.module or "").removeprefix("autoq").removeprefix(".")
            for alias in node.names:
                target = f"{base}.{alias.name}".removeprefix(".") if not base or base in ("model", "formats", "kernels") else base
                target = "__init__" if target == "__version__" else target
                if layer_of(target) > layer_of(name):
                    wrong.append(f"autoq.{name} imports autoq.{target}")
    assert not wrong


def test_the_command_line_imports_torch_only_when_needed() -> None:
    heavy = ("torch", "transformers", "scipy", "datasets", "autoq.api")
    for name in (
        "cli",
        "config",
        "errors",
        "budget",
        "run_folder",
        "display.progress",
        "display.formats",
        "formats.format",
        "formats.catalog",
    ):
        tree = modules()[name]
        at_top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        named = [getattr(n, "module", None) or n.names[0].name for n in at_top]
        assert not [n for n in named if n.split(".")[0] in heavy or n in heavy], name


def test_optuna_is_imported_by_the_trials_alone() -> None:
    allowed = ("trials.",)
    for name, tree in modules().items():
        named = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and not is_typing_only(n, tree)]
        sources = {getattr(n, "module", None) or n.names[0].name for n in named}
        assert not [s for s in sources if s.split(".")[0] == "optuna"] or name.startswith(allowed), name
