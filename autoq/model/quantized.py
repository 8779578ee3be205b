"""The only way a live model changes: `with quantized(model, assignment)`; everything is back afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from autoq import codec
from autoq.errors import UserError
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.model.attention import AttentionFunction, AttentionHandler, intercepted
from autoq.model.kv_visibility import attend_mixed, version_pairs
from autoq.model.unit import ModelUnits
from autoq.process_memory import available_bytes


@dataclass(frozen=True)
class Assignment:
    """A format for every unit; a unit that is not named keeps 16 bit.

    Attributes:
        weights, caches: by unit name. calibration: of a cache unit, for static scales and means.
        importance: by tensor name, [inputs] weights of the squared error for least-squares scales (see `input_importance`).
    """

    weights: Mapping[str, Format] = field(default_factory=dict)
    caches: Mapping[str, KVFormat] = field(default_factory=dict)
    calibration: Mapping[str, Calibration] = field(default_factory=dict)
    importance: Mapping[str, torch.Tensor] = field(default_factory=dict)


class DecodedWeights:
    """Decoded weights of one model by parameter and format, the longest unused ones dropped beyond a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.kept: OrderedDict[tuple[str, Format], torch.Tensor] = OrderedDict()

    @classmethod
    def beside(cls, model: PreTrainedModel, processes: int = 1) -> DecodedWeights:
        """Return one that takes at most half of the memory that is free, shared by so many processes, and four times the model."""
        if model.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(model.device)
        else:
            free = available_bytes()
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        return cls(min(free // (2 * processes), 4 * held))

    def get(self, parameter: str, fmt: Format) -> torch.Tensor | None:
        """Return the decoded weight, or None where it is not kept."""
        found = self.kept.get((parameter, fmt))
        if found is not None:
            self.kept.move_to_end((parameter, fmt))
        return found

    def keep(self, parameter: str, fmt: Format, weight: torch.Tensor) -> None:
        """Keep a decoded weight."""
        self.kept[parameter, fmt] = weight
        self.bytes += weight.numel() * weight.element_size()
        while self.bytes > self.limit and self.kept:
            _, dropped = self.kept.popitem(last=False)
            self.bytes -= dropped.numel() * dropped.element_size()


_CHANGED = WeakSet[PreTrainedModel]()


def is_quantized(model: PreTrainedModel) -> bool:
    """True while a block runs with other weights, keys or values in place of the model's own."""
    return model in _CHANGED


def check_not_quantized(model: PreTrainedModel) -> None:
    """Raise UserError for a model that a recipe is applied to."""
    if is_quantized(model):
        raise UserError("the model is inside `with autoq.quantized(...)`: leave the block first, or load the model once more")


@contextmanager
def quantized(
    model: PreTrainedModel, units: ModelUnits, assignment: Assignment, decoded: DecodedWeights | None = None
) -> Iterator[PreTrainedModel]:
    """Run the block with the assignment's weights and K/V in place of the model's own.

    Weights are replaced by their decoded values, kept aside and put back, also after an exception or an interrupt. K and V
    are quantized where attention reads them, so that one teacher-forced pass equals decoding token by token.

    Args:
        decoded: where decoded weights are looked up and kept, for many assignments of one model.
    """
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}
    with ExitStack() as stack:
        stack.callback(_restore, kept)
        if model not in _CHANGED:
            stack.callback(_CHANGED.discard, model)
            _CHANGED.add(model)
        for unit in units.weights:
            fmt = assignment.weights.get(unit.name)
            if fmt is None or fmt.is_original:
                continue
            for tensor in unit.tensors:
                parameter = model.get_parameter(tensor.parameter)
                kept[parameter] = parameter.data
                importance = assignment.importance.get(tensor.name)
                found = decoded.get(tensor.parameter, fmt) if decoded is not None and importance is None else None
                if found is None:
                    found = codec.fake_quantize_weight(parameter.data, fmt, tensor.is_transposed, importance)
                    if decoded is not None and importance is None:
                        decoded.keep(tensor.parameter, fmt, found)
                parameter.data = found
                if fmt.activation is not None and not tensor.layout.startswith("experts"):
                    module = model.get_submodule(tensor.name)
                    stack.callback(module.register_forward_pre_hook(quantize_input(fmt.activation)).remove)
        if any(not f.is_original for f in assignment.caches.values()):
            stack.enter_context(intercepted(model, _handler(model, units, assignment)))
        yield model


def _restore(kept: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    for parameter, data in kept.items():
        parameter.data = data


def quantize_input(fmt: Format) -> Any:
    """Return a forward pre-hook that rounds a layer's input, every token dynamically."""

    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (codec.fake_quantize_activation(inputs[0], fmt), *inputs[1:])

    return hook


def _handler(model: PreTrainedModel, units: ModelUnits, assignment: Assignment) -> AttentionHandler:
    original = KVFormat("bf16", Format("bf16", None))
    by_module: dict[torch.nn.Module, dict[str, tuple[KVFormat, Calibration]]] = {}
    for unit in units.caches:
        chosen = (assignment.caches.get(unit.name, original), assignment.calibration.get(unit.name, Calibration()))
        by_module.setdefault(model.get_submodule(unit.module), {})[unit.kind] = chosen

    def handle(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attend: AttentionFunction,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if module not in by_module:
            return attend(module, query, key, value, mask, **options)
        (key_format, of_keys), (value_format, of_values) = by_module[module]["key"], by_module[module]["value"]
        new_keys = codec.cache_versions(key, key_format, of_keys)
        new_values = codec.cache_versions(value, value_format, of_values)
        if key_format.is_causal and value_format.is_causal:
            return attend(module, query, new_keys[0], new_values[0], mask, **options)
        queries, tokens = query.shape[2], key.shape[2]
        keys = list(zip(new_keys, version_pairs(key_format, queries, tokens, key.device), strict=True))
        values = list(zip(new_values, version_pairs(value_format, queries, tokens, key.device), strict=True))
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        return attend_mixed(query, key, value, keys, values, mask, scaling, softcap, sinks), None

    return handle
