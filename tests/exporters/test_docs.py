"""docs/export.md says what the code has, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from autoq.exporters.consumers import CONSUMERS

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_the_table_of_consumers_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- consumers -->")[2].partition("<!-- /consumers -->")[0]
    rows = {
        cells[0]: cells[1:] for line in table.strip().splitlines()[2:] if (cells := [c.strip() for c in line.strip("|").split("|")])
    }
    assert list(rows) == list(CONSUMERS)
    for name, (what, weights, caches) in rows.items():
        consumer = CONSUMERS[name]
        assert what == consumer.what
        assert weights == ("every format" if consumer.weights is None else ", ".join(consumer.weights))
        wanted = "every format" if consumer.caches is None else ", ".join(consumer.caches) or "none"
        assert caches.startswith(wanted)


def test_the_table_of_vllm_is_that_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tables = text.partition("<!-- vllm -->")[2].partition("<!-- /vllm -->")[0].strip().split("\n\nvLLM for CPUs")
    assert len(tables) == 2
    for table, name in zip(tables, ("vllm-avx512.json", "vllm.json"), strict=True):
        results = json.loads((PAGE.parent / "results" / name).read_text())
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]
        assert [[row[0], row[3], row[4].split(";")[0]] for row in rows] == [
            [r["what"], f"{r['kl_vllm']:.5f}", f"{r['kl_autoq']:.5f}"] for r in results["rows"]
        ]
        assert [row[1] == "served" for row in rows] == [r["served"] for r in results["rows"]]
