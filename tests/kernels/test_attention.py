"""Decode attention over packed bytes against float64 attention over the decoded cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoq.errors import AutoqError
from autoq.formats.catalog import KV_FORMATS, kv_format
from autoq.formats.format import Format, KVFormat
from autoq.kernels.attention import attention
from autoq.kernels.launch import interpreted
from autoq.model.packed_tokens import PackedTokens, kernels
from tests.conftest import calibrated

DEVICE = torch.device("cpu" if interpreted() else "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest output
ORIGINAL = KVFormat("bf16", Format("bf16", None))


def side(
    fmt: KVFormat, tokens: int, seed: int, dtype: torch.dtype, batch: int = 2, heads: int = 2, head_dim: int = 64
) -> PackedTokens:
    """Return a cache filled in two steps."""
    x = torch.randn(batch, heads, tokens, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    held = PackedTokens(fmt, calibrated(4.5, heads, head_dim), kernels())
    held.append(x[:, :, : tokens // 3])
    held.append(x[:, :, tokens // 3 :])
    return held


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, visible: torch.Tensor | None = None,
             softcap: float | None = None) -> torch.Tensor:  # fmt: skip
    group = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(group, 1) for t in (key, value))
    logits = query.double() @ key.transpose(2, 3) * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
    return logits.softmax(-1).nan_to_num() @ value


def check(key: PackedTokens, value: PackedTokens, heads: int, dtype: torch.dtype = torch.float32, **options: object) -> None:
    k, v = key.read(), value.read()
    batch, _, tokens, head_dim = k.shape
    query = torch.randn(batch, heads, 1, head_dim, generator=torch.Generator().manual_seed(9)).to(dtype).to(DEVICE)
    found = attention(query, key.cached(), value.cached(), head_dim**-0.5, **options)  # type: ignore[arg-type]
    visible = options.get("mask")
    if "window" in options:
        visible = (torch.arange(tokens, device=DEVICE) >= tokens - int(options["window"])).expand(batch, -1)  # type: ignore[call-overload]
    want = expected(query, k, v, head_dim**-0.5, visible, options.get("softcap"))  # type: ignore[arg-type]
    assert found.dtype == dtype
    assert found.shape == query.shape
    assert float((found.double() - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("name", [n for n, f in KV_FORMATS.items() if not f.is_original])
def test_every_format_as_key_and_as_value(name: str) -> None:
    fmt, other = kv_format(name), kv_format("nvfp4")
    check(side(fmt, 77, 0, torch.float32), side(other, 77, 1, torch.float32), heads=2)
    check(side(other, 77, 2, torch.float32), side(fmt, 77, 3, torch.float32), heads=8)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_head_dims_and_query_heads(ratio: int, head_dim: int) -> None:
    for k, v in (("nvfp4", "int4_token"), ("int4_channel", "fp8_cast"), ("mxfp4", "int8_token")):
        key = side(kv_format(k), 50, 0, torch.float32, batch=1, head_dim=head_dim)
        check(key, side(kv_format(v), 50, 1, torch.float32, batch=1, head_dim=head_dim), heads=2 * ratio)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 257, 4097])
def test_lengths_and_stretches(tokens: int) -> None:
    key = side(kv_format("int4_channel"), tokens, 0, torch.float32, batch=1)
    value = side(kv_format("nvfp4"), tokens, 1, torch.float32, batch=1)
    for splits in (1, 3, 8):
        check(key, value, heads=4, splits=splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(side(kv_format("fp8_cast"), 100, 0, dtype), side(kv_format("nvfp4"), 100, 1, dtype), heads=8, dtype=dtype)


def test_residual_and_sink_tokens_are_read_in_16_bit() -> None:
    kept = replace(kv_format("nvfp4"), name="kept", residual=20, sink=5)
    grouped = replace(kv_format("int4_channel"), name="grouped", residual=10, sink=32)
    for k, v in ((kept, grouped), (grouped, kept), (ORIGINAL, kept), (kept, ORIGINAL)):
        for tokens in (3, 30, 150):
            check(side(k, tokens, 0, torch.float32), side(v, tokens, 1, torch.float32), heads=4, splits=2)


def test_padding_windows_and_softcap() -> None:
    key, value = side(kv_format("nvfp4"), 90, 0, torch.float32), side(kv_format("int8_token"), 90, 1, torch.float32)
    mask = torch.ones(2, 90, dtype=torch.bool, device=DEVICE)
    mask[1, :40] = False
    check(key, value, heads=4, mask=mask, splits=4)
    check(key, value, heads=4, window=33, splits=2)
    check(key, value, heads=4, window=500)
    check(key, value, heads=4, softcap=2.0)


def test_a_row_that_sees_nothing_is_zero() -> None:
    key, value = side(kv_format("nvfp4"), 40, 0, torch.float32), side(kv_format("nvfp4"), 40, 1, torch.float32)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    check(key, value, heads=2, mask=mask)
    query = torch.ones(2, 2, 1, 64, device=DEVICE)
    assert float(attention(query, key.cached(), value.cached(), 1.0, window=0).abs().max()) == 0.0


def test_what_does_not_fit_is_refused() -> None:
    key, value = side(kv_format("nvfp4"), 40, 0, torch.float32), side(kv_format("nvfp4"), 41, 1, torch.float32)
    with pytest.raises(AutoqError, match="holds 40 keys but 41 values"):
        attention(torch.ones(2, 2, 1, 64, device=DEVICE), key.cached(), value.cached(), 1.0)
    narrow = side(kv_format("nvfp4"), 40, 1, torch.float32, head_dim=32)
    with pytest.raises(AutoqError, match="as wide as the queries, 64, not 64 and 32"):
        attention(torch.ones(2, 2, 1, 64, device=DEVICE), key.cached(), narrow.cached(), 1.0)
    with pytest.raises(AutoqError, match="one query a sequence, not 3"):
        attention(torch.ones(2, 2, 3, 64, device=DEVICE), key.cached(), key.cached(), 1.0)
