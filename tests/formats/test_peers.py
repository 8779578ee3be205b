"""The reference against compressed-tensors, where it has the format. Differences are stated beside each test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoq.formats import reference
from autoq.formats.catalog import weight_format

compressed = pytest.importorskip("compressed_tensors")


def peer(x: torch.Tensor, with_global_scale: bool = False, **arguments: Any) -> tuple[torch.Tensor, Any]:
    """Return compressed-tensors' own block scales [rows, blocks] and a function from scales to decoded values."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    group = args.group_size if args.group_size and args.group_size > 0 else x.shape[1]
    blocks = x.view(x.shape[0], -1, group)
    top = generate_gparam(x.amin(), x.amax()) if with_global_scale else None
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=top)
    return scale, lambda scales: fake_quantize(x, scales, zero, args, global_scale=top)


def test_int4_group_scale_over_seven_and_a_half() -> None:
    """compressed-tensors: scale = absmax / 7.5 in the weight's dtype (float32 here). Ours is stored in float16."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    scale, decode = peer(x, num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
    fmt = weight_format("int4_g128_half")
    mine = reference.fit(fmt, x)
    assert torch.equal(mine.block, scale.to(torch.float16))
    assert torch.equal(reference.fake_quantize(fmt, x), decode(mine.block.to(torch.float32)))


def test_fp8_rows() -> None:
    """The same scale, absmax / 448, and the same rounding."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    scale, decode = peer(x, num_bits=8, type="float", symmetric=True, strategy="channel")
    fmt = weight_format("fp8")
    torch.testing.assert_close(reference.fit(fmt, x).block, scale, rtol=1e-6, atol=0)
    assert torch.equal(reference.fake_quantize(fmt, x), decode(reference.fit(fmt, x).block))


def test_nvfp4() -> None:
    """compressed-tensors stores the inverse of the tensor scale, so a block scale on an E4M3 tie may fall on either side."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    scale, decode = peer(
        x, with_global_scale=True, num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    fmt = weight_format("nvfp4")
    mine = reference.fit(fmt, x)
    stored = mine.block.view(torch.float8_e4m3fn).to(torch.float32)
    theirs = scale.to(torch.float32)
    assert ((stored - theirs).abs() <= stored / 8).all()
    assert (stored == theirs).float().mean() > 0.99
    same = (stored == theirs).repeat_interleave(16, 1)
    torch.testing.assert_close(reference.fake_quantize(fmt, x)[same], decode(scale)[same], rtol=1e-5, atol=1e-7)
