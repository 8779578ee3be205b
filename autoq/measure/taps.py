"""Identity steps in the graph that hand a tensor and its gradient to a listener during the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OnGradient = Callable[[torch.Tensor, torch.Tensor], None]


class Tap(torch.autograd.Function):
    """y -> y; backward calls `listener(x, dL/dy)` with the tensor x that was saved beside y, then passes dL/dy on.

    x goes through autograd's saved tensors, so that activation checkpointing recomputes it instead of holding it.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, x: torch.Tensor, listener: OnGradient) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.listener = listener
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.listener(x, gradients[0])
        return gradients[0], None, None


class AttentionTap(torch.autograd.Function):
    """output -> output; backward calls `listener(query, key, value, output, dL/doutput)`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        listener: Callable[..., None],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, output)
        ctx.listener = listener
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ctx.listener(*ctx.saved_tensors, gradients[0])
        return gradients[0], None, None, None, None


def tap(y: torch.Tensor, x: torch.Tensor, listener: OnGradient) -> torch.Tensor:
    """Return y with a Tap on it."""
    return Tap.apply(y, x.detach(), listener)  # type: ignore[no-any-return,no-untyped-call]


def attention_tap(
    output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, listener: Callable[..., None]
) -> torch.Tensor:
    """Return output with an AttentionTap on it."""
    arguments = (query.detach(), key.detach(), value.detach(), listener)
    return AttentionTap.apply(output, *arguments)  # type: ignore[no-any-return,no-untyped-call]
