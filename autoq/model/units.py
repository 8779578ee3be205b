"""Find every tensor of a causal language model that can be quantized, and group those that must share a format.

Works on a model on the meta device too, so that bits and budgets are known before any weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Kind = Literal["weight", "key", "value"]
Layout = Literal["linear", "conv1d", "experts", "experts_transposed"]

# Names under one parent that serving engines fuse into one matrix, hence one format.
TIED_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("gate_up", ("gate_proj", "up_proj")),
    ("w1_w3", ("w1", "w3")),
    ("q_a_kv_a", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
_ROLES: tuple[tuple[str, str], ...] = (
    ("experts", r"experts"),
    ("qkv", r"(q|k|v|qkv|q_a|q_b|kv_b|W|in)_proj\w*|c_attn|query_key_value|query|key|value|kv_a_proj_with_mqa|Wqkv|qkv"),
    ("o", r"(o|out)_proj|(self_)?attention\.dense|attn\.c_proj|self_attn\.dense|attn\.dense"),
    ("gate_up", r"(gate|up|gate_up)_proj|fc1|c_fc|w1|w3|fc_in|dense_h_to_4h"),
    ("down", r"down_proj|fc2|w2|mlp\.c_proj|fc_out|dense_4h_to_h"),
)
_ROUTERS = re.compile(r"(^|\.)(gate|router|shared_expert_gate|mlp\.gate|router\.classifier)$")
_VISION = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)(\.|$)")
MIN_FAN_IN = 16


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

    A weight unit has `tensors`; a key or value unit is the K or V cache of one attention layer, `module` its attention module.
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


def uncacheable(model: PreTrainedModel) -> str | None:
    """Say why the KV cache of this model can be neither priced nor searched, or None. A model on the meta device will do."""
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        return f"{kind} caches a latent (MLA), which autoq does not price yet"
    if getattr(config, "num_kv_shared_layers", None):
        return f"{kind} has layers that share another layer's cache, which autoq does not price yet"
    if not model._can_set_attn_implementation():
        return (
            f"{kind} does not call its attention function through transformers' registry, so its keys and values are out of reach"
        )
    return None


def find_units(model: PreTrainedModel, include: tuple[str, ...] = ()) -> ModelUnits:
    """Return the units of a causal language model; `include=("lm_head",)` searches the output head as well."""
    names: dict[int, list[str]] = {}
    parameters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[name] = parameter
    tensors: list[WeightTensor] = []
    taken: set[int] = set()
    reasons: dict[int, str] = {}
    for tensor, parameter, reason in _candidates(model, include):
        if id(parameter) in taken:
            continue
        if reason is not None:
            reasons.setdefault(id(parameter), reason)
            continue
        taken.add(id(parameter))
        also = tuple(n for n in names[id(parameter)] if n != tensor.parameter)
        tensors.append(WeightTensor(tensor.name, tensor.parameter, tensor.shape, tensor.layout, also))
    left: dict[str, list[int]] = {}
    for name, parameter in parameters.items():
        if id(parameter) in taken or names[id(parameter)][0] != name:
            continue
        left.setdefault(reasons.get(id(parameter)) or _left_out_reason(model, name, parameter), []).append(parameter.numel())
    return ModelUnits(
        units=(*_group(tensors), *_cache_units(model)),
        left_out=tuple(LeftOut(r, sum(n), len(n)) for r, n in sorted(left.items(), key=lambda kv: -sum(kv[1]))),
        parameters=sum(parameters[n[0]].numel() for n in names.values()),
    )


def _candidates(model: PreTrainedModel, include: tuple[str, ...]) -> Iterator[tuple[WeightTensor, torch.Tensor, str | None]]:
    """Yield (tensor, parameter, reason to leave it out or None) for every weight matrix of the model."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            reason = None
            if module is head and "lm_head" not in include:
                reason = "lm_head (--include lm_head searches it)"
            elif _ROUTERS.search(name):
                reason = "router"
            elif _VISION.search(name):
                reason = "vision or audio tower"
            elif module.in_features < MIN_FAN_IN:
                reason = f"fan-in below {MIN_FAN_IN}"
            yield WeightTensor(name, f"{name}.weight", tuple(module.weight.shape), "linear"), module.weight, reason
        elif isinstance(module, Conv1D):
            yield WeightTensor(name, f"{name}.weight", tuple(module.weight.shape), "conv1d"), module.weight, None
        elif not isinstance(module, torch.nn.modules.conv._ConvNd):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and min(parameter.shape[1:]) >= MIN_FAN_IN and "experts" in name.split("."):
                    layout: Layout = "experts_transposed" if _is_transposed(module, key, parameter) else "experts"
                    yield WeightTensor(f"{name}.{key}", f"{name}.{key}", tuple(parameter.shape), layout), parameter, None


