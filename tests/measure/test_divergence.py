"""Streamed KL, perplexity and agreement against the direct formulas."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Gemma2Config, PreTrainedModel

from autoq.formats.catalog import weight_format
from autoq.measure import divergence
from autoq.measure.divergence import Yardstick
from autoq.model import head as heads
from autoq.model.quantized import Assignment, quantized
from autoq.model.units import find_units
from tests.conftest import SMALL, build, llama_config


@pytest.mark.parametrize("tokens_at_a_time", [1, 7, 1000])
def test_streamed_equals_direct(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tokens_at_a_time: int
) -> None:
    monkeypatch.setattr(heads, "LOGITS_BYTES", 4 * 128 * tokens_at_a_time)
    units = find_units(llama)
    assignment = Assignment({u.name: weight_format("mxfp4") for u in units.weights})
    found = Yardstick(llama, units, ids, batch=2).measure(assignment)
    with torch.no_grad():
        p = llama(ids).logits.double().log_softmax(-1)
        with quantized(llama, units, assignment):
            q = llama(ids).logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(torch.from_numpy(found.kl), kl, rtol=1e-3, atol=1e-6)
    assert found.stderr == pytest.approx(float(kl.mean(1).std() / math.sqrt(3)), rel=1e-3)
    assert found.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    for mine, logs in ((found.perplexity, q), (found.perplexity_original, p)):
        nll = -logs[:, :-1].gather(2, ids[:, 1:, None]).mean()
        assert mine == pytest.approx(math.exp(float(nll)), rel=1e-4)
    assert found.percentiles()["max"] == pytest.approx(float(kl.max()), rel=1e-3)


def test_the_kernel_takes_over_where_kernels_run(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = find_units(llama)
    assignment = Assignment({u.name: weight_format("mxfp4") for u in units.weights})
    expected = Yardstick(llama, units, ids).measure(assignment)
    monkeypatch.setattr(divergence, "has_kernels", lambda device: True)
    found = Yardstick(llama, units, ids).measure(assignment)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3, abs=1e-6)
    assert (found.agree == expected.agree).all()
    assert found.nll == pytest.approx(expected.nll, rel=1e-5)
    assert found.nll_original == pytest.approx(expected.nll_original, rel=1e-5)


def test_an_unchanged_model_diverges_by_nothing(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    yardstick = Yardstick(llama, find_units(llama), ids)
    assert abs(yardstick.measure(Assignment()).mean_kl) < 1e-9
    assert 0 <= yardstick.noise_floor() < 1e-6
    assert abs(yardstick.measure(Assignment()).mean_kl) < 1e-9  # the noise floor put its nudge back


def test_the_original_is_measured_with_its_own_head(ids: torch.Tensor) -> None:
    model = build(llama_config(tie_word_embeddings=False))
    units = find_units(model, ("lm_head",))
    head = next(u for u in units.weights if u.role == "head")
    assignment = Assignment({head.name: weight_format("int4_g64")})
    found = Yardstick(model, units, ids).measure(assignment)
    with torch.no_grad():
        p = model(ids).logits.double().log_softmax(-1)
        with quantized(model, units, assignment):
            q = model(ids).logits.double().log_softmax(-1)
    assert found.mean_kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_logit_caps_are_known(ids: torch.Tensor) -> None:
    model = build(Gemma2Config(num_key_value_heads=2, head_dim=16, final_logit_softcapping=5.0, **SMALL))
    with torch.no_grad():
        mine = heads.Head(model)(heads.hidden_states(model, ids))
        torch.testing.assert_close(mine, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_differences_are_paired_by_window(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    units = find_units(llama)
    yardstick = Yardstick(llama, units, ids)
    a, b = (yardstick.measure(Assignment({u.name: weight_format(f) for u in units.weights})) for f in ("mxfp4", "int4_g32_asym"))
    difference, error = a.minus(b)
    assert difference == pytest.approx(a.mean_kl - b.mean_kl)
    assert error < math.hypot(a.stderr, b.stderr) * 1.5
