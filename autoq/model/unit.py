"""What is quantized together: weight tensors, units that share one format, and all units of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weight", "key", "value"]
Layout = Literal["linear", "conv1d", "experts", "experts_transposed"]


@dataclass(frozen=True)
class WeightTensor:
    """One quantizable weight. `shape` is as the model stores it; blocks run along the input dimension.

    Attributes:
        name: the module's path, or the parameter's for 3-D experts; what PTQ tools match.
        parameter: path of the parameter.
        also: other parameter paths of the very same tensor (tied embeddings).
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    layout: Layout
    also: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_transposed(self) -> bool:
        """True if the tensor is stored [..., inputs, outputs]."""
        return self.layout in ("conv1d", "experts_transposed")

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """[..., rows (outputs), width (inputs)]: the shape as formats see it."""
        if self.is_transposed:
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self.shape

    @property
    def width(self) -> int:
        return self.matrix_shape[-1]


@dataclass(frozen=True)
class Unit:
    """Tensors that share one format.

    A weight unit has `tensors`; a key or value unit is the K or V cache of one attention layer, `module` its attention module. Where
    a layer caches one latent for both (MLA), that is a key unit with one head of the latent's width.
    """

    name: str
    kind: Kind
    role: str
    layer: int | None
    tensors: tuple[WeightTensor, ...] = ()
    module: str = ""
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None

    @property
    def numel(self) -> int:
        """Number of values: of the weights, or of the cache per token."""
        return sum(t.numel for t in self.tensors) if self.kind == "weight" else self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LeftOut:
    """Parameters that stay in 16 bit, and why."""

    reason: str
    numel: int
    tensors: int


@dataclass(frozen=True)
class ModelUnits:
    """The units of a model, and what is left out of the search."""

    units: tuple[Unit, ...]
    left_out: tuple[LeftOut, ...]
    parameters: int

    @property
    def weights(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.kind == "weight")

    @property
    def caches(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.kind != "weight")

    @property
    def searched(self) -> int:
        """Parameters in the weight units; a tied tensor counts once."""
        return sum(u.numel for u in self.weights)

    @property
    def has_experts(self) -> bool:
        return any(u.role == "experts" for u in self.units)

    def coverage(self) -> str:
        """Say in one line which share of the parameters is searched, and what is left out and why."""
        share = 100 * self.searched / max(1, self.parameters)
        rest = ", ".join(f"{entry.reason} {100 * entry.numel / max(1, self.parameters):.3g}%" for entry in self.left_out)
        return f"{share:.1f}% of {self.parameters / 1e6:.1f}M parameters are searched; left in 16 bit: {rest or 'nothing'}"