def _is_transposed(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter) -> bool:
    """True if expert matrices are stored [inputs, outputs]: transformers says so, or the bias or its sibling tells."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    bias = getattr(module, f"{key}_bias", None)
    if isinstance(bias, torch.Tensor) and parameter.shape[1] != parameter.shape[2]:
        return bool(bias.shape[-1] == parameter.shape[2])
    hidden = getattr(module, "hidden_size", None) or getattr(module, "hidden_dim", None)
    if hidden is not None and parameter.shape[1] != parameter.shape[2]:
        return bool(parameter.shape[1 if key != "down_proj" else 2] == hidden)
    return False


def _left_out_reason(model: PreTrainedModel, name: str, parameter: torch.nn.Parameter) -> str:
    embedding = model.get_input_embeddings()
    if embedding is not None and any(parameter is p for p in embedding.parameters()):
        return "embeddings"
    if parameter.dim() <= 1:
        return "biases" if name.endswith("bias") else "norms"
    if _ROUTERS.search(name.rpartition(".")[0]):
        return "router"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding):
        return "position embeddings"
    if name.endswith("bias"):
        return "biases"
    return "convolutions and other shapes"


def _group(tensors: list[WeightTensor]) -> Iterator[Unit]:
    """Yield the weight units in the order of their first tensor."""
    groups: dict[str, list[WeightTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_unit_name(tensor), []).append(tensor)
    for name, members in groups.items():
        yield Unit(name, "weight", _role(members[0]), _layer(name), tuple(members))


def _unit_name(tensor: WeightTensor) -> str:
    parts = tensor.name.split(".")
    if "experts" in parts:  # all experts of a layer, all their matrices
        return ".".join(parts[: parts.index("experts") + 1])
    parent, _, last = tensor.name.rpartition(".")
    group = next((label for label, names in TIED_NAMES if last in names), last)
    return f"{parent}.{group}" if parent else group


def _role(tensor: WeightTensor) -> str:
    if tensor.name.endswith("lm_head"):
        return "head"
    for role, pattern in _ROLES:
        if re.search(rf"(^|\.)({pattern})(\.|$)", tensor.name):
            return role
    return "other"


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _cache_units(model: PreTrainedModel) -> Iterator[Unit]:
    """Yield the K and the V unit of every attention layer, with the shapes the config gives."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None)
    seen: set[int] = set()
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "Attention" not in type(module).__name__ or layer in seen or _VISION.search(name):
            continue
        seen.add(layer)
        sliding = kinds[layer] == "sliding_attention" if kinds else getattr(module, "sliding_window", None) is not None
        window = getattr(config, "sliding_window", None) if sliding else None
        kinds_and_roles: tuple[tuple[Kind, str], ...] = (("key", "K"), ("value", "V"))
        for kind, role in kinds_and_roles:
            yield Unit(
                f"{name}.{kind}",
                kind,
                role,
                layer,
                (),
                name,
                kv_heads,
                head_dim,
                window,
            )
