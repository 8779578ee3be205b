"""Attention of the newest tokens' queries over a packed KV cache: flash-decoding, nothing expanded in memory.

A program takes one KV head with all its query heads, and one of several stretches of the tokens (Dao et al. 2023,
"Flash-Decoding"): it decodes a tile of keys in registers, scales folded in, keeps a running softmax (Milakov and Gimelshein
2018), and does the same for values. Partial results of the stretches are then added by their log-sum-exps. K and V may be in different
formats; the first tokens (sink) and the newest (residual, incomplete group) are read in 16 bit from where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from autoq.errors import AutoqError
from autoq.formats.format import IntElement, KVFormat
from autoq.formats.rotation import rotate
from autoq.kernels.decode import read_elements, read_scale
from autoq.kernels.elements import to_float32
from autoq.kernels.encode import element_constants
from autoq.kernels.launch import interpreted, tile

TILE_VALUES = (
    1 << 11
)  # of K (then of V) decoded at a time on a GPU, half as many in float32, in at least 16 tokens: what registers hold
PROGRAMS = 512  # what keeps a large GPU busy
MOST_REGISTERS = 255  # a thread; left to itself ptxas stops at 128 or 168 and spills the rest
NOTHING = {
    "IS_FLOAT": False, "BITS": 8, "MANTISSA": 0, "BIAS": 0, "MIN_NORMAL": 1.0, "LARGEST": 127.0, "SCALE": "none", "ASYMMETRIC": False,
    "HAS_TENSOR": False, "CHANNEL": False, "BLOCK": 1, "HAS_MEAN": False,
}  # fmt: skip


@dataclass(frozen=True)
class CachedTokens:
    """The K or the V cache of one layer, as `autoq.model.packed_tokens` holds it.

    Attributes:
        fmt: its format, fitted to head_dim.
        codes: uint8 [batch, KV heads, units, rows of a unit, bytes], contiguous but for memory between heads; None while nothing is
            packed. scales: [batch, KV heads, units, rows, blocks] as stored, with as much memory between heads.
        zeros: uint8 [batch, KV heads, bytes], the zero points in that order, one bit stream a head; those of the tokens held begin
            at number `first_zero`.
        tensor: float32 scalar that multiplies every scale, or None.
        sink, recent: [batch, KV heads, tokens, head_dim] before and after the packed tokens.
        mean: float32 [KV heads, 1, head_dim] to add to packed tokens, or None. Tokens of a rotated format are rotated, all of them.
    """

    fmt: KVFormat
    codes: torch.Tensor | None
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    first_zero: int
    tensor: torch.Tensor | None
    sink: torch.Tensor | None
    recent: torch.Tensor
    mean: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """Tokens packed together."""
        return (self.fmt.values.block or 1) if self.fmt.axis == "channel" else 1

    @property
    def packed(self) -> int:
        """Number of packed tokens."""
        return 0 if self.codes is None else self.codes.shape[2] * self.unit

    @property
    def sunk(self) -> int:
        """Number of tokens kept before them."""
        return 0 if self.sink is None else self.sink.shape[2]

    @property
    def tokens(self) -> int:
        return self.sunk + self.packed + self.recent.shape[2]


@triton.jit
def read_tokens(codes_ptr, scales_ptr, zeros_ptr, tensor_ptr, sink_ptr, recent_ptr, sunk, packed, room, head_dim, row_bytes,
                zero_bytes, first_zero, mean_ptr, sink_batch, sink_head, sink_token, recent_batch, recent_head, recent_token, batch, head, heads, token, dim, inside,
                IS_FLOAT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MIN_NORMAL: tl.constexpr,
                LARGEST: tl.constexpr, SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_TENSOR: tl.constexpr, CHANNEL: tl.constexpr,
                BLOCK: tl.constexpr, HAS_MEAN: tl.constexpr):  # fmt: skip
    """Return float32 keys (or values) [tokens, head_dim] of one KV head, from wherever each is kept; 0 where not `inside`."""
    at = token - sunk
    is_packed = inside & ((at >= 0) & (at < packed))[:, None]
    owner = (batch * heads + head).to(tl.int64)
    if CHANNEL:
        row = at[:, None] // BLOCK * head_dim + dim[None, :]
        index = at[:, None] % BLOCK + tl.zeros_like(dim)[None, :]
        block = row
        blocks = 1
    else:
        row = at[:, None] + tl.zeros_like(dim)[None, :]
        index = dim[None, :] + tl.zeros_like(token)[:, None]
        blocks = (head_dim + BLOCK - 1) // BLOCK
        block = row * blocks + dim[None, :] // BLOCK
    value = read_elements(
        codes_ptr + owner * room * row_bytes + row * row_bytes, zeros_ptr + owner * zero_bytes, index, row_bytes, first_zero + block, zero_bytes,
        is_packed, IS_FLOAT, ASYMMETRIC, BITS, MANTISSA, BIAS, MIN_NORMAL, LARGEST,
    )  # fmt: skip
    if SCALE != "none":
        scale = read_scale(scales_ptr + owner * room * blocks, block, is_packed, SCALE)
        if HAS_TENSOR:
            scale = scale * tl.load(tensor_ptr)
        value = value * scale
    elif HAS_TENSOR:
        value = value * tl.load(tensor_ptr)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + head * head_dim + dim, mask=dim < head_dim, other=0.0)
        value += tl.where(is_packed, mean[None, :], 0.0)
    first = sink_ptr + batch.to(tl.int64) * sink_batch + head * sink_head + token[:, None] * sink_token + dim[None, :]
    value += to_float32(tl.load(first, mask=inside & (at < 0)[:, None], other=0.0))
    newest = (
        recent_ptr + batch.to(tl.int64) * recent_batch + head * recent_head + (at - packed)[:, None] * recent_token + dim[None, :]
    )
    return tl.where(is_packed, value, value + to_float32(tl.load(newest, mask=inside & (at >= packed)[:, None], other=0.0)))


@triton.jit
def attention_kernel(
    query_ptr, mask_ptr, out_ptr, max_ptr, sum_ptr,
    k_codes, k_scales, k_zeros, k_tensor, k_sink, k_recent, k_sunk, k_packed, k_room, k_row_bytes,
    k_zero_bytes, k_first_zero, k_mean,
    k_sink_batch, k_sink_head, k_sink_token, k_recent_batch, k_recent_head, k_recent_token,
    v_codes, v_scales, v_zeros, v_tensor, v_sink, v_recent, v_sunk, v_packed, v_room, v_row_bytes,
    v_zero_bytes, v_first_zero, v_mean,
    v_sink_batch, v_sink_head, v_sink_token, v_recent_batch, v_recent_head, v_recent_token,
    heads, group, head_dim, total, stretch, splits, scaling, softcap,
    K_IS_FLOAT: tl.constexpr, K_BITS: tl.constexpr, K_MANTISSA: tl.constexpr, K_BIAS: tl.constexpr, K_MIN_NORMAL: tl.constexpr,
    K_LARGEST: tl.constexpr, K_SCALE: tl.constexpr, K_ASYMMETRIC: tl.constexpr, K_HAS_TENSOR: tl.constexpr, K_CHANNEL: tl.constexpr,
    K_BLOCK: tl.constexpr, K_HAS_MEAN: tl.constexpr,
    V_IS_FLOAT: tl.constexpr, V_BITS: tl.constexpr, V_MANTISSA: tl.constexpr, V_BIAS: tl.constexpr, V_MIN_NORMAL: tl.constexpr,
    V_LARGEST: tl.constexpr, V_SCALE: tl.constexpr, V_ASYMMETRIC: tl.constexpr, V_HAS_TENSOR: tl.constexpr, V_CHANNEL: tl.constexpr,
    V_BLOCK: tl.constexpr, V_HAS_MEAN: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One KV head of one sequence and one stretch of tokens a program; queries [batch, KV heads, group, head_dim], contiguous."""
    owner, split = tl.program_id(0), tl.program_id(1)
    batch, head = owner // heads, owner % heads
    member, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    real = (member < group)[:, None] & (dim < head_dim)[None, :]
    query = tl.load(query_ptr + (owner.to(tl.int64) * group + member[:, None]) * head_dim + dim[None, :], mask=real, other=0.0)
    kind = query.dtype
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    norm = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, DIM), tl.float32)
    start = split * stretch
    stop = tl.minimum(start + stretch, total)
    for tile_start in range(start, stop, TILE):
        token = tile_start + tl.arange(0, TILE)
        inside = (token < stop)[:, None] & (dim < head_dim)[None, :]
        key = read_tokens(
            k_codes, k_scales, k_zeros, k_tensor, k_sink, k_recent, k_sunk, k_packed, k_room, head_dim,
            k_row_bytes, k_zero_bytes, k_first_zero, k_mean,
            k_sink_batch, k_sink_head, k_sink_token, k_recent_batch, k_recent_head, k_recent_token, batch, head, heads, token, dim, inside,
            K_IS_FLOAT, K_BITS, K_MANTISSA, K_BIAS, K_MIN_NORMAL, K_LARGEST, K_SCALE, K_ASYMMETRIC, K_HAS_TENSOR, K_CHANNEL, K_BLOCK,
            K_HAS_MEAN,
        )  # fmt: skip
        logits = tl.dot(query, tl.trans(key.to(kind)), input_precision="ieee") * scaling
        if SOFTCAP:  # tanh by exponentials
            twice = tl.exp(-2.0 * tl.abs(logits / softcap))
            logits = tl.where(logits < 0, -softcap, softcap) * ((1.0 - twice) / (1.0 + twice))
        visible = token < stop
        if HAS_MASK:
            visible = visible & (tl.load(mask_ptr + batch.to(tl.int64) * total + token, mask=visible, other=0) != 0)
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        kept = tl.exp(top - base)
        weight = tl.exp(logits - base[:, None])
        norm = norm * kept + tl.sum(weight, axis=1)
        value = read_tokens(
            v_codes, v_scales, v_zeros, v_tensor, v_sink, v_recent, v_sunk, v_packed, v_room, head_dim,
            v_row_bytes, v_zero_bytes, v_first_zero, v_mean,
            v_sink_batch, v_sink_head, v_sink_token, v_recent_batch, v_recent_head, v_recent_token, batch, head, heads, token, dim, inside,
            V_IS_FLOAT, V_BITS, V_MANTISSA, V_BIAS, V_MIN_NORMAL, V_LARGEST, V_SCALE, V_ASYMMETRIC, V_HAS_TENSOR, V_CHANNEL, V_BLOCK,
            V_HAS_MEAN,
        )  # fmt: skip
        mixed = mixed * kept[:, None] + tl.dot(weight.to(kind), value.to(kind), input_precision="ieee")
        top = new
    at = (owner.to(tl.int64) * splits + split) * GROUP + member
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, norm)
    tl.store(out_ptr + at[:, None] * DIM + dim[None, :], mixed)


