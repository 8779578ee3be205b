"""Contracts that every format keeps: bytes as priced, decode(encode(x)), zeros, extremes, and the error it must have."""

from __future__ import annotations

import pytest
import torch

from autoq.formats import reference
from autoq.formats.catalog import WEIGHT_FORMATS, weight_format
from autoq.formats.format import Format

ALL = list(WEIGHT_FORMATS.values())
ROUNDED = [f for f in ALL if not f.is_original]
SHAPES = [(3, 128), (41, 1271), (2, 576), (1, 256)]

# Relative squared error on Gaussian values, 256 x 1024, seed 0: what each format must have (formats.md where it says so).
GAUSSIAN = {
    "nvfp4": 0.0090, "nvfp4_4over6": 0.0076, "nvfp4_lsq": 0.0066, "int4_g128": 0.0138, "int4_g128_half": 0.0123,
    "mxfp4": 0.0132, "fp8": 0.0007, "int8": 6e-5, "mxfp8": 0.0008, "mxfp6_e2m3": 0.0008, "int3_g64_asym": 0.038, "int2_g32_asym": 0.166,
}  # fmt: skip


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(fmt: Format, x: torch.Tensor) -> float:
    return float((reference.fake_quantize(fmt, x) - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_packed_bytes_are_the_priced_bits_and_decode_to_the_fake_quantized_values(fmt: Format, shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    packed = reference.encode(fmt, x)
    assert 8 * packed.nbytes == fmt.storage_bits(shape)
    decoded = reference.decode(packed)
    assert decoded.shape == x.shape
    if not fmt.is_original:
        assert torch.equal(decoded, reference.fake_quantize(fmt, x))


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_error_on_gaussian_values_is_the_one_the_format_must_have(name: str) -> None:
    error = relative_error(weight_format(name), gaussian(256, 1024))
    assert 0.5 * GAUSSIAN[name] < error < 1.2 * GAUSSIAN[name]


@pytest.mark.parametrize("fmt", ROUNDED, ids=lambda f: f.name)
def test_zeros_stay_zero_and_extremes_stay_finite(fmt: Format) -> None:
    zero = torch.zeros(4, 256)
    assert torch.equal(reference.decode(reference.encode(fmt, zero)), zero)
    mixed = gaussian(4, 256)
    mixed[1] = 0.0
    mixed[2, :128] = 0.0
    decoded = reference.fake_quantize(fmt, mixed)
    assert torch.equal(decoded[1], torch.zeros(256))
    for scale in (1e-38, 1e-20, 1e4, 1e30):
        assert torch.isfinite(reference.decode(reference.encode(fmt, mixed * scale))).all()
    for special in (torch.full((2, 256), -0.0), torch.full((2, 256), 1e-45), torch.full((2, 256), 3e38)):
        assert torch.isfinite(reference.decode(reference.encode(fmt, special))).all()


@pytest.mark.parametrize("fmt", [f for f in ROUNDED if f.rule in ("absmax", "floor", "even")], ids=lambda f: f.name)
def test_values_on_the_grid_are_kept(fmt: Format) -> None:
    """Rounding twice is rounding once, up to the scale's own rounding; other rules move the scale and hence the grid."""
    once = reference.fake_quantize(fmt, gaussian(8, 256))
    assert relative_error(fmt, once) < 0.02 * relative_error(fmt, gaussian(8, 256)) + 1e-6


@pytest.mark.parametrize("plain", ["nvfp4", "mxfp4", "int4_g64", "int4_g128", "int4_g32_asym", "int3_g64_asym", "int2_g32_asym"])
def test_least_squares_scales_never_have_more_error_in_any_block(plain: str) -> None:
    x = gaussian(16, 512, seed=3)
    fmt, better = weight_format(plain), weight_format(f"{plain}_lsq")
    blocks = reference.to_blocks(x, fmt)
    first = reference.squared_error(fmt, blocks, reference.fit(fmt, x))
    second = reference.squared_error(better, blocks, reference.fit(better, x))
    assert (second <= first).all()
    assert second.sum() < first.sum()


def test_importance_moves_the_least_squares_scale_toward_the_important_inputs() -> None:
    fmt = weight_format("nvfp4_lsq")
    x = gaussian(32, 256, seed=5)
    importance = torch.ones(256)
    importance[::2] = 25.0
    plain, weighted = reference.fit(fmt, x), reference.fit(fmt, x, importance=importance)

    def error(scales: reference.Scales) -> float:
        return float(((reference.fake_quantize(fmt, x, scales) - x).square() * importance).sum())

    assert error(weighted) < error(plain)


def test_nvfp4_golden_block() -> None:
    """absmax 6 and a tensor scale of 6/(6*448): block scale 448, hence the values themselves are the grid."""
    x = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25]])
    packed = reference.encode(weight_format("nvfp4"), x)
    assert packed.scales is not None
    assert packed.scales.block.tolist() == [[0x7E]]
    rounded = [0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]
    assert torch.allclose(reference.decode(packed), torch.tensor([rounded]), rtol=1e-6)
    assert packed.codes[0, :4].tolist() == [0x10, 0x3A, 0xD4, 0x76]


def test_mx_scale_is_the_power_of_two_of_the_specification() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 5.9
    for name, code in (("mxfp4", 127), ("mxfp4_ceil", 127), ("mxfp4_even", 127)):
        assert reference.fit(weight_format(name), x).block.item() == code, name
    x[0, 0] = 7.5  # floor clips it to 6, ceil does not, even rounds the mantissa 1.875 up to 2
    for name, code in (("mxfp4", 127), ("mxfp4_ceil", 128), ("mxfp4_even", 128)):
        assert reference.fit(weight_format(name), x).block.item() == code, name


def test_full_range_maps_the_largest_entry_to_minus_eight() -> None:
    x = gaussian(1, 64, seed=2)
    scales = reference.fit(weight_format("int4_g64_full"), x)
    values = reference.quantize(weight_format("int4_g64_full"), reference.to_blocks(x, weight_format("int4_g64_full")), scales)
    assert values.flatten()[x.abs().argmax()] == -8
    assert torch.sign(scales.block).item() == -torch.sign(x.flatten()[x.abs().argmax()]).item()
