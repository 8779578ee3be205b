"""Predict, in nats of KL per token, what storing each weight and each K and V cache in each format would cost.

One forward and one backward pass per batch score everything (method: the exact Fisher information of the model's own
predictive distribution; labels are drawn from the model, one per position). For a tensor X that a format turns into Q(X), the
damage is the mean over sequences of <dL/dX, Q(X) - X>^2 / (2 T). Rounding errors of different input channels of a weight, and of
different tokens and heads of a cache, are independent, so that their inner products are squared apart and then added: the same
expectation, far less spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from autoq.codec import fake_quantize_activation
from autoq.errors import AutoqError, UserError
from autoq.formats.format import Format, KVFormat
from autoq.measure.kv_scorer import KVScorer, Part, pair_gradients, parts_of
from autoq.measure.labels import label_gradient
from autoq.measure.recompute import recomputed_layers
from autoq.measure.taps import attention_tap, tap
from autoq.measure.weight_scorer import WeightScorer, Workspace
from autoq.model.attention import AttentionFunction, intercepted
from autoq.model.head import Head, hidden_states
from autoq.model.unit import ModelUnits, Unit, WeightTensor


@dataclass(frozen=True)
class Candidates:
    """The formats to score: weights, keys, values."""

    weights: tuple[Format, ...]
    keys: tuple[KVFormat, ...]
    values: tuple[KVFormat, ...]

    def for_unit(self, unit: Unit) -> tuple[Format | KVFormat, ...]:
        """Return the candidates of one unit, those it cannot take left out (see `refusals`)."""
        if unit.kind == "weight":
            return tuple(f for f in self.weights if weight_refusal(unit, f) is None)
        return tuple(f for f in (self.keys if unit.kind == "key" else self.values) if cache_refusal(unit, f) is None)


def cache_refusal(unit: Unit, fmt: KVFormat) -> str | None:
    """Say why the cache of a layer cannot take a format, or None."""
    if unit.window and (fmt.older is not None or fmt.refresh):
        return f"{unit.name}: {fmt.name} is left out, a sliding window forgets tokens before they age"
    return None


def weight_refusal(unit: Unit, fmt: Format) -> str | None:
    """Say why a weight unit cannot take a format, or None."""
    if fmt.activation is not None and unit.role == "experts":
        return f"{unit.name}: {fmt.name} is left out, inputs of experts are not quantized"
    reasons = (fmt.refusal(t.width) for t in unit.tensors)
    return next((f"{unit.name}: {fmt.name} is left out, {r}" for r in reasons if r), None)


@dataclass
class DamageScorer:
    """Scores batches of sequences; holds what must outlive a batch: stored scales, calibration, error sums.

    Attributes:
        weights: one scorer a weight tensor, by tensor name. caches: one a cache unit, by unit name.
    """

    model: PreTrainedModel
    units: ModelUnits
    candidates: Candidates
    workspace: Workspace = field(default_factory=Workspace, init=False)
    row: int | None = field(default=None, init=False)  # the sequence whose logits are being made, inside label_gradient
    head_parts: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    weights: dict[str, WeightScorer] = field(default_factory=dict)
    caches: dict[str, KVScorer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_finite(self.model)
        self.head = Head(self.model)
        for unit in self.units.caches:
            formats = [f for f in self.candidates.for_unit(unit) if isinstance(f, KVFormat)]
            self.caches[unit.name] = KVScorer(formats, unit.head_dim)

    def score(self, ids: torch.Tensor, seeds: list[int]) -> dict[str, torch.Tensor]:
        """Return, for every unit, u [formats, batch] of the sequences ids [batch, tokens]; one seed a sequence draws its labels.

        u is the root of the summed squares, so that the damage is the mean of u^2 / (2 T).

        Raises AutoqError when the hidden states are not finite.
        """
        if self.units.has_experts:  # an expert sees an unknown mix of the batch: one sequence at a time
            parts = [self._score_batch(ids[i : i + 1], seeds[i : i + 1]) for i in range(len(ids))]
            return {name: torch.cat([p[name] for p in parts], dim=1) for name in parts[0]}
        return self._score_batch(ids, seeds)

    def _score_batch(self, ids: torch.Tensor, seeds: list[int]) -> dict[str, torch.Tensor]:
        found = {
            u.name: torch.zeros(len(self.candidates.for_unit(u)), len(ids), device=self.model.device) for u in self.units.units
        }
        with self._listening(ids, found):
            hidden = hidden_states(self.model, ids)
            if not torch.isfinite(hidden).all():
                raise AutoqError("the model's hidden states are not finite on this text: try --dtype float32")
            hidden.backward(label_gradient(self.head, hidden.detach(), seeds, self._at_row))
        for name, parts in self.head_parts.items():
            found[name].add_(parts.square().sum(0).T)
        self.head_parts.clear()
        return {name: squares.sqrt_() for name, squares in found.items()}

    def _at_row(self, row: int | None) -> None:
        self.row = row

    @contextmanager
    def _listening(self, ids: torch.Tensor, found: dict[str, torch.Tensor]) -> Iterator[None]:
        """Freeze the weights and put taps on every scored layer and on attention; everything is back afterwards."""
        trained = {name: p.requires_grad for name, p in self.model.named_parameters()}
        embedding = self.model.get_input_embeddings()
        with ExitStack() as stack:
            stack.callback(lambda: [p.requires_grad_(trained[n]) for n, p in self.model.named_parameters()])
            self.model.requires_grad_(False)
            stack.callback(embedding.register_forward_hook(lambda _m, _i, out: out.detach().requires_grad_()).remove)
            self._listen_to_embedding(stack, ids)
            for unit in self.units.weights:
                for tensor in unit.tensors if self.candidates.for_unit(unit) else ():
                    self._listen_to_weight(stack, unit, tensor, len(ids), found[unit.name])
            if self.caches and (self.candidates.keys or self.candidates.values):
                stack.enter_context(intercepted(self.model, self._attention_handler(found)))
            stack.enter_context(recomputed_layers(self.model))
            yield

    def _listen_to_weight(self, stack: ExitStack, unit: Unit, tensor: WeightTensor, batch: int, found: torch.Tensor) -> None:
        parameter = self.model.get_parameter(tensor.parameter)
        formats = self.candidates.for_unit(unit)

        def scorer() -> WeightScorer:
            if tensor.name not in self.weights:
                self.weights[tensor.name] = WeightScorer(tensor, parameter, formats, self.workspace)  # type: ignore[arg-type]
            return self.weights[tensor.name]

        if tensor.layout.startswith("experts"):

            def take(p: torch.Tensor) -> None:
                assert p.grad is not None
                found.add_(scorer().score_gradient(p.grad).square().sum(0).T)
                p.grad = None

            parameter.requires_grad_(True)
            stack.callback(parameter.register_post_accumulate_grad_hook(take).remove)
            return

        def listen(x: torch.Tensor, dy: torch.Tensor) -> None:
            sequences = batch if self.row is None else 1
            x, dy = (t.reshape(sequences, -1, t.shape[-1]) for t in (x, dy))
            parts = scorer().score(x, dy)
            if self.row is None:
                found.add_(parts.square().sum(0).T)
            else:  # the head sees a sequence in several slices, and a tied embedding adds to the same weight
                self._head_parts(unit.name, parts, batch)[:, self.row : self.row + 1] += parts
            into = found if self.row is None else found[:, self.row : self.row + 1]
            self._add_activations(into, formats, tensor, parameter, x, dy)

        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return tap(output, inputs[0], listen)

        stack.callback(self.model.get_submodule(tensor.name).register_forward_hook(hook).remove)

    def _head_parts(self, unit: str, like: torch.Tensor, batch: int) -> torch.Tensor:
        """Return what is summed up for a weight that is reached in several goes, [inputs, batch, formats]."""
        if unit not in self.head_parts:
            self.head_parts[unit] = like.new_zeros(like.shape[0], batch, like.shape[2])
        return self.head_parts[unit]

    def _listen_to_embedding(self, stack: ExitStack, ids: torch.Tensor) -> None:
        """Where the input embedding is scored too (a tied head), add its part: a gradient row per token."""
        embedding = self.model.get_input_embeddings()
        name = next((n for n, p in self.model.named_parameters(remove_duplicate=False) if p is embedding.weight), "")
        for unit in self.units.weights:
            for tensor in unit.tensors:
                if name not in (tensor.parameter, *tensor.also):
                    continue

                def listen(gradient: torch.Tensor, unit: Unit = unit, tensor: WeightTensor = tensor) -> None:
                    for row in range(len(ids)):
                        whole = torch.zeros(tensor.shape, dtype=torch.float32, device=gradient.device)
                        whole.index_add_(0, ids[row], gradient[row].to(torch.float32))
                        parts = self.weights[tensor.name].score_gradient(whole)
                        self._head_parts(unit.name, parts, len(ids))[:, row : row + 1] += parts

                def hook(_m: torch.nn.Module, _i: Any, out: torch.Tensor, listen: Any = listen) -> None:
                    out.register_hook(listen)

                stack.callback(embedding.register_forward_hook(hook).remove)

    def _add_activations(
        self,
        found: torch.Tensor,
        formats: tuple[Format | KVFormat, ...],
        tensor: WeightTensor,
        weight: torch.Tensor,
        x: torch.Tensor,
        dy: torch.Tensor,
    ) -> None:
        """Add the squares of <dL/dx, Q(x) - x>, token by token, to the formats that quantize the layer's input too."""
        gradient = None
        for i, fmt in enumerate(formats):
            if isinstance(fmt, Format) and fmt.activation is not None:
                if gradient is None:
                    gradient = dy @ (weight.detach().T if tensor.layout == "conv1d" else weight.detach())
                delta = fake_quantize_activation(x, fmt.activation) - x
                found[i] += (gradient * delta).sum(2).square().sum(1)

    def _attention_handler(self, found: dict[str, torch.Tensor]) -> Callable[..., Any]:
        by_module = {u.module: u for u in self.units.caches}
        names = {self.model.get_submodule(module): module for module in by_module}
        apart = parts_of((*self.candidates.keys, *self.candidates.values))

        def handle(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            attend: AttentionFunction,
            **options: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if module not in names:
                return attend(module, query, key, value, mask, **options)
            gradients: tuple[dict[Part, torch.Tensor], dict[Part, torch.Tensor]] = ({}, {})

            def listener(kind: str, parts: dict[Part, torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
                unit = f"{names[module]}.{kind}"

                def listen(x: torch.Tensor, gradient: torch.Tensor) -> None:
                    found[unit].add_(self.caches[unit].score(x, gradient, parts))
                    parts.clear()

                return listen

            def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, d_out: torch.Tensor) -> None:
                for part, fmt in apart.items():
                    gradients[0][part], gradients[1][part] = pair_gradients(fmt, part[1], q, k, v, out, d_out, mask, options)

            key = tap(key, key, listener("key", gradients[0]))
            value = tap(value, value, listener("value", gradients[1]))
            output, weights = attend(module, query, key, value, mask, **options)
            return attention_tap(output, query, key, value, split) if apart else output, weights

        return handle


def check_finite(model: PreTrainedModel) -> None:
    """Raise UserError naming the first tensor with a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"the tensor {name!r} holds NaN or infinite values: mend the checkpoint before quantizing it")
