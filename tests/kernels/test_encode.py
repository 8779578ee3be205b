"""encode and decode against the torch reference: every bit of codes, scales, zero points and decoded values."""

from __future__ import annotations

import pytest
import torch

from autoq.formats import reference
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format
from autoq.formats.reference import Packed, Scales
from autoq.kernels.decode import decode
from autoq.kernels.encode import encode
from autoq.kernels.launch import interpreted

FORMATS = [f for f in WEIGHT_FORMATS.values() if not f.is_original and f.activation is None]


DEVICE = torch.device("cpu" if interpreted() else "cuda")  # the same tests run on a GPU where there is one


def cases(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices [41, 1271] and smaller that hold what breaks encoders."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(41, 1271, generator=generator)
    halves = torch.randint(-40, 41, (16, 256), generator=generator) / 4.0  # ties of E2M1, E2M3 and integers under scales of 2^n
    halves[:, ::16] = 6.0 * 2.0 ** torch.arange(-8, 8).view(-1, 1)
    outlier = torch.zeros(8, 384)
    outlier[torch.arange(8), torch.arange(8) * 37] = torch.tensor([1e-30, 1e-8, 1.0, -1.0, -448.0, 6e4, -3e38, 65504.0])
    zeros = torch.zeros(4, 256)
    zeros[1] = -0.0
    zeros[2, 40:] = gaussian[2, 40:256]
    denormal = gaussian[:8, :320] * 1e-40
    spread = gaussian[:32, :512] * torch.exp2(torch.arange(32).view(-1, 1) * 4.0 - 64)
    mirrored = gaussian[:8, :256].clone()
    mirrored[:, 1::2] = -mirrored[:, ::2]  # the largest magnitude occurs with both signs
    found = {"gaussian": gaussian, "ties": halves, "outlier": outlier, "zeros": zeros, "denormal": denormal, "spread": spread,
             "mirrored": mirrored, "one row": gaussian[:1, :130], "transposed": gaussian[:, :160].T}  # fmt: skip
    return {name: torch.where(torch.isfinite(x.to(dtype)), x, 0.0).to(dtype) for name, x in found.items()}


def on_device(packed: Packed) -> Packed:
    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(DEVICE)

    assert packed.scales is not None
    scales = Scales(packed.scales.block.to(DEVICE), moved(packed.scales.zero), moved(packed.scales.tensor))
    return Packed(packed.fmt, packed.shape, packed.codes.to(DEVICE), scales, moved(packed.zeros))


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal in every bit, the sign of zero too."""
    if a is None or b is None:
        return a is b
    bits = [t.cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_encode_and_decode_equal_the_reference(fmt: Format, dtype: torch.dtype) -> None:
    for name, x in cases(dtype).items():
        expected = reference.encode(fmt, x)
        found = encode(fmt, x.to(DEVICE))
        assert expected.scales is not None
        assert found.scales is not None
        assert same(found.scales.block, expected.scales.block), name
        assert same(found.scales.zero, expected.scales.zero), name
        assert same(found.scales.tensor, expected.scales.tensor), name
        assert same(found.codes, expected.codes), name
        assert same(found.zeros, expected.zeros), name
        assert found.nbytes * 8 == fmt.storage_bits((x.shape[0], x.shape[1])), name
        values = reference.decode(expected)
        assert same(decode(found), values), name
        assert same(decode(found, torch.bfloat16), values.to(torch.bfloat16)), name


def test_every_code_decodes_as_in_the_reference() -> None:
    for fmt in FORMATS:
        if fmt.rule in ("absmax", "floor", "minmax"):
            block = fmt.block or 256
            x = torch.randn(2, 4 * block, generator=torch.Generator().manual_seed(1))
            packed = reference.encode(fmt, x)
            codes = torch.arange(packed.codes.numel()).view(packed.codes.shape) * 37 % 256
            every = Packed(fmt, packed.shape, codes.to(torch.uint8), packed.scales, packed.zeros)
            assert same(decode(on_device(every)), reference.decode(every)), fmt.name


@pytest.mark.parametrize(("name", "least", "most"), [("nvfp4", 0.0085, 0.0095), ("nvfp4_4over6", 0.0071, 0.0081),
                         ("nvfp4_lsq", 0.0061, 0.0071), ("int4_g128", 0.0131, 0.0145)])  # fmt: skip
def test_the_error_on_gaussian_values_is_the_formats_own(name: str, least: float, most: float) -> None:
    """A wrong scale layout looks plausible but has another error: relative squared error within 6 % of the known one."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    fmt = WEIGHT_FORMATS[name]
    error = float((decode(encode(fmt, x)) - x).square().sum() / x.square().sum())
    assert least < error < most
