"""The last step of a language model, from hidden states to logits, so that logits need never exist for a whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from autoq.errors import AutoqError

LOGITS_BYTES = 24 * 2**20  # of float32 logits held at a time


class Head:
    """Logits of hidden states: the output embedding, then what the architecture does to its logits.

    Raises AutoqError at construction if the model does something else after its output embedding: the result is compared
    with the model's own logits on a few tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.module: torch.nn.Module = model.get_output_embeddings()
        config = model.config.get_text_config(decoder=True)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        divisor = getattr(config, "logits_scaling", None) or 1.0
        self.scale: float = (getattr(config, "logit_scale", None) or 1.0) / divisor
        self.vocab: int = self.module.weight.shape[0]
        with torch.no_grad():
            probe = torch.arange(1, 6, device=model.device).unsqueeze(0) % self.vocab
            own = model(probe, use_cache=False).logits.float()
            mine = self(hidden_states(model, probe)).float()
            if not torch.allclose(own, mine, rtol=1e-2, atol=1e-3 * float(own.abs().max())):
                raise AutoqError(f"{type(model).__name__} changes its logits in a way autoq does not know")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocabulary] of hidden states [..., hidden], in the model's dtype."""
        logits: torch.Tensor = self.module(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Yield slices of so many tokens that their float32 logits stay within LOGITS_BYTES."""
        step = max(1, LOGITS_BYTES // (4 * self.vocab))
        yield from (slice(i, min(i + step, tokens)) for i in range(0, tokens, step))


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
    """Return the hidden states [batch, tokens, hidden] that the output embedding reads; with a cache, ids go on after its tokens."""
    given = {} if cache is None else {cache_argument(model): cache}
    hidden: torch.Tensor = model.base_model(input_ids=ids, use_cache=cache is not None, **given).last_hidden_state
    return hidden


def cache_argument(model: PreTrainedModel) -> str:
    """Return what this release of transformers calls the cache that a model is given."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
