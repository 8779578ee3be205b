"""Draw one label per position from the model's own distribution, and the gradient of their log-likelihood."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoq.model.head import Head

SPAN = 256  # vocabulary entries summed together before one of them is looked for


def label_gradient(
    head: Head, hidden: torch.Tensor, seeds: list[int], at_row: Callable[[int | None], None] = lambda row: None
) -> torch.Tensor:
    """Return d(-sum log p(label))/d(hidden) for hidden states [batch, tokens, hidden], same shape.

    Each sequence draws its labels from its own seed, so that the result does not depend on how sequences are batched;
    `at_row` is told which sequence the head is called for, and None at the end.
    """
    gradient = torch.empty_like(hidden)
    for row, seed in enumerate(seeds):
        at_row(row)
        draws = torch.rand(hidden.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for part in head.chunks(hidden.shape[1]):
            states = hidden[row, part].detach().requires_grad_()
            with torch.enable_grad():
                logits = head(states)
            logits.backward(_logit_gradient(logits.detach(), draws[part].to(hidden.device)).to(logits.dtype))
            assert states.grad is not None
            gradient[row, part] = states.grad
    at_row(None)
    return gradient


def _logit_gradient(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return softmax(logits) - onehot(label), float32 [tokens, vocabulary]; labels are the draws' quantiles.

    The exponentials are summed by spans, which gives the normaliser and the span of the label in one pass; the label is then
    looked for in its span alone.
    """
    tokens, vocab = logits.shape
    p = torch.exp(logits.to(torch.float32) - logits.amax(-1, keepdim=True).to(torch.float32))
    padded = torch.nn.functional.pad(p, (0, -vocab % SPAN)) if vocab % SPAN else p
    spans = padded.view(tokens, -1, SPAN)
    cumulative = spans.sum(-1).to(torch.float64).cumsum(-1)
    target = draws.unsqueeze(1) * cumulative[:, -1:]
    at = torch.searchsorted(cumulative, target, right=True).clamp_(max=spans.shape[1] - 1)
    below = torch.where(at > 0, cumulative.gather(1, (at - 1).clamp_(min=0)), 0.0)
    inside = spans[torch.arange(tokens, device=p.device), at.squeeze(1)].to(torch.float64).cumsum(-1)
    label = at * SPAN + torch.searchsorted(inside, target - below, right=True).clamp_(max=SPAN - 1)
    p /= cumulative[:, -1:].to(torch.float32)
    return p.scatter_add_(1, label.clamp_(max=vocab - 1), torch.full_like(p[:, :1], -1.0))
