"""The one door to encode, decode and fake-quantize what a model holds: weights in any layout, K and V caches.

Formats know matrices [rows, width]; this file knows how a model's tensors become such matrices and back. It runs the torch
reference; kernels plug in here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoq.errors import UserError
from autoq.formats import reference
from autoq.formats.calibration import Calibration
from autoq.formats.format import Format, KVFormat
from autoq.formats.reference import Packed
from autoq.formats.rotation import rotate

ROWS_VALUES = 1 << 22  # values worked on at a time


def matrices(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Return a weight as [matrices, rows (outputs), width (inputs)]; a view."""
    view = weight.detach().reshape(-1, *weight.shape[-2:])
    return view.transpose(1, 2) if transposed else view


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise UserError naming the tensor if it holds NaN or infinite values."""
    if not torch.isfinite(weight).all():
        raise UserError(f"the tensor {name!r} holds NaN or infinite values")


def encode_weight(weight: torch.Tensor, fmt: Format, transposed: bool = False, name: str = "the weight") -> list[Packed]:
    """Pack a weight, one Packed per matrix; `transposed` says that it is stored [..., inputs, outputs].

    Raises UserError naming the tensor if it holds NaN or infinite values.
    """
    check_finite(weight, name)
    return [reference.encode(fmt, m) for m in matrices(weight, transposed)]


def decode_weight(packed: list[Packed], like: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Undo encode_weight, in the shape and dtype of `like`."""
    stacked = torch.stack([reference.decode(p) for p in packed])
    return (stacked.transpose(1, 2) if transposed else stacked).reshape(like.shape).to(like.dtype)


def fake_quantize_weight(
    weight: torch.Tensor, fmt: Format, transposed: bool = False, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """Return decode(encode(weight)) in the weight's shape and dtype.

    `importance` [inputs] weights the squared error where the format picks its scale by least squares.
    """
    out = torch.empty_like(weight)
    target = out.view(-1, *weight.shape[-2:])
    for i, matrix in enumerate(matrices(weight, transposed)):
        absmax = matrix.abs().amax().to(torch.float32) if fmt.tensor_scale else None
        step = max(1, ROWS_VALUES // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            rows = slice(start, start + step)
            scales = None
            if importance is not None and fmt.rule == "least_squares":
                scales = reference.fit(fmt, matrix[rows], absmax, importance)
            values = reference.fake_quantize(fmt, matrix[rows], scales, absmax).to(weight.dtype)
            if transposed:
                target[i, :, rows] = values.T
            else:
                target[i, rows] = values
    return out


def fake_quantize_activation(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return x [..., width] with every token quantized dynamically."""
    return reference.fake_quantize(fmt, x.reshape(-1, x.shape[-1])).to(x.dtype).view(x.shape)


def cache_versions(x: torch.Tensor, fmt: KVFormat, calibration: Calibration) -> list[torch.Tensor]:
    """Return K or V as each format of the chain holds it, every token quantized; an older format encodes what a newer one made."""
    versions: list[torch.Tensor] = []
    for one in fmt.chain:
        versions.append(fake_quantize_cache(versions[-1] if versions else x, one, calibration))
    return versions


def fake_quantize_cache(x: torch.Tensor, fmt: KVFormat, calibration: Calibration) -> torch.Tensor:
    """Return K or V [batch, KV heads, tokens, head_dim] as read back from a cache in this format, every token quantized.

    Which tokens a query really reads quantized is the business of `kv_visibility`. A rotated format's values are rotated back.
    """
    if fmt.is_original:
        return x
    fmt = fmt.for_head_dim(x.shape[-1])
    static = calibration.static(fmt, x)
    if fmt.rotate:
        return rotate(fake_quantize_cache(rotate(x), replace(fmt, rotate=False), replace(calibration, absmax=calibration.rotated)))
    if fmt.center:
        mean = calibration.mean_like(x)
        around = replace(calibration, absmax=calibration.centered)
        return (fake_quantize_cache((x - mean).to(x.dtype), replace(fmt, center=False), around) + mean).to(x.dtype)
    if fmt.refresh:
        static = calibration.by_token(fmt, x.abs().amax((1, 3)).to(torch.float32))
        static = static.unsqueeze(1).expand(x.shape[:3]).reshape(-1, 1)
    if fmt.axis == "token":
        return reference.fake_quantize(fmt.values, x.reshape(-1, x.shape[-1]), absmax=static).view(x.shape).to(x.dtype)
    whole = x.shape[2] - x.shape[2] % (fmt.values.block or 1)
    groups = x[:, :, :whole].transpose(2, 3)
    rounded = reference.fake_quantize(fmt.values, groups.reshape(-1, whole), absmax=static) if whole else groups
    return torch.cat([rounded.view(groups.shape).transpose(2, 3).to(x.dtype), x[:, :, whole:]], dim=2)
