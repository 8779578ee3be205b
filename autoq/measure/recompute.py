"""Activation checkpointing for one pass: keep what is narrow, and make the wide activations of a layer again when its turn comes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

WIDE = 2  # times the residual stream; what is wider is made again
GLIBC_LARGEST_KEPT = 32 << 20  # bytes; where glibc's own threshold ends up in a program that frees large blocks
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm"}


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint every decoder layer inside the block (Chen et al. 2016), selectively.

    The outputs of attention and of its projections are kept: making them again is dear, and they are as narrow as the
    residual stream. The MLP's activations and everything elementwise, most of the memory, are made again. transformers' own
    switch works in training mode alone, which would turn dropout on. A layer that is no `GradientCheckpointingLayer` keeps its
    activations.
    """
    _return_blocks_from(1 << 20)
    widest = WIDE * model.config.get_text_config(decoder=True).hidden_size
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, widest))
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        yield
    finally:
        _return_blocks_from(GLIBC_LARGEST_KEPT)
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _policy(widest: int, _context: SelectiveCheckpointContext, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = op.name().split(".")[0]
    if name in MATRIX_PRODUCTS:
        left, right = args[-2:]
        keep = max(left.shape[1], right.shape[1]) <= widest
    else:
        keep = name.startswith("aten::_scaled_dot_product_")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _return_blocks_from(size: int) -> None:
    """Ask glibc to give blocks of so many bytes back when they are freed; it would keep the holes, at twice the peak memory."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, size)  # M_MMAP_THRESHOLD
