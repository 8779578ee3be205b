"""Whether a measurement runs through the project's own kernels: on a GPU; on a CPU torch is the fast path."""

from __future__ import annotations

import torch


def has_kernels(device: torch.device) -> bool:
    """True where kernels run natively."""
    return device.type == "cuda"
