"""KL(original || changed) of next-token distributions from logits, in one pass over the vocabulary and without log-probabilities.

With x = log-ratio of a token minus any constant, KL = E[x] + log E[e^-x] under the original distribution. Summed as
E[x] + log1p(E[e^-x - 1 + x] - E[x]), the small KL of a good recipe keeps its digits in float32, where the difference of two
log-sum-exps, each around 20, would leave five of them. Where that is not small the difference is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from autoq.kernels.elements import to_float32
from autoq.kernels.launch import tile

LARGE_KL = 0.25  # nats; from here on the difference of log-sum-exps is exact enough


@dataclass(frozen=True)
class TokenDivergence:
    """What a token's logits say, each [tokens] in float32 but `agree`, which is bool.

    Attributes:
        kl: KL(original || changed) in nats. agree: both have the same most likely token.
        nll, nll_original: negative log-likelihood of the token that follows.
    """

    kl: torch.Tensor
    agree: torch.Tensor
    nll: torch.Tensor
    nll_original: torch.Tensor


@triton.jit
def log1p(x):
    """Return log(1 + x) with the digits of a small x (Kahan: x * log(u) / (u - 1) with u the rounded 1 + x)."""
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, x * (tl.log(u) / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def kl_kernel(
    p_ptr, q_ptr, target_ptr, kl_ptr, agree_ptr, nll_q_ptr, nll_p_ptr, vocab, stride_p, stride_q, LARGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token a program; p are the original's logits, q the changed model's."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, COLUMNS)
    minus_infinity = float("-inf")
    p_max, q_max, p_sum, q_sum, mean, curve = minus_infinity, minus_infinity, 0.0, 0.0, 0.0, 0.0
    p_at, q_at = 0, 0
    shift = 0.0
    for start in range(0, vocab, COLUMNS):
        column = start + inner
        mask = column < vocab
        p = to_float32(tl.load(p_ptr + row * stride_p + column, mask=mask, other=minus_infinity))
        q = to_float32(tl.load(q_ptr + row * stride_q + column, mask=mask, other=minus_infinity))
        p_top, q_top = tl.max(p, axis=0), tl.max(q, axis=0)
        p_first = tl.min(tl.where(p == p_top, column, vocab), axis=0)
        q_first = tl.min(tl.where(q == q_top, column, vocab), axis=0)
        if start == 0:  # a constant of the right size: the log-ratio where the original is most likely
            shift = tl.sum(tl.where(column == p_first, p - q, 0.0), axis=0)
        p_at, q_at = tl.where(p_top > p_max, p_first, p_at), tl.where(q_top > q_max, q_first, q_at)
        p_new, q_new = tl.maximum(p_max, p_top), tl.maximum(q_max, q_top)
        rescale = tl.exp(p_max - p_new)
        weight = tl.where(mask, tl.exp(p - p_new), 0.0)
        x = tl.where(mask, p - tl.where(mask, q, 0.0) - shift, 0.0)
        series = x * x * (0.5 - x * (0.16666667 - x * (0.041666668 - x * (0.0083333338 - x * 0.0013888889))))
        bent = tl.where(tl.abs(x) < 0.25, weight * series, tl.where(mask, tl.exp(q + shift - p_new), 0.0) - weight + weight * x)
        p_sum = p_sum * rescale + tl.sum(weight, axis=0)
        mean = mean * rescale + tl.sum(weight * x, axis=0)
        curve = curve * rescale + tl.sum(bent, axis=0)
        q_sum = q_sum * tl.exp(q_max - q_new) + tl.sum(tl.where(mask, tl.exp(q - q_new), 0.0), axis=0)
        p_max, q_max = p_new, q_new
    p_lse, q_lse = p_max + tl.log(p_sum), q_max + tl.log(q_sum)
    first, second = mean / p_sum, curve / p_sum
    coarse = first + shift - p_lse + q_lse
    fine = first + log1p(second - first)
    tl.store(kl_ptr + row, tl.where(coarse < LARGE, fine, coarse))
    tl.store(agree_ptr + row, tl.where(p_at == q_at, 1, 0).to(tl.int8))
    target = tl.load(target_ptr + row)
    tl.store(nll_p_ptr + row, p_lse - to_float32(tl.load(p_ptr + row * stride_p + target)))
    tl.store(nll_q_ptr + row, q_lse - to_float32(tl.load(q_ptr + row * stride_q + target)))


def token_divergence(original: torch.Tensor, changed: torch.Tensor, target: torch.Tensor) -> TokenDivergence:
    """Compare logits [tokens, vocabulary] (float32, float16 or bfloat16; finite) token by token.

    Args:
        target: int64 [tokens], the token that follows each.

    Raises AutoqError where no kernel can run on this device.
    """
    tokens, vocab = original.shape
    columns = min(triton.next_power_of_2(vocab), tile(original.device))
    found = [torch.empty(tokens, dtype=torch.float32, device=original.device) for _ in range(3)]
    agree = torch.empty(tokens, dtype=torch.int8, device=original.device)
    original, changed = (t if t.stride(1) == 1 else t.contiguous() for t in (original, changed))
    if tokens:
        kl_kernel[(tokens,)](
            original, changed, target, found[0], agree, found[1], found[2], vocab, original.stride(0), changed.stride(0),
            LARGE=LARGE_KL, COLUMNS=columns, enable_fp_fusion=False,
        )  # fmt: skip
    return TokenDivergence(found[0], agree.bool(), found[1], found[2])
