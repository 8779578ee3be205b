"""Plain torch in place of the kernels that vLLM's CPU backend lacks on this processor.

What is vLLM's own stays: the reading of quantization_config, the choice of a scheme for every layer, the loading and fusing of packed
weights (q, k, v; gate, up), the cache's dtype and the layers that skip it. Only the arithmetic is replaced: weights are decoded to
bfloat16, K and V are rounded as they enter a 16-bit cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """[rows, width / 2] uint8, low nibble first -> [rows, width]."""
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).long()].flatten(1)


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply [rows, width] by scales [rows, groups]."""
    return weight * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.view(torch.uint8).float() - 127)


class Dense:
    """A linear kernel whose weight is decoded once, when it is loaded."""

    def __init__(self, decode: Callable[[Any], torch.Tensor]) -> None:
        self.decode = decode

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.dense = self.decode(layer).to(torch.bfloat16)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, layer.dense, bias)

    def input_quant_key(self) -> None:
        return None


def decode_integers(kernel: Any, layer: Any) -> torch.Tensor:
    """compressed-tensors' layout: a row of int32 words is one stream of bits, lowest first; zero points are packed down the rows."""
    config = kernel.config
    bits = config.weight_type.size_bits

    def unpack(words: torch.Tensor) -> torch.Tensor:
        stream = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        return (stream.reshape(words.shape[0], -1, bits) << torch.arange(bits, dtype=torch.int32)).sum(-1)

    scale = getattr(layer, kernel.w_s_name).data.float()
    codes = unpack(getattr(layer, kernel.w_q_name).data)[:, : config.partition_weight_shape[0]].float()
    if not config.zero_points:
        return scaled(codes - config.weight_type.bias, scale)
    zero = unpack(getattr(layer, kernel.w_zp_name).data.t()).t()[: codes.shape[0]].float()
    return scaled(codes - zero.repeat_interleave(codes.shape[1] // zero.shape[1], 1), scale)


def install() -> None:
    """Replace the kernels of vLLM 0.32 in this process."""
    from vllm.model_executor.kernels.linear.mixed_precision import cpu
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    integers = cpu.CPUWNA16LinearKernel
    integers.can_implement = classmethod(lambda cls, config: (True, None))
    integers.process_weights_after_loading = lambda self, layer: setattr(layer, "dense", decode_integers(self, layer).bfloat16())
    integers.apply_weights = lambda self, layer, x, bias=None: functional.linear(x, layer.dense, bias)

    def module_of(scheme: Any) -> Any:
        return sys.modules[scheme.__module__]

    module_of(schemes.CompressedTensorsW8A16Fp8).init_wfp8_a16_linear_kernel = lambda **_: Dense(
        lambda layer: scaled(layer.weight.t().float(), layer.weight_scale.float())  # vLLM hands it over as [inputs, outputs]
    )
    module_of(schemes.CompressedTensorsW4A4Mxfp4).init_mxfp4_linear_kernel = lambda **_: Dense(
        lambda layer: scaled(decode_fp4(layer.weight.view(torch.uint8)), e8m0(layer.weight_scale))
    )
    module_of(schemes.CompressedTensorsW8A8Mxfp8).init_mxfp8_linear_kernel = lambda **_: Dense(
        lambda layer: scaled(layer.weight.float(), e8m0(layer.weight_scale))
    )

    def nvfp4(layer: Any) -> torch.Tensor:
        return scaled(decode_fp4(layer.weight.view(torch.uint8)), layer.weight_scale.float()) * layer.weight_global_scale.float()

    module_of(schemes.CompressedTensorsW4A4Fp4).init_nvfp4_linear_kernel = lambda use_a16=False: (
        Dense(nvfp4) if use_a16 else EmulationNvFp4LinearKernel(None)
    )
    _install_cache()


def _install_cache() -> None:
    """The layer's own dtype (after the skipped layers) decides how K and V are rounded; the cache itself stays 16 bit."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention.backends import cpu_attn

    backend, builder = cpu_attn.CPUAttentionBackendImpl, cpu_attn.CPUAttentionMetadataBuilder
    begin, update, build, spec = backend.__init__, backend.do_kv_cache_update, builder.__init__, Attention.get_kv_cache_spec

    def begin_in_16_bit(self: Any, *arguments: Any, kv_cache_dtype: str = "auto", **options: Any) -> None:
        given = list(arguments)
        if len(given) > 6:
            kv_cache_dtype, given[6] = given[6], "auto"
        else:
            options["kv_cache_dtype"] = "auto"
        begin(self, *given, **options)
        self.dtype_asked = kv_cache_dtype

    def rounded(x: torch.Tensor, dtype: str, scale: float) -> torch.Tensor:
        if dtype == "int8_per_token_head":
            step = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
            return ((x.float() / step).round() * step).to(x.dtype)
        largest = torch.finfo(FP8[dtype]).max
        return ((x.float() / scale).clamp(-largest, largest).to(FP8[dtype]).float() * scale).to(x.dtype)

    def update_rounded(self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if self.dtype_asked != "auto":
            key = rounded(key, self.dtype_asked, layer._k_scale_float)
            value = rounded(value, self.dtype_asked, layer._v_scale_float)
        return update(self, layer, key, value, *rest, **options)

    def spec_in_16_bit(self: Any, config: Any) -> Any:
        kept = self.kv_cache_dtype, self.kv_cache_torch_dtype
        self.kv_cache_dtype, self.kv_cache_torch_dtype = "auto", torch.bfloat16
        found = spec(self, config)
        self.kv_cache_dtype, self.kv_cache_torch_dtype = kept
        return found

    def build_in_16_bit(self: Any, *arguments: Any, **options: Any) -> None:
        config = arguments[2].cache_config
        kept, config.cache_dtype = config.cache_dtype, "auto"
        build(self, *arguments, **options)
        config.cache_dtype = kept

    backend.__init__, backend.do_kv_cache_update, builder.__init__ = begin_in_16_bit, update_rounded, build_in_16_bit
    Attention.get_kv_cache_spec = spec_in_16_bit
