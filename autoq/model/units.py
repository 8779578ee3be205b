"""Find every tensor of a causal language model that can be quantized, and group those that must share a format.

Works on a model on the meta device too, so that bits and budgets are known before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autoq.model.cache_units import VISION, cache_units
from autoq.model.unit import Layout, LeftOut, ModelUnits, Unit, WeightTensor

# Names under one parent that serving engines fuse into one matrix, hence one format.
TIED_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("qkv", ("query", "key", "value")),
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
MIN_FAN_IN = 16


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
        units=(*_group(tensors), *cache_units(model)),
        left_out=tuple(LeftOut(r, sum(n), len(n)) for r, n in sorted(left.items(), key=lambda kv: -sum(kv[1]))),
        parameters=sum(parameters[n[0]].numel() for n in names.values()),
    )


def _candidates(model: PreTrainedModel, include: tuple[str, ...]) -> Iterator[tuple[WeightTensor, torch.Tensor, str | None]]:
    """Yield (tensor, parameter, reason to leave it out or None) for every weight matrix of the model."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if "weight" not in module._parameters and isinstance(module, (torch.nn.Linear, Conv1D)):
            continue  # computed from other parameters in every pass
        if isinstance(module, torch.nn.Linear):
            reason = None
            if module is head and "lm_head" not in include:
                reason = "lm_head (--include lm_head searches it)"
            elif _ROUTERS.search(name):
                reason = "router"
            elif VISION.search(name):
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
    if ".parametrizations." in name or name.endswith((".weight_g", ".weight_v")):
        return "parametrized layers"
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
