"""hf_quant_config.json: what ModelOpt's checkpoints say of themselves, and TensorRT-LLM, vLLM and SGLang read.

Source: `modelopt.torch.export.quant_utils.process_layer_quant_config` of 0.47, `QuantAlgo` of TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from autoq import __version__
from autoq.errors import UserError
from autoq.exporters.consumer import Found
from autoq.exporters.documents import parse
from autoq.exporters.integers import integer
from autoq.exporters.subject import KV_ORIGINAL, Subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import Format, KVFormat

_AWQ = {"has_zero_point": False, "pre_quant_scale": True}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fp8_w8a8": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "int8": {"quant_algo": "W8A16"},
    "int8_w8a8": {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
    "int4_g128": {"quant_algo": "W4A16_AWQ", "group_size": 128, **_AWQ},
    "int4_g64": {"quant_algo": "W4A16_AWQ", "group_size": 64, **_AWQ},
    "nvfp4": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "nvfp4_w4a4": {"quant_algo": "NVFP4", "group_size": 16},
}
CACHES = {"fp8": "FP8", "nvfp4": "NVFP4"}


def document(subject: Subject) -> dict[str, Any] | None:
    """Return the file's data, or None where a format has no name in it or K and V differ."""
    if any(layer.format.name not in ALGORITHMS for layer in subject.quantized):
        return None
    caches = [a for a in subject.attentions if not a.is_original]
    if any(a.key.name != a.value.name or a.key.name not in CACHES for a in caches):
        return None
    names = {CACHES[a.key.name] for a in caches}
    if len(names) > 1:
        return None
    quantization: dict[str, Any] = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": next(iter(names)) if len(caches) == len(subject.attentions) and names else None,
    }
    if names and len(caches) < len(subject.attentions):
        quantization["kv_cache_schema_version"] = 1
        quantization["kv_cache_quantized_layers"] = {a.name: {"quant_algo": CACHES[a.key.name]} for a in caches}
    quantization["quantized_layers"] = {layer.name: ALGORITHMS[layer.format.name] for layer in subject.quantized}
    quantization["exclude_modules"] = [layer.name for layer in subject.kept if layer.layout == "linear"]
    return {"producer": {"name": "autoq", "version": __version__}, "quantization": quantization}


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve the file on the modules of a model: names are exact, or of everything that is not excluded."""
    name = next(iter(files))
    data = parse(name, files[name])
    found = data.get("quantization", data.get("quantization_config", data))
    if not isinstance(found, Mapping) or "quant_algo" not in found:
        raise UserError(f"{name!r} has no 'quant_algo': is it of another tool?")
    problems: list[str] = []
    weights: dict[str, Format] = {}
    layers = {layer.name: layer for layer in subject.layers}
    excluded = [str(e) for e in found.get("exclude_modules") or found.get("ignore") or []]
    exact = [e for e in excluded if not any(c in e for c in "*?[")]
    problems += [f"{e} is excluded, and the model has no such module" for e in exact if e not in subject.modules]
    if found["quant_algo"] == "MIXED_PRECISION":
        named: Mapping[str, Any] = found.get("quantized_layers") or {}
        if not isinstance(named, Mapping) or not all(isinstance(entry, Mapping) for entry in named.values()):
            raise UserError(f"{name!r}: quantized_layers must map names to algorithms")
        unknown = [key for key in named if key not in layers]
        problems += [f"{key} matches nothing in the model" for key in unknown]
        problems += [f"{key} is quantized and excluded" for key in named if _is_excluded(key, excluded)]
    else:
        named = {n: found for n, layer in layers.items() if layer.unit is not None and not _is_excluded(n, excluded)}
    for layer, entry in named.items():
        if layer not in layers:
            continue
        fmt = _format(entry)
        if fmt is None:
            problems.append(f"{layer}: {dict(entry)} is no format of autoq")
        else:
            weights[layer] = fmt
    caches, more = _caches(found, subject)
    return Found(weights, caches, (*problems, *more))


def _is_excluded(name: str, excluded: list[str]) -> bool:
    """True by an exact name, a glob, or as a part of a module that is excluded whole (vLLM's rule)."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in excluded)


def _format(entry: Mapping[str, Any]) -> Format | None:
    algorithm, group = entry.get("quant_algo"), entry.get("group_size")
    for name, known in ALGORITHMS.items():
        if known["quant_algo"] == algorithm and known.get("group_size") == (group if "group_size" in known else None):
            return WEIGHT_FORMATS[name]
    return integer(4, group, True, "absmax") if algorithm == "W4A16_AWQ" and isinstance(group, int) and group > 0 else None


def _caches(found: Mapping[str, Any], subject: Subject) -> tuple[dict[str, tuple[KVFormat, KVFormat]], list[str]]:
    names = {"FP8": kv_format("fp8"), "NVFP4": kv_format("nvfp4"), "NVFP4_AFFINE": kv_format("nvfp4_affine"), None: KV_ORIGINAL}
    scheme = found.get("kv_cache_scheme")
    by_bits = {8: "FP8", 4: "NVFP4"}.get(int(scheme.get("num_bits", 0))) if isinstance(scheme, Mapping) else None
    everywhere = found.get("kv_cache_quant_algo") or by_bits
    by_layer: Mapping[str, Any] = found.get("kv_cache_quantized_layers") or {}
    caches, problems = {}, []
    modules = {a.name for a in subject.attentions}
    problems += [f"{key} matches no attention module" for key in by_layer if key not in modules]
    for attention in subject.attentions:
        algorithm = by_layer.get(attention.name, {}).get("quant_algo") if by_layer else everywhere
        if algorithm not in names:
            problems.append(f"{attention.name}: a cache in {algorithm} is no format of autoq")
        fmt = names.get(algorithm, KV_ORIGINAL)
        caches[attention.name] = (fmt, fmt)
    return caches, problems
