"""Inner products of the gradients of K (or V) with what each KV format would change, per token and KV head.

Rounding errors of different tokens and heads do not know of each other, so that the square of their summed inner products is
in expectation the sum of the squares, and that has far less spread than the square of the sum, which is a single draw
(chi-square with one degree of freedom). docs/log.md compares both.

For a format that keeps recent tokens in 16 bit only the pairs of a query and a token that it reads quantized count: the
gradient over the other pairs is taken off first (`pair_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autoq.codec import cache_versions
from autoq.formats.calibration import Calibration
from autoq.formats.format import KVFormat
from autoq.formats.reference import fit_blocks, rounding_error
from autoq.formats.rotation import rotate
from autoq.measure.cache_statistics import CacheStatistics
from autoq.model.kv_visibility import attend_mixed, version_pairs

AT_ONCE = 1 << 19  # values scored in one go: what stays in the processor's cache
Pattern = tuple[int, ...]
Part = tuple[Pattern, int]  # of the pairs of a query and a token: those read in 16 bit (0), or in the older format number 1, 2 ...


def pattern(fmt: KVFormat) -> Pattern:
    """What the visibility of a format depends on."""
    return fmt.sink, fmt.residual, *(n for one in fmt.chain for n in (one.unit, one.tier))


def parts_of(formats: Iterable[KVFormat]) -> dict[Part, KVFormat]:
    """Return the parts of the pairs whose gradients are needed apart, each with a format that has it."""
    found: dict[Part, KVFormat] = {}
    for fmt in formats:
        if not fmt.is_causal:
            found |= {(pattern(fmt), i): fmt for i in range(len(fmt.chain))}
    return found


class KVScorer:
    """Scores the K (or V) cache of one layer; keeps statistics of the values, which calibrate static scales and means.

    Attributes:
        statistics: of the batches scored so far.
        squared_error: float64 [formats]; squared_norm: sums over those batches.
    """

    def __init__(self, formats: Sequence[KVFormat], head_dim: int) -> None:
        self.formats = tuple(f.for_head_dim(head_dim) for f in formats)
        self.statistics = CacheStatistics()
        self.squared_error = torch.zeros(len(self.formats), dtype=torch.float64)
        self.squared_norm = 0.0

    def resume(self, statistics: CacheStatistics, squared_norm: float, relative_error: Mapping[str, float]) -> None:
        """Go on from the sums of the batches scored before."""
        self.statistics, self.squared_norm = statistics, squared_norm
        self.squared_error = torch.tensor(
            [relative_error.get(f.name, 0.0) * squared_norm for f in self.formats], dtype=torch.float64
        )

    def score(self, x: torch.Tensor, gradient: torch.Tensor, apart: dict[Part, torch.Tensor]) -> torch.Tensor:
        """Return the summed squares, [formats, batch], from K or V and its gradient.

        Both are [batch, KV heads, tokens, head_dim].

        `apart` holds, for each visibility pattern that is not causal, the gradient over the pairs read in 16 bit or in an older format.
        """
        x = x.to(torch.float32)
        self.statistics = self.statistics.with_values(x)
        calibration = self.statistics.calibration()
        self.squared_norm += float(torch.dot(x.flatten(), x.flatten()))
        step = max(1, AT_ONCE // x[0].numel())
        parts = [slice(i, i + step) for i in range(0, len(x), step)]
        return torch.cat(
            [self._score(x[p], gradient[p], {key: g[p] for key, g in apart.items()}, calibration) for p in parts], dim=1
        )

    def _score(
        self, x: torch.Tensor, gradient: torch.Tensor, apart: dict[Part, torch.Tensor], calibration: Calibration
    ) -> torch.Tensor:
        heads = x.shape[1]
        layouts: dict[tuple[Part, bool, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        scores = []
        for i, fmt in enumerate(self.formats):
            visible = (pattern(fmt), 0)
            if fmt.older is not None:
                error, square = _score_tiers(fmt, x, gradient, apart, calibration)
                self.squared_error[i] += error
                scores.append(square)
                continue
            key = (visible, fmt.center, fmt.rotate)
            if key not in layouts:
                seen = (gradient - apart[visible] if visible in apart else gradient).to(torch.float32)
                given = x - calibration.mean_like(x) if fmt.center else x
                if fmt.rotate:  # inner products are the same between rotated tensors
                    given, seen = rotate(given), rotate(seen)
                values = _lay_out(given, fmt)
                layouts[key] = (values, -values, _lay_out(seen, fmt))
            values, negated, g = layouts[key]
            delta = kv_rounding_error(fmt, values, negated, calibration, heads)
            self.squared_error[i] += float(torch.dot(delta.flatten(), delta.flatten()))
            products = delta * g
            by_token = products.sum(1) if fmt.axis == "token" else products.unflatten(2, (heads, -1)).sum(3).flatten(1)
            scores.append(torch.linalg.vecdot(by_token, by_token))
        return torch.stack(scores) if scores else x.new_zeros(0, x.shape[0])


def kv_rounding_error(
    fmt: KVFormat, values: torch.Tensor, negated: torch.Tensor, calibration: Calibration, heads: int
) -> torch.Tensor:
    """Return Q(x) - x for values [batch, along the blocks, others], in the same layout, centred or rotated already."""
    length, others = values.shape[1:]
    block = fmt.values.block or length
    padding = -length % block
    if padding:
        values, negated = (torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in (values, negated))
    blocks, minus = (t.view(t.shape[0], -1, block, others) for t in (values, negated))
    static = calibration.static(fmt, values)
    if fmt.refresh:
        by_token = calibration.by_token(fmt, values.abs().amax(1).unflatten(1, (heads, -1)).amax(1))
        static = by_token.repeat(1, heads).unsqueeze(1)  # [batch, 1, heads * tokens]
    scales = fit_blocks(fmt.values, blocks, 2, static)
    return rounding_error(fmt.values, blocks, minus, scales, 2).flatten(1, 2)[:, :length]


def _lay_out(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] -> contiguous [batch, along the blocks, others]; whole groups of tokens only."""
    if fmt.axis == "token":
        return x.permute(0, 3, 1, 2).flatten(2).contiguous()
    whole = x.shape[2] - x.shape[2] % (fmt.values.block or 1)
    return x[:, :, :whole].permute(0, 2, 1, 3).flatten(2).contiguous()


