"""What a caller has in memory already: a loaded model, its tokenizer, token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq.errors import UserError
from autoq.model import load

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Given:
    """What need not be loaded; whatever is None is loaded by name.

    Attributes:
        ids, eval_ids, trial_ids: int64 [sequences, tokens] to profile, to measure on, and for trials; no text is in two of them.
    """

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    ids: torch.Tensor | None = None
    eval_ids: torch.Tensor | None = None
    trial_ids: torch.Tensor | None = None

    def shapes(self, source: load.ModelSource) -> tuple[PreTrainedConfig, PreTrainedModel]:
        """Return the config and a model with names and shapes: the loaded one, or one without weights.

        Raises UserError for what is not a causal language model, or is quantized already.
        """
        if self.model is None:
            config = load.load_config(source)
            return config, load.empty_model(config)
        load.check_config(self.model.config, source)
        return self.model.config, self.model

    def load_model(self, source: load.ModelSource, device: str, dtype: str) -> PreTrainedModel:
        """Return the model, loaded if need be."""
        return load.load_model(source, device, dtype) if self.model is None else self.model

    def load_tokenizer(self, source: load.ModelSource) -> PreTrainedTokenizerBase:
        """Return the tokenizer, loaded if need be."""
        return load.load_tokenizer(source) if self.tokenizer is None else self.tokenizer


def shapes_of(model: PreTrainedModel | str) -> tuple[load.ModelSource, PreTrainedConfig, PreTrainedModel]:
    """Return where a model is from, its config, and names and shapes; nothing is loaded for a name."""
    if isinstance(model, str):
        source, given = load.model_source(model), Given()
    else:
        name = name_of(model)
        source, given = load.ModelSource(name, name), Given(model)
    return (source, *given.shapes(source))


def name_of(model: PreTrainedModel) -> str:
    """Return where a loaded model came from, as `--model` takes it, or its class where it does not say."""
    path = str(getattr(model.config, "name_or_path", "") or "")
    if not path:
        return type(model).__name__
    return load.DEMO if Path(path) == load.DEMO_FOLDER else path


def dtype_of(model: PreTrainedModel) -> str:
    """Return the name of the model's dtype; raises UserError for one that autoq does not compute in."""
    name = str(model.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"the model is in {name}: load it in {', '.join(DTYPES)}")
    return name


@contextmanager
def borrowed(model: PreTrainedModel | None) -> Iterator[None]:
    """Evaluate a caller's model; its training modes, gradients and settings are back afterwards, also after an interrupt.

    Raises UserError for a model without values.
    """
    if model is None:
        yield
        return
    if any(p.is_meta for p in model.parameters()):
        raise UserError("the model has tensors on the meta device, without values: load its weights first")
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    use_cache = getattr(model.config, "use_cache", None)
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        model.config.use_cache = False
        model.eval()
        with torch.enable_grad():  # a caller may be inside no_grad
            yield
    finally:
        model.config.use_cache = use_cache
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


def token_ids(batches: Any, what: str) -> torch.Tensor:
    """Return batches of token ids as one int64 tensor [sequences, tokens].

    Args:
        batches: a tensor [sequences, tokens] or [tokens], or an iterable of such tensors, of lists of ids, or of mappings with "input_ids" (what a
            data loader gives). what: for an error.

    Raises UserError for padding, other lengths, or what is no token id.
    """
    rows: list[torch.Tensor] = []
    for batch in [batches] if isinstance(batches, torch.Tensor) else _each(batches, what):
        ids = _ids(batch, what)
        rows += list(ids.unsqueeze(0) if ids.dim() == 1 else ids)
    if not rows:
        raise UserError(f"{what} has no batch")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise UserError(f"{what} has sequences of {lengths[0]} to {lengths[-1]} tokens: pack them to one length, without padding")
    if lengths[0] < 8:
        raise UserError(f"{what} has sequences of {lengths[0]} tokens: give at least 8")
    return torch.stack(rows)


def _each(batches: Any, what: str) -> Iterable[Any]:
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise UserError(f"{what} is a {type(batches).__name__}: give a tokenizer, or token ids [sequences, tokens] in batches")
    if hasattr(batches, "keys"):  # one batch as a tokenizer returns it
        return [batches]
    return batches


def _ids(batch: Any, what: str) -> torch.Tensor:
    if hasattr(batch, "keys"):
        if "input_ids" not in batch:
            raise UserError(f"{what} has a batch without 'input_ids', but {', '.join(map(str, list(batch.keys())[:5]))}")
        mask = batch.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise UserError(f"{what} has padding: pack text into full sequences")
        batch = batch["input_ids"]
    try:
        ids = torch.as_tensor(batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what} has a batch that is no tensor of token ids: {type(batch).__name__} ({error})") from error
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{what} must be whole numbers [sequences, tokens], not {ids.dtype} {list(ids.shape)}")
    if ids.numel() and int(ids.min()) < 0:
        raise UserError(f"{what} has the negative token id {int(ids.min())}")
    return ids.to("cpu", torch.int64)
