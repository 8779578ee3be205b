"""The scoring kernel against fake quantization in torch and a float64 product."""

from __future__ import annotations

import pytest
import torch

from autoq.errors import AutoqError
from autoq.formats.catalog import WEIGHT_FORMATS, weight_format
from autoq.formats.format import Format
from autoq.formats.reference import fake_quantize, fit
from autoq.kernels.launch import interpreted
from autoq.kernels.score import score

DEVICE = torch.device("cpu" if interpreted() else "cuda")
BY_BLOCK: dict[int | None, list[Format]] = {}
for candidate in WEIGHT_FORMATS.values():
    if not candidate.is_original and candidate.activation is None:
        BY_BLOCK.setdefault(candidate.block, []).append(candidate)


def weight_and_gradient(dtype: torch.dtype, shape: tuple[int, int] = (41, 1271)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    weight[2] = 0.0
    weight[3] *= 1e-40
    weight[4] *= 1e30 if dtype != torch.float16 else 1e3
    return weight.to(dtype).to(DEVICE), torch.randn(3, *shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("block", BY_BLOCK, ids=str)
def test_every_format_of_a_block_size_at_once(block: int | None, dtype: torch.dtype) -> None:
    formats = BY_BLOCK[block]
    weight, gradient = weight_and_gradient(dtype)
    x = weight.float()
    found = score(weight, gradient, formats, [fit(f, x) for f in formats])
    assert found.shape == (1271, 3, len(formats))
    for i, fmt in enumerate(formats):
        delta = fake_quantize(fmt, x).double() - x.double()
        parts = gradient.double() * delta
        bound = parts.abs().sum(1) + (gradient.double() * x.double()).abs().sum(1) * 2.0**-20  # Q(W) - W cancels in float32
        off = (found[:, :, i].T.double() - parts.sum(1)).abs()
        assert bool((off <= 1e-5 * bound).all()), (fmt.name, float((off / bound).max()))


def test_strides_are_followed() -> None:
    weight, gradient = weight_and_gradient(torch.float32, (96, 64))
    formats = [weight_format("nvfp4"), weight_format("nvfp4_4over6")]
    scales = [fit(f, weight) for f in formats]
    expected = score(weight, gradient, formats, scales)
    turned = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(score(weight.T.contiguous().T, turned, formats, scales), expected)


def test_formats_of_several_blocks_are_refused() -> None:
    weight, gradient = weight_and_gradient(torch.float32, (16, 64))
    formats = [weight_format("nvfp4"), weight_format("mxfp4")]
    with pytest.raises(AutoqError, match="one block size"):
        score(weight, gradient, formats, [fit(f, weight) for f in formats])
