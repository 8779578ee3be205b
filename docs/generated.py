"""What the documentation takes from the code: a line `::: generated NAME [ARGUMENT]` in a page is replaced when the site is built."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"^::: generated (\w+)(?: (\S+))?$", re.MULTILINE)


def command(name: str) -> str:
    """Return a command's usage, options and examples, from what `--help` knows."""
    import typer.main

    from autoq.cli import app

    found: Any = typer.main.get_command(app)
    found = found.commands[name]
    lines = [found.help or "", ""]
    arguments = [p for p in found.params if p.param_type_name == "argument"]
    options = [p for p in found.params if p.param_type_name == "option"]
    usage = " ".join(
        [
            f"autoq {name}",
            *(f"[{p.name.upper()}]" if not p.required else p.name.upper() for p in arguments),
            "[OPTIONS]",
        ]
    )
    lines += ["```console", f"$ {usage}", "```", ""]
    if arguments:
        lines += ["| argument | what |", "|---|---|", *(f"| `{p.name.upper()}` | {_text(p)} |" for p in arguments), ""]
    lines += ["| option | default | what |", "|---|---|---|"]
    for p in options:
        shown = "" if p.default is None or p.default is False or p.default is ... or callable(p.default) else f"`{p.default}`"
        if getattr(p, "required", False):
            shown = "required"
        lines.append(f"| {', '.join(f'`{o}`' for o in p.opts)} | {shown} | {_text(p)} |")
    examples = [line.strip() for line in (found.epilog or "").split("\n") if line.strip().startswith("autoq")]
    if examples:
        lines += ["", "```console", *(f"$ {_remark(line)}" for line in examples), "```"]
    return "\n".join(lines)


def _remark(line: str) -> str:
    """Turn the words in brackets after an example into a comment."""
    return re.sub(r"   [(](.*)[)]$", r"  # \1", line)


def _text(parameter: Any) -> str:
    return " ".join(
        str(getattr(parameter, "help", None) or "").replace("\\[", "&#91;").replace("|", "\\|").replace("<", "&lt;").split()
    )


def options(name: str) -> str:
    """Return the options of one of Python's verbs: types and defaults from its signature, what they are from the command's help."""
    import inspect

    import typer.main

    import autoq
    from autoq.arguments import ProfileOptions
    from autoq.cli import app

    helps = {p.name: _text(p) for p in typer.main.get_command(app).commands["search"].params}  # type: ignore[attr-defined]
    profiles = set(ProfileOptions.__annotations__)
    lines = ["| option | default | what |", "|---|---|---|"]
    for option, parameter in inspect.signature(getattr(autoq, name)).parameters.items():
        if option in helps and option != "model":
            what = re.sub(r"--([a-z][a-z-]*)", lambda m: f"`{m[1].replace('-', '_')}`", helps[option])
            star = "" if option in profiles else " *"
            kind = str(parameter.annotation).replace(" | ", " or ")
            lines.append(f"| `{option}`{star} | `{parameter.default!r}` | {what} (`{kind}`) |")
    return "\n".join(lines)


def consumer(name: str) -> str:
    """Return what a consumer computes and how it mixes caches, from its exporter."""
    from autoq.exporters.consumers import CONSUMERS

    found = CONSUMERS[name]
    mixing = {
        "free": "K and V of every layer in formats of their own",
        "one": "one format for K and V of all layers",
        "one and skipped": "one format for K and V, and layers that stay in 16 bit",
        "two": "one format for all keys and one for all values",
    }
    weights, caches = (
        "every one" if names is None else ", ".join(f"`{n}`" for n in names) or "none" for names in (found.weights, found.caches)
    )
    mixed = "the cache stays as the engine has it" if found.caches == () else mixing[found.mixing]
    lines = [
        f"`autoq export --to {name}` writes {found.what}.", "", "| | |", "|---|---|", f"| weight formats it computes | {weights} |",
        f"| cache formats | {caches} |", f"| how caches mix | {mixed} |", "",
        "```console", f"$ autoq search --budget 4.5bits --consumer {name} --run runs/mine", f"$ autoq export runs/mine --to {name}", "```", "",
        f"`--consumer {name}` searches only what it computes, so that the export loses nothing. A recipe that was searched freely is refused where",
        "something would be lost, until you allow it with `--round scales` or `--round up`.",
    ]  # fmt: skip
    lines += ["", *(f"- {note}" for note in found.notes)] if found.notes else []
    return "\n".join(lines)


def formats(_: str) -> str:
    """Return the catalog as tables."""
    from autoq.display.formats import format_rows

    columns = ("name", "element", "block", "along", "scale", "rule", "activations", "bits")
    parts = []
    for kind, title in (("weight", "Weights"), ("kv", "Keys and values")):
        parts += [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        parts += [
            "| " + " | ".join(f"`{r[c]}`" if c == "name" else str(r[c]) for c in columns) + " |"
            for r in format_rows()
            if r["kind"] == kind
        ]
        parts.append("")
    return "\n".join(parts)


def schema(_: str) -> str:
    """Return the recipe's JSON Schema as text."""
    import jsonschema2md

    found = json.loads((ROOT / "autoq" / "recipe.schema.json").read_text(encoding="utf-8"))
    lines = jsonschema2md.Parser(show_examples="object", header_level=1).parse_schema(found)
    text = re.sub(r"<a id=\"[^\"]*\"></a>|: Refer to \*\[[^\]]*\]\([^)]*\)\*", lambda m: _reference(m[0]), "".join(lines))
    text = re.sub(r"^( *- ): ", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^ +(?=- )", lambda m: 2 * m[0], text, flags=re.MULTILINE)  # Python-Markdown nests by four spaces
    return re.sub(r"^#+ (?=Properties|Definitions)", "## ", text, flags=re.MULTILINE)


def _reference(text: str) -> str:
    found = re.search(r"\[#/\$defs/(\w+)\]", text)
    return f": {found[1]}, below" if found else ""


def readme(name: str) -> str:
    """Return a measured table of the README, which scripts in benchmarks/ draw."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n", 1)[1].split(f"<!-- /{name} -->", 1)[0].strip()


GENERATORS: dict[str, Callable[[str], str]] = {
    "command": command,
    "consumer": consumer,
    "options": options,
    "formats": formats,
    "schema": schema,
    "readme": readme,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page, and link to the notebooks as the tests ran them; called by mkdocs."""
    markdown = re.sub(r"\]\((?:\.\./)((?:\.\./)*examples/\w+\.ipynb)", r"](\1", markdown)
    return MARKER.sub(lambda m: GENERATORS[m[1]](m[2] or ""), markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Put plotly.js where the notebooks' figures look for it; called by mkdocs."""
    import plotly.offline

    path = Path(config["site_dir"]) / "assets" / "plotly.min.js"
    path.write_text(plotly.offline.get_plotlyjs(), encoding="utf-8")
    for page in sorted(ROOT.glob("examples/*.ipynb")):
        shown = (Path(config["site_dir"]) / "examples" / page.stem / "index.html").read_text(encoding="utf-8")
        if 'class="autoq"' not in shown:
            raise RuntimeError(f"{page.name} has no outputs in the site: run the examples first, as `make docs` does")
