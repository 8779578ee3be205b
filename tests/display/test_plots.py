"""Figures and notebook HTML show what the result says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autoq
from autoq.display import plots
from autoq.display.damage_map import DamageMap
from autoq.display.findings import Findings
from autoq.display.html import heat_map, search_html
from autoq.display.words import plus_minus, tiny


@pytest.fixture
def found(demo_search: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.chdir(demo_search["cwd"])
    return autoq.load_run("run")


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    VOID = ("br", "meta", "link", "input", "circle", "line", "polygon", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.cells += tag == "td"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parsed(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    return parser


def test_the_sensitivity_map_has_every_damage(found: Findings) -> None:
    figure = plots.sensitivity(found, "nvfp4")
    shown = next(trace for trace in figure.data if trace.visible)
    row, column = list(shown.y).index("down"), list(shown.x).index(3)
    damage = found.facts["damage"]["model.layers.3.mlp.down_proj"]["nvfp4"]
    assert 10 ** shown.z[row][column] == pytest.approx(damage)
    assert [b.label for b in figure.layout.updatemenus[0].buttons] == [re.search(r"<extra>(.*)</extra>", t.hovertemplate)[1] for t in figure.data]  # type: ignore[index]  # fmt: skip
    with pytest.raises(autoq.UserError, match="no format 'nvfp5'"):
        plots.sensitivity(found, "nvfp5")


def test_the_damage_plot_has_the_front_its_band_uniform_formats_and_the_result(found: Findings) -> None:
    band, line, uniforms, result = plots.damage(found, "weights").data
    beside = sum(e.predicted_kl or 0.0 for layer in found.recipe.kv for e in (layer.key, layer.value))
    assert beside > 0
    assert list(line.y) == [p["predicted_kl"] + beside for p in found.facts["front"]]
    half = len(line.x)
    assert list(band.y[:half]) == [y + p["predicted_kl_stderr"] for y, p in zip(line.y, found.facts["front"], strict=True)]
    assert all(p["predicted_kl_stderr"] > 0 for p in found.facts["front"])
    best = {
        b: min(u["measured_kl"] for u in found.facts["uniform"] if round(u["bits"], 3) == b)
        for b in {round(u["bits"], 3) for u in found.facts["uniform"]}
    }
    assert {
        round(x, 3): y for x, y in zip(uniforms.x, uniforms.y, strict=True)
    } == best  # pairs that differ in the other side alone are one point
    assert uniforms.name == "uniform formats of both sides, measured"
    assert list(result.y) == [found.facts["measured_kl"]]
    assert plots.damage(found, "cache").data
    with pytest.raises(autoq.UserError, match="choose weights or cache"):
        plots.damage(found, "both")


def test_predicted_against_measured_has_every_measured_recipe(found: Findings) -> None:
    line, others, result = plots.predicted_measured(found).data
    assert len(others.x) + len(result.x) == len(found.facts["confirmed"])
    assert list(line.x) == list(line.y)


def test_formats_by_layer_are_the_recipes(found: Findings) -> None:
    figure = plots.cache_formats(found)
    bars = {(layer, kind): trace.name for trace in figure.data[1:] for layer, kind in zip(*trace.x, strict=True)}
    for layer in found.recipe.kv:
        assert bars[str(layer.layer), "K"] == layer.key.format
        assert bars[str(layer.layer), "V"] == layer.value.format
    cells = plots.recipe(found).data[0]
    entry = found.recipe.weights["model.layers.2.self_attn.qkv"]
    assert cells.customdata[list(cells.y).index("qkv")][2].startswith(entry.format)


def test_memory_over_context_ends_at_what_the_recipe_says(found: Findings) -> None:
    figure = plots.memory(found)
    by_name = {trace.name: trace for trace in figure.data}
    budget, totals = found.recipe.budget, found.recipe.totals
    at = list(by_name["KV cache, recipe"].x).index(budget.context)
    assert by_name["KV cache, recipe"].y[at] * 2**20 == pytest.approx(totals.kv_bytes)
    assert by_name["both, recipe"].y[at] * 2**20 == pytest.approx(totals.kv_bytes + totals.weight_bytes)
    assert by_name["weights, 16 bit"].y[0] * 2**20 == 2 * found.recipe.model.parameters


def test_a_search_without_trials_says_so(found: Findings) -> None:
    for figure in (plots.history, plots.importances):
        with pytest.raises(autoq.UserError, match="made no trials"):
            figure(found)


def test_notebook_html_shows_every_unit_and_is_whole(found: Findings, demo_search: dict[str, Any]) -> None:
    recipe = autoq.read_recipe("run")
    html = recipe._repr_html_()
    parsed(html)
    for entry in recipe.weights.values():
        assert entry.format in html
    front = autoq.front("run", [3, 4])
    assert f"{front.weights[0].bits:.3f}" in front._repr_html_()
    parsed(front._repr_html_())
    assert front.plot().data


def test_a_search_shows_the_answer_the_table_and_the_front(found: Findings) -> None:
    html = search_html(found)
    parsed(html)
    facts = found.facts
    assert f"{found.recipe.totals.bits:.4g} bits per weight" in html
    assert all(row["recipe"] in html for row in facts["confirmed"])
    assert html.count("<circle") == len(facts["uniform"]) + 1
    (line,) = re.findall(r'<polyline points="([^"]+)"', html)
    assert len(line.split()) == len(facts["front"])
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights == sorted(heights)  # less damage, further down


def test_a_profile_shows_every_unit_and_format(found: Findings) -> None:
    profile = autoq.profile("demo", run="run", samples=6, seq_len=64, dtype="float32")
    html = profile._repr_html_()
    cells = sum(len(formats) for formats in profile.damage.values())
    assert len(re.findall(r"<td class=d\d title=", html)) == cells
    assert parsed(html).cells >= cells
    assert profile.plot().data


def test_text_takes_the_pages_own_colour(found: Findings) -> None:
    """What reads on white and on black: no fixed text colour but the accent, tints instead of solid backgrounds."""
    html = autoq.read_recipe("run")._repr_html_()
    colours = re.findall(r"(?<![-\w])color:\s*([^;\"}]+)", html)
    assert {c.strip() for c in colours} == {"inherit"}
    assert all("a(" in c for c in re.findall(r"background-color:\s*([^;]+)", html))


def test_a_front_is_drawn_of_every_result(found: Findings) -> None:
    own = plots.front(found)
    assert [t.name for t in own.data if t.mode == "lines+markers"] == ["weights, predicted", "cache, predicted"]
    other = plots.front(autoq.front("run", [3, 4, 5]))
    assert [len(t.x) for t in other.data if t.mode == "lines+markers"] == [3, 3]


def test_a_front_shows_bars_knees_and_where_the_recipe_is(found: Findings) -> None:
    html = autoq.front("run")._repr_html_()
    assert html.count("<td>chosen</td>") == 2
    assert html.count("<table class=front>") == 3
    assert html.count("█" * 24) >= 3
    assert "<td class=bar>" in html
    parsed(html)


def test_what_load_run_reads_shows_itself(found: Findings) -> None:
    assert repr(found).startswith("<LoadedRun: demo in ")
    assert found._repr_html_() == search_html(found)


def test_numbers_with_errors_have_as_many_digits() -> None:
    assert plus_minus(0.0092, 1.8e-4) == "0.0092 ± 0.0002"
    assert plus_minus(0.0092, 1e-6) == "0.0092 ± 1.0e-06"
    assert plus_minus(2e-4, 1e-5) == "2.0e-04 ± 1.0e-05"
    assert plus_minus(0.5, None) == plus_minus(0.5, float("inf")) == "0.5000"
    assert (tiny(0.0), tiny(1.1e-9)) == ("below 1e-12", "1.1e-09")


def test_names_are_escaped() -> None:
    found = DamageMap((("<b>", "qkv", 0),), {"<b>": {"<script>": 0.1, "x": 0.2}})
    assert "<script>" not in heat_map(found, False)


def test_many_layers_are_averaged() -> None:
    units = tuple((f"layers.{i}.mlp", "down", i) for i in range(1000))
    html = heat_map(DamageMap(units, {name: {"a": 1e-3 * (i + 1)} for i, (name, *_) in enumerate(units)}), False)
    assert "means of 5 layers" in html
    assert html.count("<tr>") == 201


def test_a_run_that_is_not_finished_is_named(tmp_path: Path, demo_search: dict[str, Any]) -> None:
    with pytest.raises(autoq.UserError, match="no run folder"):
        autoq.load_run(tmp_path / "nothing")
    with pytest.raises(autoq.UserError, match=r"holds no recipe\.yaml"):
        autoq.load_run(tmp_path)
    source = Path(demo_search["cwd"]) / "run"
    (tmp_path / "recipe.yaml").write_bytes((source / "recipe.yaml").read_bytes())
    with pytest.raises(autoq.UserError, match=r"no result\.json"):
        autoq.load_run(tmp_path)
    for content, says in (("{", "cannot be read"), ("[]", "older version"), ("{}", "older version")):
        (tmp_path / "result.json").write_text(content)
        with pytest.raises(autoq.UserError, match=says):
            autoq.load_run(tmp_path)
