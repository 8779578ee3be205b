"""Elements and scales on every bfloat16 and float16 number there is, every tie and its neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoq.formats import reference
from autoq.formats.catalog import kv_format, weight_format
from autoq.formats.format import E2M1, E2M3, E3M2, E4M3, E5M2, FloatElement, Format
from autoq.formats.rounding import code_table
from autoq.kernels.decode import decode
from autoq.kernels.encode import encode
from autoq.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
ELEMENTS = [E2M1, E2M3, E3M2, E4M3, E5M2]


def every(dtype: torch.dtype) -> torch.Tensor:
    """Return all finite numbers of a 16-bit dtype."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


def unscaled(element: FloatElement) -> Format:
    """A format that rounds to the element with the scale 1 (its largest value starts every block)."""
    return Format(element.name, element, 16, "e4m3", tensor_scale=True)


def check(fmt: Format, x: torch.Tensor, absmax: torch.Tensor) -> None:
    expected = reference.encode(fmt, x, absmax=absmax)
    found = encode(fmt, x.to(DEVICE), absmax.to(DEVICE))
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(decode(found).cpu().view(torch.int32), reference.decode(expected).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_casts_to_e4m3_as_in_the_reference(dtype: torch.dtype) -> None:
    x = every(dtype)
    check(kv_format("fp8_cast").values, x.view(1, -1), torch.tensor(448.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_16_bit_number_rounds_to_every_element(element: FloatElement, dtype: torch.dtype) -> None:
    x = every(dtype)
    x = x[x.abs().float() <= element.largest]
    x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
    blocks = torch.cat([torch.full((len(x), 1), element.largest).to(dtype), x], dim=1)
    check(unscaled(element), blocks, torch.tensor(element.largest * 448.0))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_tie_and_its_neighbours(element: FloatElement) -> None:
    values = code_table(element).unique()
    values = values[values.abs() <= element.largest]
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    around = torch.cat([ties, torch.nextafter(ties, torch.tensor(1e9)), torch.nextafter(ties, torch.tensor(-1e9)), values])
    around = torch.nn.functional.pad(around, (0, -len(around) % 15)).view(-1, 15)
    blocks = torch.cat([torch.full((len(around), 1), element.largest), around], dim=1)
    check(unscaled(element), blocks, torch.tensor(element.largest * 448.0))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_every_power_of_two_scale(rule: Any) -> None:
    """Blocks whose largest magnitude is next to each power of two, from the smallest subnormal to the largest number."""
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    largest = torch.cat(
        [powers, torch.nextafter(powers, torch.tensor(0.0)), torch.nextafter(powers, torch.tensor(torch.inf)), powers * 1.5]
    )
    largest = largest[torch.isfinite(largest)].view(-1, 1)
    x = torch.cat([largest, largest * torch.linspace(-1, 1, 31)], dim=1)
    fmt = replace(weight_format("mxfp4"), rule=rule)
    expected, found = reference.encode(fmt, x), encode(fmt, x.to(DEVICE))
    assert expected.scales is not None
    assert found.scales is not None
    assert torch.equal(found.scales.block.cpu(), expected.scales.block)
    assert torch.equal(found.codes.cpu(), expected.codes)
