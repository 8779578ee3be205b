"""The KL kernel against float64: small and large divergences, ties, ragged vocabularies, every dtype."""

from __future__ import annotations

import pytest
import torch

from autoq.kernels import kl
from autoq.kernels.kl import token_divergence
from autoq.kernels.launch import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")


def in_float64(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = (t.double().log_softmax(-1) for t in (p, q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("columns", [128, 1 << 16], ids=["many tiles", "one tile"])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 0.3, 3.0, 30.0])
def test_kl_keeps_its_digits_at_every_size(noise: float, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kl, "tile", lambda device: columns)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(5, 1271, generator=generator) * 4 + 20
    q = p + torch.randn(5, 1271, generator=generator) * noise + 3.0
    p, q = p.to(DEVICE), q.to(DEVICE)
    target = torch.randint(1271, (5,), generator=generator).to(DEVICE)
    found, expected = token_divergence(p, q, target), in_float64(p, q)
    # float32: log-ratios of this size are summed with some 1e-7 of it lost
    torch.testing.assert_close(found.kl.double(), expected, rtol=1e-5, atol=1e-6 * noise + 1e-12)
    assert torch.equal(found.agree, p.argmax(-1) == q.argmax(-1))
    for nll, logits in ((found.nll, q), (found.nll_original, p)):
        own = -logits.double().log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(nll.double(), own, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_compared_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(3, 300, generator=generator).to(dtype).to(DEVICE)
    q = (p.float() + 0.1 * torch.randn(3, 300, generator=generator).to(DEVICE)).to(dtype)
    found = token_divergence(p, q, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(found.kl.double(), in_float64(p, q), rtol=1e-5, atol=1e-7)


def test_ties_take_the_first_and_no_tokens_give_nothing() -> None:
    p = torch.zeros(2, 77, device=DEVICE)
    q = p.clone()
    q[1, 5] = 1.0
    p[1, 5] = p[1, 3] = 2.0
    found = token_divergence(p, q, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert found.agree.tolist() == [True, False]
    assert float(found.kl[0]) == 0.0
    assert token_divergence(p[:0], q[:0], torch.zeros(0, dtype=torch.int64, device=DEVICE)).kl.shape == (0,)


def test_a_token_that_the_changed_model_rules_out_costs_what_it_costs() -> None:
    p = torch.tensor([[0.0, 0.0, -80.0, 5.0]], device=DEVICE)
    q = torch.tensor([[0.0, -90.0, 60.0, 5.0]], device=DEVICE)
    found = token_divergence(p, q, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(found.kl.double(), in_float64(p, q), rtol=1e-5, atol=0.0)