def _score_tiers(
    fmt: KVFormat, x: torch.Tensor, gradient: torch.Tensor, apart: dict[Part, torch.Tensor], calibration: Calibration
) -> tuple[float, torch.Tensor]:
    """Return (squared error of the oldest form, summed squares [batch]) of a format whose tokens go over to others as they age."""
    own = gradient.to(torch.float32)
    for i in range(len(fmt.chain)):
        own = own - apart[pattern(fmt), i]
    products, delta = torch.zeros_like(x), x
    for i, version in enumerate(cache_versions(x, fmt, calibration)):
        delta = version - x
        products += delta * (own if i == 0 else apart[pattern(fmt), i])
    by_token = products.sum(3).flatten(1)
    return float(delta.square().sum()), torch.linalg.vecdot(by_token, by_token)


def pair_gradients(
    fmt: KVFormat,
    part: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    d_output: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dL/dK and dL/dV over one part of the pairs: those which this format reads in 16 bit (0), or in its older format 1, 2 ...

    Args:
        query [batch, heads, tokens, head_dim]; key, value [batch, KV heads, tokens, head_dim]; output and its gradient
        d_output [batch, tokens, heads, head_dim]; mask and options as the attention function got them.
    """
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    plain = mask is None and options.get("softcap") is None and options.get("s_aux") is None
    if plain and fmt.axis == "channel" and fmt.residual == 0 and fmt.sink == 0 and fmt.values.block and fmt.older is None:
        return _group_gradients(fmt.values.block, query, key, value, output, d_output, scaling)
    with torch.enable_grad():
        live_key, live_value = key.detach().requires_grad_(), value.detach().requires_grad_()
        versions = version_pairs(fmt, query.shape[2], key.shape[2], key.device)
        pairs = versions[part] if part else ~torch.stack(versions).any(0)
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        out = attend_mixed(query, key, value, [(live_key, pairs)], [(live_value, pairs)], mask, scaling, softcap, sinks)
        grads = torch.autograd.grad(out, (live_key, live_value), d_output)
    return grads[0], grads[1]


def _group_gradients(
    group: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    d_output: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for plain causal attention and groups of tokens: the pairs are blocks on the diagonal.

    dV = P^T dO and dK = (P * (dO V^T - rowsum(dO * O)))^T Q * scaling, as in FlashAttention-2 (Dao 2023, algorithm 2).
    """
    batch, _, tokens, dim = query.shape
    folded = (query * scaling).view(batch, key.shape[1], -1, tokens, dim)
    d_folded = d_output.transpose(1, 2).reshape(folded.shape)
    slope = (d_folded * output.transpose(1, 2).reshape(folded.shape)).sum(-1, keepdim=True)
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    future = torch.ones(group, group, dtype=torch.bool, device=query.device).triu(1)
    for start in range(0, tokens - group + 1, group):
        own, seen = slice(start, start + group), slice(0, start + group)
        q, d_out, v = folded[..., own, :], d_folded[..., own, :], value[:, :, own]
        scores = (q.flatten(2, 3) @ key[:, :, seen].transpose(2, 3)).unflatten(2, (-1, group))
        scores[..., own].masked_fill_(future, float("-inf"))
        weights = torch.exp(scores[..., own] - scores.logsumexp(-1, keepdim=True))
        weights[..., -1, :] = 0.0  # the query that completes a group reads it quantized
        d_weights = (d_out.flatten(2, 3) @ v.transpose(2, 3)).unflatten(2, (-1, group))
        d_scores = weights * (d_weights - slope[..., own, :])
        d_key[:, :, own] = d_scores.flatten(2, 3).transpose(2, 3) @ q.flatten(2, 3)
        d_value[:, :, own] = weights.flatten(2, 3).transpose(2, 3) @ d_out.flatten(2, 3)
    return d_key, d_value
