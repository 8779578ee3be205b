"""pack against `pack_bits`: every width of code, ragged rows."""

from __future__ import annotations

import pytest
import torch

from autoq.formats.rounding import pack_bits
from autoq.kernels.launch import interpreted
from autoq.kernels.pack import pack

DEVICE = "cpu" if interpreted() else "cuda"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 1271), (41, 50), (7, 64), (3, 9)])
def test_the_stream_is_that_of_the_reference(bits: int, shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    assert torch.equal(pack(codes.to(DEVICE), bits).cpu(), pack_bits(codes, bits))
