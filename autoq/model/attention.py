"""Step between a model's layers and the keys and values they attend to.

Every transformers attention layer calls its attention function through a public registry. Inside `intercepted` that call
goes to a handler first, which sees queries, keys and values as attention reads them (after rotary embedding) and passes
them on. No library is patched, and the model's own setting is back afterwards.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from autoq.errors import AutoqError

PREFIX = "autoq_"
AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class AttentionHandler(Protocol):
    """Called in place of a layer's attention function; `attend` is that function.

    query is [batch, heads, tokens, head_dim], key and value are [batch, KV heads, tokens, head_dim].
    """

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attend: AttentionFunction,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


_handlers: weakref.WeakKeyDictionary[torch.nn.Module, AttentionHandler] = weakref.WeakKeyDictionary()


@contextmanager
def intercepted(model: PreTrainedModel, handler: AttentionHandler) -> Iterator[None]:
    """Send every attention call of the model to `handler` for the duration of the block.

    Raises AutoqError if the model does not call attention through transformers' registry.
    """
    previous = model.config._attn_implementation
    if previous.startswith(PREFIX):
        raise AutoqError("the attention of this model is intercepted already: leave one `with` block before entering another")
    name = PREFIX + previous
    AttentionInterface.register(name, _make_dispatcher(previous))
    if previous in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    layers = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise AutoqError(f"{type(model).__name__} does not call attention through transformers' AttentionInterface")
        for layer in layers:
            _handlers[layer] = handler
        yield
    finally:
        for layer in layers:
            _handlers.pop(layer, None)
        model.set_attn_implementation(previous)


def _make_dispatcher(previous: str) -> AttentionFunction:
    def dispatch(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend: AttentionFunction = eager if previous == "eager" else AttentionInterface().get_interface(previous, eager)
        handler = _handlers.get(module)
        if handler is None:
            return attend(module, query, key, value, attention_mask, **options)
        return handler(module, query, key, value, attention_mask, attend, **options)

    return dispatch
