"""The cache of every attention layer: heads, widths and windows, from the modules and the config.

What an engine keeps is counted: the latent of MLA rather than the heads it expands to, a cache that later layers share once, and
no cache where a layer keeps a state of fixed size (Mamba, linear attention).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from autoq.model.unit import Kind, Unit

VISION = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)(\.|$)")


def unsearchable(model: PreTrainedModel) -> str | None:
    """Say why the formats of this model's KV cache cannot be searched, or None. A model on the meta device will do."""
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        return f"{kind} caches a latent (MLA): autoq prices it, but reaches only the keys and values that it expands to"
    if getattr(config, "num_kv_shared_layers", None):
        return f"{kind} has layers that share another layer's cache: autoq prices it, but does not search its formats yet"
    if not model._can_set_attn_implementation():
        return (
            f"{kind} does not call its attention function through transformers' registry, so its keys and values are out of reach"
        )
    return None


def cache_units(model: PreTrainedModel) -> Iterator[Unit]:
    """Yield the K and the V unit of every attention layer that has a cache of its own."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    layers = DynamicCache(config=model.config).layers  # transformers' own rules say which layers have a window
    seen: set[int] = set()
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or "Attention" not in type(module).__name__ or layer in seen or VISION.search(name):
            continue
        if getattr(module, "is_kv_shared_layer", False) or (kinds and layer < len(kinds) and kinds[layer].startswith("linear")):
            continue
        seen.add(layer)
        window = getattr(layers[layer], "sliding_window", None) if layer < len(layers) else None
        latent = getattr(config, "kv_lora_rank", None)
        if latent:
            yield Unit(f"{name}.latent", "key", "latent", layer, (), name, 1, latent + config.qk_rope_head_dim, window)
            continue
        heads, key_dim, value_dim = _shape(config, module)
        sides: tuple[tuple[Kind, str, int], ...] = (("key", "K", key_dim), ("value", "V", value_dim))
        for kind, role, head_dim in sides:
            yield Unit(f"{name}.{kind}", kind, role, layer, (), name, heads, head_dim, window)


def _shape(config: Any, module: torch.nn.Module) -> tuple[int, int, int]:
    """Return (KV heads, head_dim of K, of V): from the projections where there are some, else from the config."""
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    k_proj, v_proj = getattr(module, "k_proj", None), getattr(module, "v_proj", None)
    if isinstance(k_proj, torch.nn.Linear):
        heads = k_proj.out_features // head_dim
        return heads, head_dim, v_proj.out_features // heads if isinstance(v_proj, torch.nn.Linear) else head_dim
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads),
        head_dim,
        head_dim,
    )
