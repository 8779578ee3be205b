"""What is known of caches, on a real model: SmolLM2-135M from the GGUF that a package carries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from autoq.allocation.problem import Option, make_problem
from autoq.allocation.solver import solve
from autoq.budget import Budgets, parse_budget
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import kv_format
from autoq.measure.damage import Candidates, DamageScorer
from autoq.measure.divergence import Yardstick
from autoq.model.load import load_model, load_tokenizer, model_source
from autoq.model.quantized import Assignment
from autoq.model.text import sequences, text_sources
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units
from tests.conftest import gguf_file

TOKENS = 256
FORMATS = ("int4_token", "int4_channel", "nvfp4", "nvfp4_affine", "nvfp4_rotate", "fp8_cast", "int2_channel", "int2_token")


class Real:
    """The model, the damage of its caches on two sequences, and measurements on two others."""

    def __init__(self) -> None:
        source = model_source(str(gguf_file()))
        tokenizer = load_tokenizer(source)
        self.model: PreTrainedModel = load_model(source, "cpu", "float32")
        self.units: ModelUnits = find_units(self.model)
        calib, measure = text_sources(None, None)
        ids = sequences(tokenizer, calib, 2, TOKENS)
        self.yardstick = Yardstick(self.model, self.units, sequences(tokenizer, measure, 2, TOKENS))
        formats = tuple(kv_format(n) for n in FORMATS)
        self.candidates = Candidates((), formats, formats)
        scorer = DamageScorer(self.model, self.units, self.candidates)
        scores = scorer.score(ids, [1, 2])
        self.damage = {
            u.name: dict(zip(FORMATS, (scores[u.name].square().mean(1) / (2 * TOKENS)).tolist(), strict=True))
            for u in self.units.caches
        }
        self.calibration: dict[str, Calibration] = {n: s.statistics.calibration() for n, s in scorer.caches.items()}
        self.kept: dict[tuple[str, str], float] = {}

    def measure(self, key: str, value: str) -> float:
        """KL of one format for all keys and one for all values."""
        if (key, value) not in self.kept:
            caches = {u.name: kv_format(key if u.kind == "key" else value) for u in self.units.caches}
            self.kept[key, value] = self.yardstick.measure(Assignment({}, caches, self.calibration)).mean_kl
        return self.kept[key, value]

    def solve(self, budget: str, allowed: Callable[[str], bool]) -> dict[str, Option]:
        damage = {u: {f: d for f, d in row.items() if allowed(f)} for u, row in self.damage.items()}
        return solve(make_problem(self.units, self.candidates, Budgets(kv=parse_budget(budget), context=1024), damage))


@pytest.fixture(scope="module")
def real() -> Real:
    return Real()


def test_keys_cost_more_than_values(real: Real) -> None:
    for name in ("nvfp4", "int4_token"):
        assert real.measure(name, "bf16") > 3 * real.measure("bf16", name)


def test_keys_want_channels_and_values_want_tokens_and_the_search_finds_both(real: Real) -> None:
    assert real.measure("int4_channel", "bf16") < 0.7 * real.measure("int4_token", "bf16")
    assert real.measure("bf16", "int4_token") < real.measure("bf16", "int4_channel")
    choice = real.solve("4.5bits", lambda f: f in ("int4_token", "int4_channel"))
    by_channel = {
        kind: sum(choice[u.name].format == "int4_channel" for u in real.units.caches if u.kind == kind) for kind in ("key", "value")
    }
    layers = len(real.units.caches) // 2
    assert by_channel["key"] > 0.6 * layers
    assert by_channel["value"] < 0.4 * layers


def test_a_residual_of_128_tokens_helps_two_bits(real: Real) -> None:
    assert real.measure("int2_channel+residual128", "int2_token+residual128") < 0.7 * real.measure("int2_channel", "int2_token")


def test_rotation_and_means_are_taken_where_they_win(real: Real) -> None:
    variants = ("nvfp4", "nvfp4_affine", "nvfp4_rotate")
    choice = real.solve("4.51bits", lambda f: f in variants)
    for unit in real.units.caches:
        row = {f: real.damage[unit.name][f] for f in variants}
        assert (
            choice[unit.name].format == min(row, key=lambda f: (row[f], f))
            or choice[unit.name].damage <= min(row.values()) * 1.0001
        )
    taken = [choice[u.name].format for u in real.units.caches]
    assert {"nvfp4_affine", "nvfp4_rotate"} & set(taken)
    caches = {u: kv_format(o.format) for u, o in choice.items()}
    with torch.no_grad():
        mixed = real.yardstick.measure(Assignment({}, caches, real.calibration)).mean_kl
    assert mixed < 0.9 * real.measure("nvfp4", "nvfp4")


def test_mixed_keys_and_values_beat_uniform_nvfp4_at_its_own_bits(real: Real) -> None:
    choice = real.solve("4.5bits", lambda f: True)
    caches = {u: kv_format(o.format) for u, o in choice.items()}
    assert real.yardstick.measure(Assignment({}, caches, real.calibration)).mean_kl <= 0.5 * real.measure("nvfp4", "nvfp4")
