"""A small run of every Triton kernel against its reference, for `autoq doctor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from autoq.errors import AutoqError
from autoq.formats import reference
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS
from autoq.kernels import launch
from autoq.kernels.attention import attention
from autoq.kernels.decode import decode
from autoq.kernels.encode import encode
from autoq.kernels.kl import token_divergence
from autoq.kernels.product import product
from autoq.kernels.score import score
from autoq.model.packed_tokens import PackedTokens, kernels

FORMATS = ("nvfp4", "int4_g64", "mxfp4", "int8")  # one of every kind of scale
CACHES = ("int4_channel", "fp8")
CLOSE = 1e-4  # of the largest value, in float32


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _near(found: torch.Tensor, expected: torch.Tensor) -> None:
    off = float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
    if not off <= CLOSE:
        raise AutoqError(f"its result is {off:.2g} of the largest value away from the reference")


def _encode(device: torch.device) -> None:
    x = _values(8, 128).to(device)
    for name in FORMATS:
        found, expected = encode(WEIGHT_FORMATS[name], x), reference.encode(WEIGHT_FORMATS[name], x)
        if not torch.equal(found.codes, expected.codes):
            raise AutoqError(f"its codes of {name} are not the reference's")


def _decode(device: torch.device) -> None:
    x = _values(8, 128).to(device)
    for name in FORMATS:
        packed = reference.encode(WEIGHT_FORMATS[name], x)
        if not torch.equal(decode(packed), reference.decode(packed)):
            raise AutoqError(f"its values of {name} are not the reference's")


def _product(device: torch.device) -> None:
    packed = reference.encode(WEIGHT_FORMATS["nvfp4"], _values(16, 128).to(device))
    x = _values(3, 128).to(device)
    _near(product(x, packed), x.double() @ reference.decode(packed).double().T)


def _score(device: torch.device) -> None:
    weight, gradient, fmt = _values(8, 128).to(device), _values(2, 8, 128).to(device), WEIGHT_FORMATS["nvfp4"]
    found = score(weight, gradient, [fmt], [reference.fit(fmt, weight)])
    delta = reference.fake_quantize(fmt, weight).double() - weight.double()
    _near(found[:, :, 0].T, (gradient.double() * delta).sum(1))


def _kl(device: torch.device) -> None:
    p = _values(2, 300).to(device)
    q = p.flip(0)
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    _near(token_divergence(p, q, torch.zeros(2, dtype=torch.int64, device=device)).kl, (log_p.exp() * (log_p - log_q)).sum(-1))


def _attention(device: torch.device) -> None:
    key, value = (_held(name, device) for name in CACHES)
    query = _values(1, 2, 1, 64).to(device)
    k, v = key.read().double(), value.read().double()
    weights = (query.double() @ k.transpose(2, 3) / 8).softmax(-1)
    _near(attention(query, key.cached(), value.cached(), 1 / 8), weights @ v)


def _held(name: str, device: torch.device) -> PackedTokens:
    held = PackedTokens(KV_FORMATS[name], Calibration(5.0), kernels())
    held.append(_values(1, 2, 70, 64).to(device))
    return held


PROBES: dict[str, Callable[[torch.device], None]] = {
    "encode": _encode, "decode": _decode, "product": _product, "score": _score, "kl": _kl, "attention": _attention,
}  # fmt: skip


def state_of(probe: Callable[[torch.device], None], device: torch.device) -> str:
    """Run a probe; return "ok" or what went wrong."""
    try:
        probe(device)
    except Exception as error:  # whatever a compiler or a driver raises is what the user wants to know
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "ok"


def main() -> None:
    """Print where kernels run, and what each came to, as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"where": launch.where(), "kernels": {name: state_of(probe, device) for name, probe in PROBES.items()}}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
