"""Small models on the meta device, with formats laid over their layers."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from autoq.exporters.consumer import Consumer
from autoq.exporters.subject import KV_ORIGINAL, Subject, bare_subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import Format, KVFormat
from autoq.model.units import find_units
from tests.conftest import llama_config

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}


def subject_for(config: object = None, include: tuple[str, ...] = ()) -> Subject:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config or llama_config(**WIDE))
    return bare_subject(model, find_units(model, include), "tiny")


def with_every_format(subject: Subject, consumer: Consumer) -> Subject:
    """Lay the consumer's formats over the units in turn, and its cache formats as it may mix them."""
    assert consumer.weights is not None
    turn = cycle([*consumer.weights, "bf16"])
    weights: dict[str, Format] = {}
    for unit in subject.units.weights:
        fmt = WEIGHT_FORMATS[next(turn)]
        weights |= {t.name: fmt for t in unit.tensors}
    caches: dict[str, tuple[KVFormat, KVFormat]] = {}
    names = [*(consumer.caches or ()), "bf16"]
    for i, attention in enumerate(subject.attentions):
        if consumer.mixing == "free":
            pair = kv_format(names[i % len(names)]), kv_format(names[(i + 1) % len(names)])
        elif consumer.mixing == "two":
            pair = kv_format(names[0]), kv_format(names[1])
        else:
            is_skipped = consumer.mixing == "one and skipped" and i in (1, 4)
            pair = (KV_ORIGINAL, KV_ORIGINAL) if is_skipped else (kv_format(names[0]), kv_format(names[0]))
        caches[attention.name] = pair
    return subject.with_formats(weights, caches)
