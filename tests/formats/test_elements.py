"""Element rounding against ml_dtypes: every code, every tie and its neighbours, every bfloat16 and float16 value."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from autoq.formats.format import E2M1, E2M3, E3M2, E4M3, E5M2, FloatElement, IntElement
from autoq.formats.rounding import code_table, decode_element, encode_element, pack_bits, round_to_element_, unpack_bits

PEERS = [
    (E2M1, ml_dtypes.float4_e2m1fn),
    (E2M3, ml_dtypes.float6_e2m3fn),
    (E3M2, ml_dtypes.float6_e3m2fn),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
]
NAMES = [e.name for e, _ in PEERS]


def finite_values(element: FloatElement) -> torch.Tensor:
    table = code_table(element)
    values: torch.Tensor = table[table.abs() <= element.largest].unique()
    return values


def peer(x: torch.Tensor, element: FloatElement, dtype: type) -> torch.Tensor:
    clamped = x.clamp(-element.largest, element.largest).numpy()
    return torch.from_numpy(clamped.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(("element", "dtype"), PEERS, ids=NAMES)
def test_every_code_decodes_as_in_ml_dtypes(element: FloatElement, dtype: type) -> None:
    codes = np.arange(2**element.bits, dtype=np.uint8)
    expected = torch.from_numpy(codes.view(dtype).astype(np.float32))
    mine = decode_element(torch.from_numpy(codes), element)
    known = expected.abs() <= element.largest  # NaN and inf codes aside
    assert torch.equal(mine[known], expected[known])
    assert torch.equal(torch.signbit(mine[known]), torch.signbit(expected[known]))


@pytest.mark.parametrize(("element", "dtype"), PEERS, ids=NAMES)
def test_every_tie_and_its_neighbours_round_as_in_ml_dtypes(element: FloatElement, dtype: type) -> None:
    values = finite_values(element)
    ties = (values[1:] + values[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    around = torch.cat([values, ties, torch.nextafter(ties, infinity), torch.nextafter(ties, -infinity)])
    around = torch.cat([around, torch.tensor([element.largest * 1.01, -element.largest * 3, 1e30, -1e30, 0.0, -0.0, 1e-40])])
    assert torch.equal(round_to_element_(around.clone(), element), peer(around, element, dtype))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("element", "dtype"), PEERS, ids=NAMES)
def test_every_16_bit_value_rounds_as_in_ml_dtypes(element: FloatElement, dtype: type, source: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source).to(torch.float32)
    every = every[torch.isfinite(every)]
    assert torch.equal(round_to_element_(every.clone(), element), peer(every, element, dtype))


@pytest.mark.parametrize("element", [e for e, _ in PEERS], ids=NAMES)
def test_encode_and_decode_are_inverse_on_the_grid(element: FloatElement) -> None:
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    values = decode_element(codes, element)
    known = values.abs() <= element.largest
    back = encode_element(values, element, torch.signbit(values))
    assert torch.equal(back[known], codes[known])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_round_half_to_even_and_saturate(bits: int) -> None:
    element = IntElement(bits)
    t = torch.tensor([0.5, 1.5, -0.5, -1.5, 1e9, -1e9, -0.0])
    expected = torch.tensor([0.0, min(2, element.high), 0.0, -2.0, element.high, element.low, 0.0])
    assert torch.equal(round_to_element_(t, element), expected)
    values = torch.arange(element.low, element.high + 1, dtype=torch.float32)
    assert torch.equal(decode_element(encode_element(values, element, values < 0), element), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [1, 7, 16, 33])
def test_bits_pack_and_unpack(bits: int, n: int) -> None:
    codes = torch.randint(0, 2**bits, (5, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    packed = pack_bits(codes, bits)
    assert packed.shape == (5, -(-n * bits // 8))
    assert torch.equal(unpack_bits(packed, bits, n), codes)


def test_the_low_nibble_is_the_even_index() -> None:
    assert pack_bits(torch.tensor([[0x3, 0xA]], dtype=torch.uint8), 4).tolist() == [[0xA3]]
