"""Products with packed weights against the float64 product of the decoded weights."""

from __future__ import annotations

import pytest
import torch

from autoq.errors import AutoqError
from autoq.formats import reference
from autoq.formats.catalog import WEIGHT_FORMATS, weight_format
from autoq.formats.format import Format
from autoq.kernels.encode import encode
from autoq.kernels.launch import interpreted
from autoq.kernels.product import product

DEVICE = torch.device("cpu" if interpreted() else "cuda")
FORMATS = [
    f for f in WEIGHT_FORMATS.values() if not f.is_original and f.activation is None and f.rule in ("absmax", "floor", "minmax")
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of sum |x| |w|


def check(fmt: Format, tokens: int, dtype: torch.dtype, shape: tuple[int, int] = (41, 1271)) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(shape, generator=generator) * torch.exp2(torch.arange(shape[0]).view(-1, 1) % 7 - 5.0)
    weight[min(3, shape[0] - 1)] = 0.0
    packed = encode(fmt, weight.to(DEVICE))
    x = torch.randn(tokens, shape[1], generator=generator).to(dtype).to(DEVICE)
    found = product(x, packed)
    w = reference.decode(packed).double()
    bound = x.double().abs() @ w.abs().T
    assert found.dtype == dtype
    assert found.shape == (tokens, shape[0])
    off = (found.double() - x.double() @ w.T).abs()
    assert bool((off <= TOLERANCE[dtype] * bound).all()), float((off / bound.clamp(min=1e-30)).max())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_vectors_and_matrices_of_every_format(fmt: Format) -> None:
    for tokens in (1, 3, 17):
        check(fmt, tokens, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "int4_g32_asym", "int8", "fp8", "mxfp6_e2m3"])
def test_half_precision_inputs(name: str, dtype: torch.dtype) -> None:
    for tokens in (1, 20):
        check(weight_format(name), tokens, dtype)


def test_sizes_at_the_edges() -> None:
    check(weight_format("nvfp4"), 0, torch.float32, (5, 33))
    check(weight_format("int4_g64"), 2, torch.float32, (1, 1))
    check(weight_format("mxfp4"), 65, torch.float32, (3, 31))


def test_blocks_of_other_sizes_are_refused() -> None:
    fmt = weight_format("int4_g64")
    odd = type(fmt)(**{**fmt.__dict__, "name": "int4_g48", "block": 48})
    with pytest.raises(AutoqError, match="power of two, not of 48"):
        product(torch.ones(1, 96, device=DEVICE), reference.encode(odd, torch.ones(2, 96, device=DEVICE)))
