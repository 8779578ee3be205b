"""The second moment of every layer's input: the part of the Fisher information that a row's scale can use."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from autoq.model.head import hidden_states
from autoq.model.unit import ModelUnits


def input_importance(model: PreTrainedModel, units: ModelUnits, ids: torch.Tensor, batch: int = 4) -> dict[str, torch.Tensor]:
    """Return tensor name -> mean of x^2 per input [inputs] over the text ids [sequences, tokens].

    The Fisher information of W[i, j] is about E[dy_i^2] E[x_j^2] (Kronecker factors, Martens and Grosse 2015); within a row
    the first factor is the same for all, so that least squares weighted by E[x_j^2] is least Fisher-weighted squares.
    """
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).to(torch.float32)
            sums[name] = sums.get(name, 0) + x.square().sum(0)

        return module.register_forward_pre_hook(hook)

    with ExitStack() as stack, torch.no_grad():
        for unit in units.weights:
            for tensor in unit.tensors:
                if not tensor.layout.startswith("experts"):
                    stack.callback(watch(tensor.name, model.get_submodule(tensor.name)).remove)
        for part in ids.split(batch):
            hidden_states(model, part.to(model.device))
    return {name: total / ids.numel() for name, total in sums.items()}
