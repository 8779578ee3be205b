"""Planted facts: texts of the asked length, facts at the asked depth, and what counts as found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoq.errors import UserError
from autoq.formats.catalog import kv_format
from autoq.measure.retrieval import Prompt, make_prompts, retrieve
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.quantized import Assignment
from autoq.model.units import find_units
from tests.conftest import calibrated

SOURCE = model_source("demo")


def test_prompts_have_their_length_and_their_fact_at_its_depth() -> None:
    tokenizer = load_tokenizer(SOURCE)
    prompts = make_prompts(tokenizer, [128, 400], [0.0, 0.5, 1.0], 2, seed=3)
    assert len(prompts) == 2 * 2 * 3 * 2
    for prompt in prompts:
        assert prompt.length - 40 < len(prompt.ids) <= prompt.length
        text, answer = tokenizer.decode(prompt.ids), tokenizer.decode(prompt.ids[-prompt.answer :]).strip()
        assert len(answer) == 5
        assert answer.isdecimal()
        assert text.count(answer) == 2
        place = text.index(answer) / len(text)
        assert abs(place - prompt.depth * 0.9) < 0.25
    again = make_prompts(tokenizer, [128, 400], [0.0, 0.5, 1.0], 2, seed=3)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(prompts, again, strict=True))
    assert not torch.equal(prompts[0].ids, make_prompts(tokenizer, [128], [0.0], 1, seed=4)[0].ids)


@pytest.mark.parametrize(("length", "depth", "says"), [(20, 0.5, "prompt of 20 tokens"), (128, 1.5, "depth of 150 %")])
def test_mistakes(length: int, depth: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_prompts(load_tokenizer(SOURCE), [length], [depth], 1)


def test_an_answer_is_found_when_every_token_is_the_most_likely() -> None:
    model, tokenizer = load_model(SOURCE, "cpu", "float32"), load_tokenizer(SOURCE)
    units = find_units(model)
    prompt = make_prompts(tokenizer, [96], [0.5], 1)[0]
    question = prompt.ids[: -prompt.answer]
    with torch.no_grad():
        said = model.generate(question.unsqueeze(0), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)[0]
    known = Prompt("pairs", 96, 0.5, said, 3)
    wrong = replace(known, ids=torch.cat([said[:-1], said[-1:] ^ 1]))
    rows = retrieve(model, units, Assignment(), [prompt, known])
    assert [r.prompts for r in rows] == [1, 1]
    assert all(r.kl == pytest.approx(0, abs=1e-6) and r.found == r.found_original for r in rows)
    assert rows[1].found_original == 1
    assert retrieve(model, units, Assignment(), [wrong])[0].found_original == 0
    both = retrieve(model, units, Assignment(), [known, wrong])
    assert len(both) == 1
    assert both[0].found == 0.5
    assert both[0].prompts == 2
    caches = Assignment(
        {},
        {u.name: kv_format("int2_token") for u in units.caches},
        {u.name: calibrated(9.0, u.kv_heads, u.head_dim) for u in units.caches},
    )
    worse = retrieve(model, units, caches, [prompt])[0]
    assert worse.kl > 1e-3
