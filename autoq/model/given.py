"""What a caller has in memory already: a loaded model, its tokenizer, token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autoq.errors import UserError
from autoq.model import load
from autoq.model.quantized import check_not_quantized

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
        check_class(self.model)
        return self.model.config, self.model

    def load_model(self, source: load.ModelSource, device: str, dtype: str) -> PreTrainedModel:
        """Return the model, loaded if need be."""
        return load.load_model(source, device, dtype) if self.model is None else self.model

    def load_tokenizer(self, source: load.ModelSource) -> PreTrainedTokenizerBase:
        """Return the tokenizer, loaded if need be; raises UserError where it is not there."""
        if self.tokenizer is not None:
            return self.tokenizer
        if self.model is None:
            return load.load_tokenizer(source)
        if source.name.startswith(load.LOADED):  # nothing that a hub should be asked for
            raise UserError("the model does not say where it was loaded from: give its tokenizer, or batches of token ids")
        try:
            return load.load_tokenizer(load.model_source(source.name))
        except UserError as error:
            raise UserError(
                f"the model was loaded from {source.name!r}, and its tokenizer is not there: give it, or batches of token ids ({error})"
            ) from error


def shapes_of(model: PreTrainedModel | str) -> tuple[load.ModelSource, PreTrainedConfig, PreTrainedModel]:
    """Return where a model is from, its config, and names and shapes; nothing is loaded for a name."""
    if isinstance(model, str):
        source, given = load.model_source(model), Given()
    else:
        source, given = source_of(model), Given(model)
    return (source, *given.shapes(source))


def check_class(model: PreTrainedModel) -> None:
    """Raise UserError for a loaded model that predicts no next token."""
    name = type(model).__name__
    if name.endswith("ForMaskedLM"):
        raise UserError(f"{name} is not a causal language model: autoq searches decoder-only language models")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or getattr(head, "weight", None) is None:
        raise UserError(f"{name} has no output embedding to predict tokens with: load the model with AutoModelForCausalLM")


def name_of(model: PreTrainedModel) -> str:
    """Return where a loaded model came from, as `--model` takes it, or its class after "loaded:" where it does not say."""
    path = str(getattr(model.config, "name_or_path", "") or "")
    if not path:
        return load.LOADED + type(model).__name__
    return load.DEMO if Path(path) == load.DEMO_FOLDER else path


def source_of(model: PreTrainedModel) -> load.ModelSource:
    """Return where a loaded model is from, as far as it says."""
    name = name_of(model)
    return load.ModelSource(name, name)


def dtype_of(model: PreTrainedModel) -> str:
    """Return the name of the model's dtype; raises UserError for one that autoq does not compute in."""
    name = str(model.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"the model is in {name}: load it in {', '.join(DTYPES)}")
    return name


@contextmanager
def borrowed(model: PreTrainedModel | None) -> Iterator[None]:
    """Evaluate a caller's model; its training modes, gradients and settings are back afterwards, also after an interrupt.

    Raises UserError for a model without values, one made in inference mode, or one that a recipe is applied to.
    """
    if model is None:
        yield
        return
    if any(p.is_meta for p in model.parameters()):
        raise UserError("the model has tensors on the meta device, without values: load its weights first")
    if any(p.is_inference() for p in model.parameters()):
        raise UserError("the model was made within torch.inference_mode, and has no gradients: load it outside of that")
    check_not_quantized(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    settings = vars(model.config)
    use_cache = {"use_cache": settings["use_cache"]} if "use_cache" in settings else {}
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        model.config.use_cache = False
        model.eval()
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is inside of
            yield
    finally:
        settings.pop("use_cache", None)
        settings.update(use_cache)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


@torch.inference_mode(False)
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


def _is_full(mask: Any, ids: Any) -> bool:
    try:
        found = torch.as_tensor(mask)
        return bool(found.all()) and found.shape == torch.as_tensor(ids).shape
    except (TypeError, ValueError, RuntimeError):  # ragged, words
        return False


def _ids(batch: Any, what: str) -> torch.Tensor:
    if hasattr(batch, "keys"):
        if "input_ids" not in batch:
            raise UserError(
                f"{what} has a batch without 'input_ids': it has {', '.join(map(str, list(batch.keys())[:5])) or 'nothing'}"
            )
        mask = batch.get("attention_mask")
        if mask is not None and not _is_full(mask, batch["input_ids"]):
            raise UserError(f"{what} has padding, or an attention mask that is none: pack text into full sequences")
        batch = batch["input_ids"]
    if isinstance(batch, np.ma.MaskedArray):
        raise UserError(f"{what} has a masked array: pack text into full sequences")
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "iu":  # any order of bytes and strides
        if batch.size and batch.max() > np.iinfo(np.int64).max:
            raise UserError(f"{what} has the token id {batch.max()}, which no vocabulary has")
        batch = np.ascontiguousarray(batch, dtype=np.int64)
    try:
        ids = torch.as_tensor(batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{what} has a batch that is no tensor of token ids: {type(batch).__name__} ({error})") from error
    if ids.is_meta or ids.is_nested or ids.is_quantized or ids.layout != torch.strided:
        kind = "on the meta device" if ids.is_meta else "nested" if ids.is_nested else "quantized" if ids.is_quantized else "sparse"
        raise UserError(f"{what} has a batch that is {kind}: give dense token ids [sequences, tokens]")
    if ids.dim() == 0:
        raise UserError(f"{what} is one row of single ids, or holds {batch!r}: give sequences of token ids [sequences, tokens]")
    if not ids.numel():
        raise UserError(f"{what} has an empty batch")
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{what} must be whole numbers [sequences, tokens], not {ids.dtype} {list(ids.shape)}")
    ids = ids.to("cpu", torch.int64)
    if int(ids.min()) < 0:
        raise UserError(f"{what} has the negative token id {int(ids.min())}")
    return ids
