"""Which keys and values a query reads quantized, and attention when some are and some are not.

In a cache the newest tokens, or the newest incomplete group of a channel format, are still in 16 bit. Which tokens those are
depends on the query's position, so one forward pass over a text needs both versions of K and V and a mask.
"""

from __future__ import annotations

import torch

from autoq.formats.format import KVFormat


def quantized_pairs(fmt: KVFormat, queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return bool [queries, tokens]: True where that query reads that token in its quantized form.

    The queries are the last of the tokens. A query at position t sees t + 1 tokens: of these the first `sink`, the newest
    `residual` and, for a channel format, the newest incomplete group (groups start at the first token) are in 16 bit.
    """
    position = torch.arange(tokens - queries, tokens, device=device).unsqueeze(1)
    token = torch.arange(tokens, device=device).unsqueeze(0)
    if fmt.is_original:
        return torch.zeros(queries, tokens, dtype=torch.bool, device=device)
    packed = position + 1 - fmt.residual
    if fmt.axis == "channel" and fmt.values.block:
        packed = packed - packed % fmt.values.block
    return (token >= fmt.sink) & (token < packed)


def attend_mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    quantized_key: torch.Tensor,
    quantized_value: torch.Tensor,
    key_pairs: torch.Tensor,
    value_pairs: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention output [batch, tokens, heads, head_dim] where each query reads each token in its own version.

    Args:
        query: [batch, heads, queries, head_dim]; key, value and their quantized versions [batch, KV heads, tokens, head_dim].
        key_pairs, value_pairs: bool [queries, tokens], from `quantized_pairs`.
        mask: None (causal), bool (True = attend) or additive, broadcastable to [batch, heads, queries, tokens].
        softcap: logit cap (Gemma 2). sinks: [heads] learned logits that take part in the softmax alone (gpt-oss).
    """
    heads, queries, tokens = query.shape[1], query.shape[2], key.shape[2]
    groups = heads // key.shape[1]

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(groups, dim=1) if groups > 1 else t

    raw, rounded = query @ spread(key).transpose(2, 3), query @ spread(quantized_key).transpose(2, 3)
    scores = torch.where(key_pairs, rounded, raw)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    mask = mask[..., :tokens]
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        extra = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, queries, 1).to(scores.dtype)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :tokens].to(value.dtype)
    output = (weights * value_pairs) @ spread(quantized_value) + (weights * ~value_pairs) @ spread(value)
    return output.transpose(1, 2)
