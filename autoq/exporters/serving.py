"""Engines: the recipe that makes their checkpoint, and the flags and files that serve it with the recipe's cache.

Sources: vLLM `--kv-cache-dtype`, `--kv-cache-dtype-skip-layers` and `--config`; SGLang `--kv-cache-dtype`; TensorRT-LLM `trtllm-serve
--config` with `kv_cache_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoq.cost.engines import ENGINES, loads
from autoq.exporters import hf_quant_config, llm_compressor, modelopt, quantization_args
from autoq.exporters.consumer import Consumer, Found, whole_groups
from autoq.exporters.documents import parse, to_json, to_yaml
from autoq.exporters.subject import KV_ORIGINAL, Subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format

VLLM_CACHES = {
    "fp8": "fp8", "fp8_cast": "fp8", "fp8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4", "int8_head": "int8_per_token_head",
}  # fmt: skip
SGLANG_CACHES = {"fp8": "fp8_e4m3", "fp8_cast": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "nvfp4_cast": "fp4_e2m1"}
TENSORRT_CACHES = {"fp8": "fp8", "nvfp4": "nvfp4"}
_MAKE = '# 1. Make the checkpoint: llm-compressor\'s `oneshot(model=..., recipe="recipe.yaml", output_dir=...)`.\n'

_CONFIG = ' --config "$(dirname "$0")/config.yaml"'


def cache_name(subject: Subject) -> str | None:
    """Return the one cache format of the subject, or None where all layers stay in 16 bit."""
    names = {a.key.name for a in subject.attentions if not a.is_original}
    return next(iter(names)) if names else None


def vllm_settings(subject: Subject) -> dict[str, object]:
    """Return what `vllm serve --config` takes: the cache's dtype, and the layers that stay in 16 bit."""
    name = cache_name(subject)
    if name is None:
        return {}
    skipped = [str(a.layer) for a in subject.attentions if a.is_original]
    return {"kv-cache-dtype": VLLM_CACHES[name]} | ({"kv-cache-dtype-skip-layers": skipped} if skipped else {})


def _vllm(subject: Subject) -> dict[str, str]:
    settings = vllm_settings(subject)
    files = {
        "recipe.yaml": to_yaml(llm_compressor.document(subject)),
        "serve.sh": f'#!/bin/sh\n{_MAKE}# 2. Serve it: sh serve.sh CHECKPOINT\nexec vllm serve "$1"{_CONFIG if settings else ""}\n',
    }
    return files | ({"config.yaml": to_yaml(settings)} if settings else {})


def _sglang(subject: Subject) -> dict[str, str]:
    name = cache_name(subject)
    flags = f" --kv-cache-dtype {SGLANG_CACHES[name]}" if name else ""
    text = (
        f'#!/bin/sh\n{_MAKE}# 2. Serve it: sh serve.sh CHECKPOINT\nexec python3 -m sglang.launch_server --model-path "$1"{flags}\n'
    )
    return {"recipe.yaml": to_yaml(llm_compressor.document(subject)), "serve.sh": text}


def _tensorrt_llm(subject: Subject) -> dict[str, str]:
    name = cache_name(subject)
    files = modelopt.write(subject)
    engine = hf_quant_config.document(subject)
    config = {"kv_cache_config": {"dtype": TENSORRT_CACHES[name]}} if name else {}
    make = "# 1. Quantize with ModelOpt: `mtq.quantize(model, load_recipe(\"recipe.yaml\").quantize, forward_loop)`, `export_hf_checkpoint`.\n"  # fmt: skip
    serve = f'#!/bin/sh\n{make}# 2. Serve it: sh serve.sh CHECKPOINT\nexec trtllm-serve "$1"{_CONFIG if name else ""}\n'
    files |= {"serve.sh": serve} | ({"config.yaml": to_yaml(config)} if config else {})
    return files | ({"hf_quant_config.json": to_json(engine)} if engine else {})


def _served(weights: Found, subject: Subject, names: dict[str, str], dtype: str | None, skipped: Sequence[str] = ()) -> Found:
    """Return what the checkpoint's recipe says of weights, and the flags of caches; a dtype without calibrated scales is a cast."""
    scales = any(not key.is_original for key, _ in weights.caches.values())
    fitting = [name for name, own in names.items() if own == dtype]
    name = next((n for n in fitting if (kv_format(n).calibration == "absmax") == scales), fitting[0] if fitting else "bf16")
    caches = {
        a.name: (kv_format(name), kv_format(name)) if str(a.layer) not in skipped else (KV_ORIGINAL, KV_ORIGINAL)
        for a in subject.attentions
    }
    return replace(weights, caches=caches)


def _read_vllm(files: Mapping[str, str], subject: Subject) -> Found:
    settings = parse("config.yaml", files["config.yaml"]) if "config.yaml" in files else {}
    found = llm_compressor.read({"recipe.yaml": files["recipe.yaml"]}, subject)
    return _served(found, subject, VLLM_CACHES, settings.get("kv-cache-dtype"), settings.get("kv-cache-dtype-skip-layers", []))


def _read_sglang(files: Mapping[str, str], subject: Subject) -> Found:
    flag = re.search(r"--kv-cache-dtype (\w+)", files["serve.sh"])
    found = llm_compressor.read({"recipe.yaml": files["recipe.yaml"]}, subject)
    return _served(found, subject, SGLANG_CACHES, flag[1] if flag else None)


def _loaded(engine: str, names: dict[str, object]) -> tuple[str, ...]:
    return tuple(n for n in names if loads(ENGINES[engine], WEIGHT_FORMATS[n], WEIGHT_FORMATS))


_SCHEMES: dict[str, object] = dict(quantization_args.SCHEMES)
_SHARED = "fp8 caches with calibrated scales take them from the checkpoint; fp8_cast has none"
VLLM = Consumer(
    "vllm",
    "llm-compressor's recipe for the checkpoint, and what `vllm serve` needs",
    _loaded("vllm", _SCHEMES),
    tuple(VLLM_CACHES),
    "one and skipped",
    _vllm,
    _read_vllm,
    refuses=whole_groups,
    notes=(
        _SHARED,
        "vLLM takes weight-only MXFP4 and MXFP8 for formats with inputs of the same kind: where a device multiplies them, inputs are rounded too",
        "vLLM 0.32 on a CPU cuts fp8 caches off towards zero, and has no int8_per_token_head there, though it takes it",
    ),
)
SGLANG = Consumer(
    "sglang",
    "llm-compressor's recipe for the checkpoint, and the launch command",
    _loaded("sglang", _SCHEMES),
    tuple(SGLANG_CACHES),
    "one",
    _sglang,
    _read_sglang,
    refuses=whole_groups,
    notes=(_SHARED, "not run here: SGLang needs a GPU"),
)
TENSORRT_LLM = Consumer(
    "tensorrt-llm",
    "ModelOpt's recipe for the checkpoint, hf_quant_config.json, and the serving command",
    _loaded("tensorrt-llm", dict(hf_quant_config.ALGORITHMS)),
    tuple(TENSORRT_CACHES),
    "one",
    _tensorrt_llm,
    modelopt.read,
    notes=("not run here: TensorRT-LLM needs a GPU",),
)
