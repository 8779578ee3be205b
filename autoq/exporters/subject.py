"""What is exported, as PTQ tools see it: the model's weight matrices and attention modules, each with its format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from autoq.cost.bits import WeightCost
from autoq.cost.kv_memory import kv_cost
from autoq.formats.format import Format, KVFormat
from autoq.model.unit import Layout, ModelUnits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORIGINAL = Format("bf16", None)
KV_ORIGINAL = KVFormat("bf16", ORIGINAL)


@dataclass(frozen=True)
class Layer:
    """A weight matrix. `name` is the module's path, or the parameter's for 3-D experts; `shape` [..., outputs, inputs]."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    unit: str | None
    format: Format = ORIGINAL

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def blocks(self) -> int:
        """Number of blocks, each with a scale, in all rows."""
        return self.format.blocks(self.width) * math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Attention:
    """The cache of an attention module: what K and V are stored in."""

    name: str
    class_name: str
    layer: int
    kv_heads: int
    head_dim: int
    key: KVFormat = KV_ORIGINAL
    value: KVFormat = KV_ORIGINAL

    @property
    def is_original(self) -> bool:
        return self.key.is_original and self.value.is_original


@dataclass(frozen=True)
class Subject:
    """A recipe on its model.

    Attributes:
        model: as `--model` names it. kind: transformers' model_type. dtype: in which the recipe was measured.
        layers: every Linear, Conv1D and 3-D expert tensor, those that stay in 16 bit too. attentions: in the order of the layers.
        modules: the names of all modules of the model. recipe: its file, or None where there is none yet. tokens, batch: for which the cache is priced.
    """

    model: str
    kind: str
    dtype: str
    units: ModelUnits
    layers: tuple[Layer, ...]
    attentions: tuple[Attention, ...]
    modules: frozenset[str] = frozenset()
    recipe: Path | None = None
    tokens: int = 1024
    batch: int = 1

    @property
    def quantized(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.format.is_original)

    @property
    def kept(self) -> tuple[Layer, ...]:
        """Layers that stay in 16 bit."""
        return tuple(layer for layer in self.layers if layer.format.is_original)

    def with_formats(self, weights: Mapping[str, Format], caches: Mapping[str, tuple[KVFormat, KVFormat]]) -> Subject:
        """Return the same with other formats: of layers by name, of attention modules by name (key, value)."""
        layers = tuple(replace(one, format=weights.get(one.name, one.format)) for one in self.layers)
        attentions = []
        for one in self.attentions:
            key, value = caches.get(one.name, (one.key, one.value))
            attentions.append(replace(one, key=key, value=value))
        return replace(self, layers=layers, attentions=tuple(attentions))

    def weight_cost(self, overhead: Callable[[Layer], int] = lambda layer: 0) -> WeightCost:
        """Return the bits of the weights; `overhead` says what a consumer stores of a quantized layer beyond its format."""
        searched = 0
        for layer in self.layers:
            if layer.unit is not None:
                searched += layer.format.storage_bits(layer.shape) + (0 if layer.format.is_original else overhead(layer))
        rest = 16 * (self.units.parameters - self.units.searched)
        return WeightCost(searched, self.units.searched, searched + rest, self.units.parameters)

    def kv_cost(self) -> tuple[int, int]:
        """Return (bits, values) of the cache of the batch at the context."""
        formats = {f"{a.name}.key": a.key for a in self.attentions} | {f"{a.name}.value": a.value for a in self.attentions}
        return kv_cost(self.units, formats, self.tokens, self.batch)


def bare_subject(model: PreTrainedModel, units: ModelUnits, name: str, dtype: str = "bfloat16") -> Subject:
    """Return a model, which may be on the meta device, with everything in 16 bit."""
    in_units = {t.name: (u.name, t) for u in units.weights for t in u.tensors}
    layers = []
    for path, module in model.named_modules():
        if path in in_units:
            continue
        if isinstance(module, torch.nn.Linear):
            layers.append(Layer(path, "linear", tuple(module.weight.shape), None))
        elif isinstance(module, Conv1D):
            layers.append(Layer(path, "conv1d", tuple(reversed(module.weight.shape)), None))
    layers = [Layer(t.name, t.layout, t.matrix_shape, unit) for unit, t in in_units.values()] + layers
    attentions = []
    for unit in units.caches:
        if unit.kind == "key" and unit.role != "latent":
            kind = type(model.get_submodule(unit.module)).__name__
            attentions.append(Attention(unit.module, kind, unit.layer or 0, unit.kv_heads, unit.head_dim))
    return Subject(
        name,
        model.config.model_type,
        dtype,
        units,
        tuple(layers),
        tuple(sorted(attentions, key=lambda a: a.layer)),
        frozenset(n for n, _ in model.named_modules()),
    )
