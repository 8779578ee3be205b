"""Which keys and values a query reads quantized, and attention when some are and some are not.

In a cache the newest tokens, or the newest incomplete group of a channel format, are still in 16 bit. Which tokens those are
depends on the query's position, so one forward pass over a text needs both versions of K and V and a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoq.formats.format import KVFormat


def version_pairs(fmt: KVFormat, queries: int, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Return, for every format of the chain, bool [queries, tokens]: True where that query reads that token in this format.

    The queries are the last of the tokens. A query at position t sees t + 1 tokens: of these the first `sink`, the newest
    `residual` and, for a channel format, the newest incomplete group (groups start after the sink) are in 16 bit.
    """
    token = torch.arange(tokens, device=device).unsqueeze(0)
    if fmt.is_original:
        return [torch.zeros(queries, tokens, dtype=torch.bool, device=device)]
    counts = torch.tensor([fmt.packed_tokens(t + 1) for t in range(tokens - queries, tokens)], device=device)  # [queries, formats]
    ends = fmt.sink + counts.flip(1).cumsum(1).flip(1)  # the oldest format comes first in the text
    starts = ends - counts
    return [(token >= starts[:, i : i + 1]) & (token < ends[:, i : i + 1]) for i in range(counts.shape[1])]


def quantized_pairs(fmt: KVFormat, queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return bool [queries, tokens]: True where that query reads that token in a quantized form."""
    return torch.stack(version_pairs(fmt, queries, tokens, device)).any(0)


Versions = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (K or V [batch, KV heads, tokens, head_dim], bool [queries, tokens])


def attend_mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_versions: Versions,
    value_versions: Versions,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention output [batch, tokens, heads, head_dim] where each query reads each token in its own version.

    Args:
        query: [batch, heads, queries, head_dim]; key, value: what is read where no version is.
        key_versions, value_versions: other versions of K and V, and which query reads which token in them.
        mask: None (causal), bool (True = attend) or additive, broadcastable to [batch, heads, queries, tokens].
        softcap: logit cap (Gemma 2). sinks: [heads] learned logits that take part in the softmax alone (gpt-oss).
    """
    heads, queries, tokens = query.shape[1], query.shape[2], key.shape[2]
    groups = heads // key.shape[1]

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(groups, dim=1) if groups > 1 else t

    scores = query @ spread(key).transpose(2, 3)
    for version, pairs in key_versions:
        scores = torch.where(pairs, query @ spread(version).transpose(2, 3), scores)
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
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :tokens].to(value.dtype)  # a row of padding may see nothing
    left, output = torch.ones(queries, tokens, dtype=torch.bool, device=query.device), None
    for version, pairs in value_versions:
        part = (weights * pairs) @ spread(version)
        output, left = part if output is None else output + part, left & ~pairs
    rest = (weights * left) @ spread(value)
    return (rest if output is None else output + rest).transpose(1, 2)
