"""Activation checkpointing for one pass: keep only what enters each layer, and run a layer again when its turn comes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint every decoder layer inside the block (Chen et al. 2016); one more forward pass buys most of the activations.

    transformers' own switch works in training mode alone, which would turn dropout on.
    """
    _return_large_blocks()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _return_large_blocks() -> None:
    """Ask glibc to give blocks over 1 MiB back when they are freed; by default it keeps them, at twice the peak memory."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
