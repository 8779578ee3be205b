"""Arguments of `import autoq` of the wrong kind: one sentence that names them, before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import autoq
from autoq.model.given import token_ids
from tests.test_verbs import BATCHES, QUICK

PYTHON: Any = autoq  # as a notebook has it, which no type checker reads


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.int32, np.uint8])
def test_token_ids_of_any_whole_type(kind: type) -> None:
    assert torch.equal(token_ids(BATCHES.numpy().astype(kind), "text"), BATCHES)
    assert torch.equal(
        token_ids(BATCHES.numpy().astype(kind).byteswap().view(np.dtype(kind).newbyteorder())[::-1], "text"), BATCHES.flip(0)
    )
    assert torch.equal(token_ids(torch.from_numpy(BATCHES.numpy().astype(kind)), "text"), BATCHES)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: PYTHON.profile("demo", [1, 2, 3]), "give sequences of token ids"),
    (lambda: PYTHON.load_model(5), "name is 5, but must be text"),
    (lambda: PYTHON.front(5), "run is 5, but must be a path or what a search or a profile returned"),
    (lambda: PYTHON.memory([]), "model is [], but must be a name"),
    (lambda: PYTHON.memory("demo", context=[]), "at least one context"),
    (lambda: PYTHON.memory("demo", batch=10**400), "a batch of 2^31 sequences and more"),
    (lambda: PYTHON.front("x", [10**400]), "must be a list of numbers"),
    (lambda: PYTHON.front("x", np.array(4.0)), "budgets is a ndarray, but must be a list of numbers"),
    (lambda: PYTHON.front("x", [True]), "budgets is [True], but must be a list of numbers"),
    (lambda: PYTHON.front(), "there is no profile in 'runs'"),
    (lambda: PYTHON.load_run("a\0b"), "must be a path"),
    (lambda: PYTHON.search("demo", budget=10**400), "must be text or a number"),
    (lambda: PYTHON.profile("demo", {}), "without 'input_ids': it has nothing"),
    (lambda: PYTHON.profile("demo", [[]]), "has an empty batch"),
    (lambda: PYTHON.profile("demo", np.full((1, 64), 2**63, dtype=np.uint64)), "has the token id 9223372036854775808, which no"),
    (lambda: PYTHON.profile("demo", np.ma.masked_array(np.ones((2, 64), int), np.ones((2, 64), bool))), "masked array"),
    (lambda: PYTHON.profile("demo", {"input_ids": [[1] * 64], "attention_mask": [[1]]}), "an attention mask that is none"),
    (lambda: PYTHON.memory("demo", context=1.5), "context is 1.5, but must be a whole number or text"),
    (lambda: PYTHON.memory("demo", batch="8"), "batch is '8', but must be a whole number"),
    (lambda: PYTHON.check(5), "recipe is 5, but must be a path or a recipe or what a search returned"),
    (lambda: PYTHON.export({}, "vllm"), "recipe is a dict"),
    (lambda: PYTHON.read_recipe(5), "path is 5, but must be a path"),
    (lambda: PYTHON.load_run(None), "run is None, but must be a path"),
    (lambda: PYTHON.report(5), "result is 5, but must be a path or what a search returned"),
    (lambda: PYTHON.retrieval("x", lengths=64), "lengths is 64, but must be a list of whole numbers"),
    (lambda: PYTHON.retrieval("x", text="words"), "text is a str: give the model's tokenizer"),
    (lambda: PYTHON.plots.damage("run"), "this figure is of what autoq.search returns or autoq.load_run reads, not of a str"),
    (lambda: PYTHON.plots.sensitivity(5), "not of a int"),
    (lambda: PYTHON.plots.front("run"), "what autoq.front, result.front() or a search returns, not of a str"),
    (lambda: PYTHON.plots.cache_formats(None), "not of a NoneType"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[says[:30] for _, says in WRONG])
def test_arguments_of_the_wrong_kind_are_named_everywhere(call: Callable[[], Any], says: str, here: Path) -> None:
    with pytest.raises(autoq.UserError) as error:
        call()
    assert says in str(error.value)


def test_fronts_of_what_a_search_returned(llama: PreTrainedModel, here: Path) -> None:
    result = PYTHON.search(llama, BATCHES, budget=np.float64(5), seed=np.int64(0), **QUICK)
    assert [round(p.bits) for p in PYTHON.front(result, [3, 5]).weights] == [3, 5]
    for wrong, says in (
        (["a"], "budgets is "),
        ([float("nan")], "budgets is "),
        (5, "budgets is 5"),
        ([-1], "a budget of -1 bits"),
    ):
        with pytest.raises(autoq.UserError, match=says):
            result.front(wrong)
    with pytest.raises(autoq.UserError, match="measure is 5, but must be a list of numbers"):
        result.front(measure=5)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"samples": "x"}, "samples is 'x', but must be a whole number"),
        ({"budget": True}, "budget is True, but must be text or a number"),
        ({"run": ""}, "run is empty"),
        ({"run": 5}, "run is 5, but must be a path"),
        ({"include": 5}, "include is 5, but must be text or a list of texts"),
        ({"space": None}, "space is None, but must be a path"),
        ({"engine": ["vllm"]}, "engine is ['vllm'], but must be text"),
        ({"progress": 5}, "progress is 5, but must be True or False or an object with say() and stage()"),
        ({"resume": "yes"}, "resume is 'yes', but must be True or False"),
        ({"budget": float("nan")}, "budget is nan, but must be text or a number"),
    ],
)
def test_values_of_the_wrong_kind_are_named(option: dict[str, Any], says: str) -> None:
    with pytest.raises(autoq.UserError) as error:
        PYTHON.search("demo", **{"budget": 4, **option})
    assert says in str(error.value)


def test_a_model_of_no_kind_is_named() -> None:
    with pytest.raises(autoq.UserError, match="model is 7, but must be a name, a path or a loaded transformers model"):
        PYTHON.search(7, budget=4)