def attention(
    query: torch.Tensor,
    key: CachedTokens,
    value: CachedTokens,
    scaling: float,
    *,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Return attention outputs [batch, heads, 1, head_dim], in the query's dtype.

    Within 1e-5 (float32) and 2e-3 (float16; bfloat16 1.6e-2) of float64 attention over the decoded cache, relative to the largest value.

    Args:
        query: [batch, heads, 1, head_dim] of the newest token, which the cache already holds.
        mask: bool [batch, tokens], False where a token is padding; at least as many tokens as are seen, up to the newest.
        window: only the newest so many tokens are seen; K and V may then hold different numbers of older ones.
        softcap: logits are softcap * tanh(logits / softcap), as in Gemma 2.
        splits: stretches of tokens that are worked on side by side; by default as many as keep a GPU busy.

    A row that sees no token is 0. Raises AutoqError for K and V of different lengths, or where no kernel can run on this device.
    """
    batch, heads, queries, head_dim = query.shape
    if queries != 1:
        raise AutoqError(f"decode attention takes one query a sequence, not {queries}")
    total = min(key.tokens, value.tokens) if window is None else min(key.tokens, value.tokens, window)
    if key.tokens != value.tokens and total != window:
        raise AutoqError(f"the cache holds {key.tokens} keys but {value.tokens} values")
    if key.recent.shape[3] != head_dim or value.recent.shape[3] != head_dim:
        raise AutoqError(
            f"keys and values must be as wide as the queries, {head_dim}, not {key.recent.shape[3]} and {value.recent.shape[3]}"
        )
    tile(query.device)
    kv_heads = key.recent.shape[1]
    group = heads // kv_heads
    on_cpu = interpreted()
    dtype = query.dtype
    asked = query.float() if on_cpu and dtype == torch.bfloat16 else query  # the interpreter multiplies bit patterns of bfloat16
    asked = rotate(asked) if key.fmt.rotate else asked
    asked = asked.reshape(batch, kv_heads, group, head_dim).contiguous()
    padded, members = max(16, triton.next_power_of_2(head_dim)), max(16, triton.next_power_of_2(group))
    values = TILE_VALUES // 2 if dtype == torch.float32 else TILE_VALUES
    size = max(16, values // padded) if not on_cpu else max(16, min(1024, triton.next_power_of_2(max(total, 1))))
    if splits is None:
        splits = 1 if on_cpu else max(1, min(triton.cdiv(total, 4 * size), triton.cdiv(PROGRAMS, batch * kv_heads)))
    stretch = triton.cdiv(triton.cdiv(max(total, 1), splits), size) * size
    owners = batch * kv_heads
    out = torch.empty(owners, splits, members, padded, dtype=torch.float32, device=query.device)
    top, norm = (torch.empty(owners, splits, members, dtype=torch.float32, device=query.device) for _ in range(2))
    k_given, k_constants = _arguments(key, total)
    v_given, v_constants = _arguments(value, total)
    seen_mask = asked if mask is None else mask[:, mask.shape[1] - total :].to(torch.uint8).contiguous()
    attention_kernel[(owners, splits)](
        asked, seen_mask, out, top, norm, *k_given, *v_given, kv_heads, group, head_dim, total, stretch, splits, float(scaling),
        float(softcap or 0.0), **{f"K_{n}": c for n, c in k_constants.items()}, **{f"V_{n}": c for n, c in v_constants.items()},
        GROUP=members, DIM=padded, TILE=size, HAS_MASK=mask is not None, SOFTCAP=softcap is not None, enable_fp_fusion=True,
        num_warps=4 if padded <= 64 else 8, maxnreg=MOST_REGISTERS,
        num_stages=1 if asked.dtype == torch.float32 else 3,  # float32 tiles loaded ahead would not fit in shared memory
    )  # fmt: skip
    highest = top.amax(1, keepdim=True)
    share = torch.exp(top - torch.where(highest.isinf(), 0.0, highest))
    weight = (share * norm).sum(1).unsqueeze(-1)
    found = (share.unsqueeze(-1) * out).sum(1) / torch.where(weight == 0, 1.0, weight)
    found = found[:, :group, :head_dim].reshape(batch, heads, 1, head_dim)
    return (rotate(found) if value.fmt.rotate else found).to(dtype)


def _arguments(side: CachedTokens, seen: int) -> tuple[list[Any], dict[str, Any]]:
    """Return what the kernel is told of one side, of which it sees the newest tokens: tensors, sizes and strides; constants."""
    fmt, recent = side.fmt.values, side.recent
    unseen = side.tokens - seen
    sink = recent if side.sink is None else side.sink[:, :, unseen:]
    sunk = side.sunk - unseen  # where the packed tokens begin, counted from the first that is seen
    if recent.stride(-1) != 1 or sink.stride(-1) != 1:
        raise AutoqError("cached tokens must be contiguous along head_dim")
    sizes = [*sink.stride()[:3], *recent.stride()[:3]]
    if side.codes is None or side.scales is None or fmt.element is None:
        return [recent, recent, recent, recent, sink, recent, sunk, 0, 0, 0, 0, 0, recent, *sizes], NOTHING
    codes, scales, zeros, tensor = side.codes, side.scales, side.zeros, side.tensor
    room = codes.stride(1) // codes.shape[-1]  # rows from one head to the next
    if not codes[0, 0].is_contiguous() or codes.stride(0) != codes.shape[1] * codes.stride(1):
        raise AutoqError("packed tokens of a head must be contiguous, with equal memory between heads")
    if fmt.scale != "none" and scales.stride(1) != room * scales.shape[-1]:
        raise AutoqError("scales must have as much memory between heads as codes")
    given = [
        codes, scales, codes if zeros is None else zeros, codes if tensor is None else tensor, sink, recent,
        sunk, side.packed, room, codes.shape[-1], 0 if zeros is None else zeros.shape[-1], side.first_zero, codes if side.mean is None else side.mean,
        *sizes,
    ]  # fmt: skip
    constants = {
        **element_constants(fmt.element), "SCALE": fmt.scale, "HAS_TENSOR": tensor is not None,
        "ASYMMETRIC": isinstance(fmt.element, IntElement) and fmt.element.asymmetric,
        "CHANNEL": side.fmt.axis == "channel", "BLOCK": fmt.block or recent.shape[-1],
        "HAS_MEAN": side.mean is not None,
    }  # fmt: skip
    return given, constants
