"""Every notebook runs from a clean folder, shows what it is about, and is committed without outputs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects
import plotly.io
import pytest
from nbclient import NotebookClient

from autoq.run_folder import RUNS

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.ipynb"))
ARTIFACTS = ROOT / "build" / "examples"  # `make docs` builds them into the site
SCRIPT = "../../assets/plotly.min.js"  # docs/generated.py puts it there
PLOTLY, HTML, WIDGET = "application/vnd.plotly.v1+json", "text/html", "application/vnd.jupyter.widget-view+json"
# What a reader has to see: how many figures, and words of tables and prints.
SHOWN = {
    "quickstart": (2, ["units x", "measured on text that nothing was chosen on", "quantized:", "bits per weight instead of"]),
    "kv_budget": (2, ["the most that fits", "bits per weight", "bytes held", "with vLLM's caches"]),
    "pareto": (4, ["front, bits per searched weight", "measured", "trials; the best measured"]),
    "new_format": (1, ["int6_g32", "passed - "]),
    "read_a_peer_recipe": (0, ["hf_quant_config", "nats, autoq's", "compute capability"]),
}


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def words(notebook: Any) -> str:
    """Return all text and HTML that a reader sees."""
    found = []
    for out in outputs(notebook):
        found.append(out.get("text", ""))
        found += [str(text) for kind, text in out.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(found)


def test_all_examples_are_known() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(SHOWN)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    assert not outputs(notebook)
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert not [cell for cell in notebook.cells if cell.get("attachments")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the tests set it; a reader does not
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    figures, expected = SHOWN[path.stem]
    assert sum(PLOTLY in out.get("data", {}) for out in outputs(notebook)) == figures
    shown = words(notebook)
    assert not [text for text in expected if text not in shown]
    assert "Traceback" not in shown
    assert [out for out in outputs(notebook) if WIDGET in out.get("data", {})]  # progress
    assert (tmp_path / RUNS).is_dir()
    keep_rendered(notebook, path.name)
    shutil.rmtree(tmp_path / RUNS)


def keep_rendered(notebook: Any, name: str) -> None:
    """Keep what the documentation shows: figures with the site's own plotly.js, and no progress bars, which are widgets that no page can draw."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                out for out in cell.outputs
                if out.get("name") != "stderr" and WIDGET not in out.get("data", {})
            ]  # fmt: skip
            for out in cell.outputs:
                if PLOTLY in out.get("data", {}):
                    figure = plotly.graph_objects.Figure(out.data[PLOTLY], skip_invalid=True)
                    out.data = {HTML: plotly.io.to_html(figure, include_plotlyjs=SCRIPT, full_html=False)}
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, ARTIFACTS / name)  # type: ignore[no-untyped-call]
