"""A KV cache that holds packed bytes: a drop-in `Cache` for any transformers model, K and V apart in every layer.

Tokens arrive in 16 bit; what a format keeps in 16 bit (the first `sink` tokens, the newest `residual` ones, the newest
incomplete group of a channel format) stays so, the rest is packed once and for all. Attention reads what decodes from the bytes,
its own newest token included, so that decoding token by token gives exactly what `quantized` computes in one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from autoq.errors import UserError
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, IntElement, KVFormat
from autoq.model.packed_attention import Undecoded
from autoq.model.packed_tokens import Backend, PackedTokens

if TYPE_CHECKING:
    from autoq.recipe import Recipe

ORIGINAL = KVFormat("bf16", Format("bf16", None))


class PackedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the cache; grows with the text."""

    def __init__(self, key: PackedTokens, value: PackedTokens) -> None:
        super().__init__()
        self.key, self.value = key, value

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:  # noqa: ARG002
        """Note the device; the bytes are held in `key` and `value`."""
        self.device, self.is_initialized = key_states.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens [batch, KV heads, tokens, head_dim]; return all of them as attention reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key.append(key_states)
        self.value.append(value_states)
        return self._read(self.key.tokens, key_states.shape[2])

    def _read(self, visible: int, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest `visible` tokens, `new` of them just added; one that is decoded alone may attend to the bytes."""
        if self._is_lazy(new):
            return Undecoded(self.key, visible), Undecoded(self.value, visible)
        return self.key.read()[:, :, -visible:], self.value.read()[:, :, -visible:]

    def _is_lazy(self, new: int) -> bool:
        return (
            new == 1 and self.key.attends and self.value.attends and not (self.key.fmt.is_original and self.value.fmt.is_original)
        )

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self.key.tokens

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; a positive number is the length to keep."""
        remove = -tokens_to_remove if tokens_to_remove < 0 else max(0, self.get_seq_length() - tokens_to_remove)
        if self.is_initialized and remove and tokens_to_remove:
            self.key.drop_last(remove)
            self.value.drop_last(remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows of the batch in this order."""
        if self.is_initialized:
            self.key.select(beam_idx)
            self.value.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.key.shape[0]).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.key.clear()
        self.value.clear()
        self.is_initialized = False


class PackedSlidingLayer(PackedLayer):
    """A layer that reads only the newest `sliding_window` tokens, and holds no others (but whole groups)."""

    is_sliding = True
    is_croppable = False

    def __init__(self, key: PackedTokens, value: PackedTokens, sliding_window: int) -> None:
        super().__init__(key, value)
        self.sliding_window = sliding_window
        self.cumulative_length = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return those that the mask of `get_mask_sizes` is about."""
        visible = min(self.cumulative_length, self.sliding_window - 1) + key_states.shape[2]
        self.cumulative_length += key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._forget()
        self.key.append(key_states)
        self.value.append(value_states)
        found = self._read(visible, key_states.shape[2])
        if not self._is_lazy(key_states.shape[2]):
            self._forget()
        return found

    def _forget(self) -> None:
        for side in (self.key, self.value):
            side.keep_last(self.sliding_window - 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens read, position of the first) for so many queries to come."""
        held = min(self.cumulative_length, self.sliding_window - 1)
        return held + query_length, max(0, self.cumulative_length - self.sliding_window + 1)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what left the window cannot come back."""
        if tokens_to_remove:
            raise RuntimeError("a sliding-window layer of a packed cache cannot be cropped: tokens that left the window are gone")

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.cumulative_length = 0


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """A `past_key_values` whose layers hold packed bytes: `model.generate(..., past_key_values=cache)`.

    Batches, left padding, beam search and cropping work as with transformers' own DynamicCache; so do sliding-window layers, cropping
    apart.
    """

    @classmethod
    def from_formats(
        cls, key_value: dict[int, tuple[KVFormat, KVFormat]], calibration: dict[int, tuple[Calibration, Calibration]], config: PreTrainedConfig,
        backend: Backend | None = None, max_tokens: int = 0,
    ) -> QuantizedKVCache:  # fmt: skip
        """Return an empty cache for a model of this config.

        Args:
            key_value: layer index -> formats of K and V; other layers stay in 16 bit. calibration: of both.
            backend: what encodes and decodes; by default the kernels on a GPU, the reference elsewhere.
            max_tokens: length to take memory for at the first token; the cache still grows beyond it.

        Raises UserError for zero points of odd width, for tiers or refreshed scales behind a window, and for a static scale without calibration.
        """
        layers: list[Any] = list(DynamicCache(config=config).layers)
        count = config.get_text_config(decoder=True).num_hidden_layers
        layers += [DynamicLayer() for _ in range(count - len(layers))]
        for index, layer in enumerate(layers):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                continue  # the state of a linear-attention layer
            formats = key_value.get(index, (ORIGINAL, ORIGINAL))
            for fmt in formats:
                for one in fmt.chain:
                    element = one.values.element
                    if isinstance(element, IntElement) and element.asymmetric and 8 % element.bits:
                        raise UserError(f"{fmt.name}: a cache holds zero points of 2, 4 or 8 bits, not {element.bits}")
                if index in key_value and fmt.calibration == "absmax" and index not in calibration:
                    raise UserError(f"{fmt.name}: layer {index} has no calibration, from which its static scale comes")
            sliding = isinstance(layer, DynamicSlidingWindowLayer)
            if sliding and any(f.older is not None or f.refresh for f in formats):
                raise UserError(
                    f"layer {index} has a sliding window, which forgets tokens before they age: no tiers or refresh there"
                )
            reserve = min(max_tokens, 2 * layer.sliding_window) if sliding else max_tokens
            known = calibration.get(index, (Calibration(), Calibration()))
            key, value = (PackedTokens(f, a, backend, reserve) for f, a in zip(formats, known, strict=True))
            layers[index] = PackedSlidingLayer(key, value, layer.sliding_window) if sliding else PackedLayer(key, value)
        return cls(layers=layers)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, backend: Backend | None = None, max_tokens: int = 0
    ) -> QuantizedKVCache:
        """Return an empty cache with the recipe's formats for a model of this config; see `from_formats`."""
        formats, calibration = recipe.cache_formats(), recipe.calibration()

        def both(found: dict[str, Any], module: str) -> Any:
            return found[f"{module}.key"], found[f"{module}.value"]

        return cls.from_formats(
            {e.layer: both(formats, e.module) for e in recipe.kv},
            {e.layer: both(calibration, e.module) for e in recipe.kv},
            config,
            backend,
            max_tokens,
        )

    def steps(self, tokens: int, largest: int) -> list[int]:
        """Return sizes of prefill steps, at most `largest` tokens, that give exactly what decoding token by token gives.

        Attention reads the cache as it is after a step's last token. Where a format packs a group, or lets a token out of its residual,
        a step may therefore end before the token that brings that about, but not go over it.
        """
        formats = {side.fmt for layer in self.packed_layers for side in (layer.key, layer.value)}
        moving = [f for f in formats if not f.is_original and (f.unit > 1 or f.residual or f.older)]

        def starts_step(token: int) -> bool:
            """True if packing, or going over to an older format, is done differently with this token than without it."""
            return any(_moves(f, token) for f in moving)

        sizes: list[int] = []
        for token in range(tokens):
            if not sizes or sizes[-1] == largest or starts_step(token):
                sizes.append(0)
            sizes[-1] += 1
        return sizes

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The attention layers."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that all packed layers hold."""
        return sum(layer.nbytes for layer in self.packed_layers)


def _moves(fmt: KVFormat, token: int) -> bool:
    before, after = fmt.packed_tokens(token), fmt.packed_tokens(token + 1)
    if fmt.unit == 1 and not fmt.residual:  # a token that is packed as it comes in changes nothing for those before it
        return before[1:] != after[1:]
    return before != after
