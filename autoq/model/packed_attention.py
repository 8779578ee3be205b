"""Attention of newly decoded tokens straight from packed bytes, in any transformers model.

A packed cache answers a model's `update` with keys and values that are not decoded yet. Inside `packed_attention(model)` the
attention kernel reads their bytes; whatever else a model does with them decodes them first, so they work everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from autoq.errors import AutoqError
from autoq.model.attention import AttentionFunction, intercepted

if TYPE_CHECKING:
    from autoq.model.packed_tokens import PackedTokens

# What is known of undecoded tokens without decoding them.
_PROPERTIES: tuple[Any, ...] = (
    torch.Tensor.shape,
    torch.Tensor.dtype,
    torch.Tensor.device,
    torch.Tensor.is_cuda,
    torch.Tensor.requires_grad,
)
_KNOWN = {torch.Tensor.size, torch.Tensor.dim, *(p.__get__ for p in _PROPERTIES)}


class Undecoded(torch.Tensor):
    """The newest `tokens` tokens of a packed cache, [batch, KV heads, tokens, head_dim]; any operation decodes them first."""

    side: PackedTokens
    held: int

    @staticmethod
    def __new__(cls, side: PackedTokens, tokens: int) -> Undecoded:
        batch, heads, held, head_dim = side.shape
        like = side.recent.used
        self: Undecoded = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, tokens, head_dim), dtype=like.dtype, device=like.device
        )
        self.side, self.held = side, held
        return self

    def decoded(self) -> torch.Tensor:
        """Return the values; raises AutoqError if the cache has gone on since."""
        if self.side.tokens != self.held:
            raise AutoqError(
                f"the packed cache held {self.held} tokens when these were taken from it, and holds {self.side.tokens} now"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.side.read()[:, :, -self.shape[2] :]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Undecoded, Undecoded.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Undecoded, Undecoded.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a token that is decoded with a packed cache attends to the bytes; nothing is expanded in memory.

    Raises AutoqError if the model does not call attention through transformers' registry.
    """
    with intercepted(model, _attend):
        yield


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    attend: AttentionFunction, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    if not isinstance(key, Undecoded) or not isinstance(value, Undecoded):
        return attend(module, query, key, value, mask, **options)
    is_plain = options.get("s_aux") is None and options.get("position_bias") is None
    is_plain = is_plain and query.shape[3] == key.shape[3] == value.shape[3]
    if query.shape[2] != 1 or not is_plain or (mask is not None and (mask.dim() != 4 or mask.shape[1] != 1)):
        return attend(module, query, key.decoded(), value.decoded(), mask, **options)
    from autoq.kernels.attention import attention

    visible, seen = key.shape[2], None
    if mask is not None:
        seen = mask[:, 0, 0, :visible]
        seen = (seen if seen.dtype == torch.bool else seen == 0).expand(query.shape[0], -1)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    output = attention(
        query, key.side.cached(), value.side.cached(), scaling, mask=seen, window=visible, softcap=options.get("softcap")
    )  # fmt: skip
    return output.transpose(1, 2), None
