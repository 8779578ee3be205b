"""How kernels are launched: natively on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported

import torch
import triton

from autoq.errors import AutoqError

INTERPRETER_VALUES = 1 << 19  # a program costs a few milliseconds there, whatever its size
GPU_VALUES = 1 << 10


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def where() -> str:
    """Say where kernels run: the interpreter, or the GPU's name."""
    return "interpreter" if interpreted() or not torch.cuda.is_available() else torch.cuda.get_device_name()


def tile(device: torch.device) -> int:
    """Return how many values a program takes; raises AutoqError where no kernel can run on this device."""
    if device.type == "cuda" and not interpreted():
        return GPU_VALUES
    if interpreted():
        return INTERPRETER_VALUES
    raise AutoqError(
        f"kernels cannot run on {device}: without a GPU they need Triton's interpreter, which is chosen before triton is first imported: "
        "load the model with autoq.load_model, or set TRITON_INTERPRET=1 before python starts"
    )
