"""The report in a real browser: it loads without a network, draws, sorts and searches, on wide and narrow screens, light and dark."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import autoq
from autoq.display.findings import Findings
from tests.conftest import run_autoq

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARTIFACTS = Path(__file__).parents[2] / "build" / "report"  # screenshots, kept by CI
MIB = 2**20


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        if installed is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.fail("no Chromium was found: `make test` installs one")
        found = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything: both sides, trials, a validation, exports."""
    folder = tmp_path_factory.mktemp("report")
    arguments = ("search", "--budget", "4bits", "--kv-budget", "6bits", "--samples", "4", "--seq-len", "64", "--eval-samples", "3",
                 "--eval-len", "64", "--correct", "2", "--trials", "14", "--trial-samples", "4", "--validate", "1", "--run", "run")  # fmt: skip
    done = run_autoq(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    done = run_autoq("report", "run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    path: Path = folder / json.loads(done.stdout)["report"]
    return path


@pytest.fixture(scope="module")
def found(report: Path) -> Findings:
    return autoq.load_run(report.parent)


class Opened:
    """A page, what it complained of, and what it asked the network for."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: Any) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.plot .main-svg').length >= figures.length")

    def height(self, name: str) -> float:
        """Return the height of the part of a figure that can be seen."""
        frame = self.page.locator(".figure", has=self.page.locator(f"#{name}")).bounding_box()
        drawn = self.page.locator(f"#{name} .main-svg").first.bounding_box()
        assert frame is not None
        assert drawn is not None
        return min(frame["y"] + frame["height"], drawn["y"] + drawn["height"]) - max(frame["y"], drawn["y"])

    def column(self, number: int) -> list[str]:
        cells = self.page.locator(f"#units tbody tr:visible td:nth-child({number})")
        return [text.strip() for text in cells.all_inner_texts()]


@pytest.fixture(
    scope="module", params=[(1400, "light"), (1000, "dark"), (380, "light"), (380, "dark")], ids=lambda p: f"{p[0]}-{p[1]}"
)
def opened(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Opened]:
    width, scheme = request.param
    found = Opened(browser, report, width, scheme)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=ARTIFACTS / f"report-{width}-{scheme}.png", full_page=True)
    yield found
    found.page.close()


def test_it_opens_alone_and_draws_everything(opened: Opened, report: Path) -> None:
    assert report.stat().st_size < 6 * MIB
    assert not opened.complaints
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    ids = opened.page.eval_on_selector_all(".plot", "nodes => nodes.map(node => node.id)")
    assert ids == [
        "damage-weights",
        "damage-cache",
        "sensitivity",
        "recipe",
        "predicted",
        "cache",
        "memory",
        "history",
        "importances",
    ]
    for name in ids:
        assert opened.height(name) > 300
        assert opened.page.locator(f"#{name} :is(.trace, .hm, .heatmaplayer image, .bars, .point)").count() > 0, name


def test_nothing_is_wider_than_the_screen(opened: Opened) -> None:
    width = opened.page.viewport_size["width"]  # type: ignore[index]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    for box in opened.page.locator(".figure .main-svg").all():
        assert (box.bounding_box() or {"width": 0})["width"] <= width


def test_figures_follow_the_window(browser: Browser, report: Path) -> None:
    opened = Opened(browser, report, 380, "light")
    for width in (1300, 500, 900):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.wait_for_timeout(400)
        for plot in opened.page.locator(".plot").all():
            assert opened.height(str(plot.get_attribute("id"))) > 300
            box, drawn = plot.bounding_box(), plot.locator(".main-svg").first.bounding_box()
            assert box is not None
            assert drawn is not None
            assert abs(box["width"] - drawn["width"]) < 2
    opened.page.close()


def test_titles_are_whole_on_a_narrow_screen(browser: Browser, report: Path) -> None:
    opened = Opened(browser, report, 380, "light")
    for title in opened.page.locator(".plot .gtitle").all():
        box = title.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 380, title.inner_text()
    opened.page.close()


def test_a_large_model_stays_below_six_megabytes(found: Findings, report: Path) -> None:
    """Eighty layers of the demo's, with every consumer's files as long as they then are."""
    from dataclasses import replace

    from autoq.api.reporting import _serving
    from autoq.display.page import page

    def of_layer(name: str, i: int) -> str:
        return re.sub(r"layers\.\d+", f"layers.{i}", name)

    recipe, facts = found.recipe, found.facts
    first = {n: e for n, e in recipe.weights.items() if e.layer == 0}
    weights = {of_layer(n, i): e.model_copy(update={"layer": i}) for i in range(80) for n, e in first.items()}
    kv = tuple(recipe.kv[0].model_copy(update={"layer": i, "module": of_layer(recipe.kv[0].module, i)}) for i in range(80))
    rows = {n: r for n, r in facts["damage"].items() if "layers.0." in n}
    damage = {of_layer(n, i): r for i in range(80) for n, r in rows.items()}
    serving, _ = _serving(found, None)
    long = [replace(s, files={name: 14 * text for name, text in s.files.items()}) for s in serving]
    large = replace(found, recipe=recipe.model_copy(update={"weights": weights, "kv": kv}), facts={**facts, "damage": damage})
    assert len(page(large, long).encode()) < 6_000_000


def test_text_stands_out_from_its_page(opened: Opened) -> None:
    """WCAG's contrast of body text is 4.5 at least, on light and on dark."""
    page = _luminance(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    colours = set(
        opened.page.eval_on_selector_all(
            "main, main p, main td, .dim, th, .warning", "all => all.map(e => getComputedStyle(e).color)"
        )
    )
    assert len(colours) >= 2
    for colour in colours:
        text = _luminance(colour)
        assert (max(text, page) + 0.05) / (min(text, page) + 0.05) > 4.5, colour


def _luminance(colour: str) -> float:
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_table_sorts_by_number_and_by_name(opened: Opened, found: Findings) -> None:
    page = opened.page
    assert len(opened.column(1)) == len(found.recipe.weights) + 2 * len(found.recipe.kv)
    bits = page.get_by_role("button", name="bits", exact=True)
    bits.click()
    shown = [float(b) for b in opened.column(5)]
    assert shown == sorted(shown)
    assert shown[0] < shown[-1]
    bits.click()
    assert [float(b) for b in opened.column(5)] == sorted(shown, reverse=True)
    page.get_by_role("button", name="unit", exact=True).click()
    assert opened.column(1) == sorted(opened.column(1), key=str.lower)
    assert page.locator("th[aria-sort]").count() == 1


def test_the_table_searches(opened: Opened, found: Findings) -> None:
    page = opened.page
    page.get_by_label("Search the recipe").fill("down_proj layers.2")
    assert opened.column(1) == ["model.layers.2.mlp.down_proj"]
    assert page.locator("#shown").inner_text().startswith("1 of ")
    page.get_by_label("Search the recipe").fill("no such unit")
    assert opened.column(1) == []
    page.get_by_label("Search the recipe").fill("")
    assert len(opened.column(1)) > 1


def test_it_says_what_the_search_found(opened: Opened, found: Findings) -> None:
    text = opened.page.locator("main").inner_text()
    recipe, facts = found.recipe, found.facts
    assert f"{recipe.totals.bits:.4g} bits per weight" in opened.page.locator(".answer").inner_text()
    for expected in ("4bits", "6bits", "What the search did not cover", "lm_head", "norms", "How it was measured", recipe.measured.text, "passed"):  # type: ignore[union-attr]  # fmt: skip
        assert expected in text, expected
    for row in facts["confirmed"]:
        assert row["recipe"] in text
    for warning in facts["warnings"]:
        assert warning in text


def test_it_tells_how_to_serve_the_recipe(opened: Opened) -> None:
    page = opened.page
    vllm = page.locator("details", has=page.locator("summary b", has_text=re.compile("^vllm$"))).first
    vllm.locator("summary").first.click()
    text = vllm.inner_text()
    assert "autoq export run --to vllm --round up" in text
    assert "exec vllm serve" in text
    assert page.locator("#serving ~ details").count() == 12


def test_bad_input_is_one_sentence(tmp_path: Path, report: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "recipe.yaml").write_bytes((report.parent / "recipe.yaml").read_bytes())
    os.mkfifo(odd / "result.json")
    for arguments, says in (
        (("report", str(tmp_path)), "holds no recipe.yaml"),
        (("report", str(tmp_path / "x")), "there is no run folder"),
        (("report", str(report.parent), "--out", str(tmp_path)), "is a folder"),
        (("report", str(report.parent), "--out", "/dev/null/x.html"), "cannot be made"),
        (("report",), "there is no recipe in 'runs'"),
        (("report", str(report.parent), "--model", "./nothing"), "there is no model folder './nothing'"),
        (("report", str(odd)), "is no regular file"),
    ):
        done = run_autoq(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_report_overwrites_reports_alone(report: Path) -> None:
    before = (report.parent / "recipe.yaml").read_bytes()
    done = run_autoq("report", str(report.parent), "--out", str(report.parent / "recipe.yaml"))
    assert done.returncode == 2
    assert "is no HTML file" in done.stderr
    assert (report.parent / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"measured_kl": None}, {"uniform": 5}, {"perplexity_original": 0}, {"confirmed": [{}]}, {"seconds": 5}]
)
def test_damaged_figures_are_named(change: dict[str, Any], report: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes((report.parent / "recipe.yaml").read_bytes())
    facts = json.loads((report.parent / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**facts, **change}))
    done = run_autoq("report", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "is damaged" in done.stderr


def test_names_with_markup_are_text(found: Findings, tmp_path: Path, browser: Browser) -> None:
    from dataclasses import replace

    from autoq.display.page import page

    model = found.recipe.model.model_copy(update={"id": "<img src=x onerror=alert(1)></script>"})
    hostile = replace(found, recipe=found.recipe.model_copy(update={"model": model}))
    (tmp_path / "r.html").write_text(page(hostile, ()))
    opened = Opened(browser, tmp_path / "r.html", 1000, "light")
    assert opened.page.locator("h1").inner_text() == "<img src=x onerror=alert(1)></script>"
    assert not opened.complaints
    opened.page.close()
