"""Weights as the kernels pack them: encode to bytes, check them, decode, and run the model on what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from autoq import codec
from autoq.formats import reference
from autoq.formats.format import Format
from autoq.formats.reference import Packed
from autoq.kernels.decode import decode
from autoq.kernels.encode import encode
from autoq.model.unit import ModelUnits, WeightTensor


@dataclass(frozen=True)
class PackedTensor:
    """What packing one tensor showed.

    Attributes:
        stored_bits: really held; priced_bits: what the cost model counts.
        differs: what the kernels and the reference do not agree on to the bit: "codes", "scales", "zero points", "values".
    """

    unit: str
    tensor: str
    format: str
    stored_bits: int
    priced_bits: int
    differs: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return self.stored_bits == self.priced_bits and not self.differs


def pack_tensor(weight: torch.Tensor, fmt: Format, transposed: bool) -> tuple[torch.Tensor, int, tuple[str, ...]]:
    """Return (decoded weight in its own shape and dtype, bits really stored, what differs from the reference)."""
    found: set[str] = set()
    stored = 0
    decoded = []
    for matrix in codec.matrices(weight, transposed):
        packed = encode(fmt, matrix)
        values = decode(packed)
        expected = reference.encode(fmt, matrix)
        found |= differences(packed, expected)
        if not same_bits(values, reference.decode(expected)):
            found.add("values")
        stored += 8 * packed.nbytes
        decoded.append(values.to(weight.dtype))
    stacked = torch.stack(decoded)
    return (stacked.transpose(1, 2) if transposed else stacked).reshape(weight.shape), stored, tuple(sorted(found))


def differences(packed: Packed, expected: Packed) -> set[str]:
    """Name the parts of two packed matrices that differ in a bit."""
    pairs = {"codes": (packed.codes, expected.codes), "zero points": (packed.zeros, expected.zeros)}
    if packed.scales is not None and expected.scales is not None:
        pairs["scales"] = (packed.scales.block, expected.scales.block)
        pairs["tensor scale"] = (packed.scales.tensor, expected.scales.tensor)
    return {name for name, (a, b) in pairs.items() if not same_bits(a, b)}


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """True if two tensors agree in every bit, NaN and the sign of zero too."""
    if a is None or b is None:
        return a is b
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@contextmanager
def packed_weights(
    model: PreTrainedModel,
    units: ModelUnits,
    formats: Mapping[str, Format],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[list[PackedTensor]]:
    """Pack the weights of the named units, run the block on what decodes from the bytes, and put the model's own back.

    Yields what every tensor showed. Raises UserError naming a tensor with NaN or infinite values.
    """
    todo: list[tuple[str, WeightTensor, Format]] = [
        (u.name, t, formats[u.name])
        for u in units.weights
        if u.name in formats and not formats[u.name].is_original
        for t in u.tensors
    ]
    shown = []
    with ExitStack() as stack:
        for i, (unit, tensor, fmt) in enumerate(todo):
            progress(i, len(todo))
            parameter = model.get_parameter(tensor.parameter)
            codec.check_finite(parameter.data, tensor.name)
            stack.callback(setattr, parameter, "data", parameter.data)
            decoded, stored, differs = pack_tensor(parameter.data, fmt, tensor.is_transposed)
            shown.append(PackedTensor(unit, tensor.name, fmt.name, stored, fmt.storage_bits(tensor.matrix_shape), differs))
            parameter.data = decoded
        progress(len(todo), len(todo))
        yield shown
