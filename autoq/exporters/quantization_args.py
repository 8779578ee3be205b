"""Formats in the words of compressed-tensors: QuantizationArgs, and how its targets match modules.

Sources: `compressed_tensors.quantization.quant_args`, `compressed_tensors.utils.match` of 0.17 to 0.19. Symmetric integer scales are
absmax / 7.5 (for 4 bits), MX scales round the largest magnitude to a power of two first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from autoq.errors import UserError, unknown
from autoq.exporters.consumer import Found
from autoq.exporters.integers import integer
from autoq.exporters.subject import KV_ORIGINAL, Subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import Format


def _int(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int", **strategy, "symmetric": symmetric}


def _mx(bits: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
    }


_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_NVFP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
_TOKEN = {"strategy": "token", "symmetric": True, "dynamic": True}

# format -> (weights, input_activations, how compressed-tensors packs it)
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "fp8": (_FP8, None, "naive-quantized"),
    "int8_half": (_int(8, None), None, "pack-quantized"),
    "int4_g128_half": (_int(4, 128), None, "pack-quantized"),
    "int4_g64_half": (_int(4, 64), None, "pack-quantized"),
    "int4_g32_asym": (_int(4, 32, False), None, "pack-quantized"),
    "int3_g64_asym": (_int(3, 64, False), None, "pack-quantized"),
    "int2_g32_asym": (_int(2, 32, False), None, "pack-quantized"),
    "nvfp4": (_NVFP4, None, "nvfp4-pack-quantized"),
    "mxfp4_even": (_mx(4), None, "mxfp4-pack-quantized"),
    "mxfp8_even": (_mx(8), None, "mxfp8-quantized"),
    "fp8_w8a8": (_FP8, {"num_bits": 8, "type": "float", **_TOKEN}, "float-quantized"),
    "int8_w8a8_half": (_int(8, None), {"num_bits": 8, "type": "int", **_TOKEN}, "int-quantized"),
    "nvfp4_w4a4": (_NVFP4, {**_NVFP4, "dynamic": "local"}, "nvfp4-pack-quantized"),
    "mxfp8_w8a8_even": (_mx(8), {**_mx(8), "dynamic": True}, "mxfp8-quantized"),
}
CACHES: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def groups(subject: Subject, with_packing: bool) -> dict[str, dict[str, Any]]:
    """Return config_groups: one group a format, its targets exact names."""
    found: dict[str, dict[str, Any]] = {}
    for layer in subject.quantized:
        weights, inputs, packing = SCHEMES[layer.format.name]
        if layer.format.name not in found:
            group: dict[str, Any] = {"targets": [], "weights": dict(weights)}
            if inputs is not None:
                group["input_activations"] = dict(inputs)
            found[layer.format.name] = ({"format": packing} if with_packing else {}) | group
        found[layer.format.name]["targets"].append(layer.name)
    return found


def ignored(subject: Subject) -> list[str]:
    """Return the layers that stay in 16 bit."""
    return [layer.name for layer in subject.kept if layer.layout == "linear"]


def cache_scheme(subject: Subject) -> dict[str, Any] | None:
    """Return kv_cache_scheme, which holds for all layers, or None where the cache needs no calibrated scales."""
    formats = {a.key.name for a in subject.attentions if a.key.name in CACHES}
    return dict(CACHES[next(iter(formats))]) if formats else None


def resolve(config: Mapping[str, Any], subject: Subject) -> Found:
    """Return what config_groups, ignore and kv_cache_scheme come to on the modules of a model.

    Of the targets that match a module, an exact name goes before a regular expression, and that before a class.
    """
    problems: list[str] = []
    schemes: dict[str, Any] = config.get("config_groups") or {}
    if not isinstance(schemes, Mapping):
        raise UserError("config_groups must map names to groups")
    ignore = [str(e) for e in config.get("ignore") or []]
    targets = [(str(t), name) for name, group in schemes.items() for t in _targets(name, group)]
    linear = [layer for layer in subject.layers if layer.layout == "linear"]
    modules = {layer.name: "Linear" for layer in linear} | {a.name: a.class_name for a in subject.attentions}
    for target, name in targets:
        if not any(_rank(target, module, kind) for module, kind in modules.items()):
            problems.append(f"the target {target} of {name} matches nothing in the model")
    problems += [f"{e} is ignored, and the model has no such module" for e in ignore if not _is_known(e, subject)]
    problems += [
        f"{key} is set, and autoq has no format for it" for key in ("transform_config", "sparsity_config") if config.get(key)
    ]
    weights: dict[str, Format] = {}
    for layer in linear:
        if any(_rank(e, layer.name, "Linear") for e in ignore):
            continue
        matches = sorted((rank, name) for target, name in targets if (rank := _rank(target, layer.name, "Linear")))
        best = {name for rank, name in matches if rank == matches[0][0]}
        if len(best) > 1:
            problems.append(f"{layer.name} is a target of {' and of '.join(sorted(best))}")
        if not matches:
            continue
        group = schemes[matches[0][1]]
        fmt = _format(group)
        if fmt is None:
            problems.append(f"{layer.name}: {matches[0][1]} is no format of autoq ({_words(group)})")
        else:
            weights[layer.name] = fmt
    caches, notes = {}, []
    for attention in subject.attentions:
        scheme, where = config.get("kv_cache_scheme"), "kv_cache_scheme"
        for target, name in targets:
            if _rank(target, attention.name, attention.class_name):
                scheme, where = schemes[name].get("input_activations"), name
                notes.append(f"{name} quantizes the queries of {target} too, which a recipe does not say")
        if scheme:
            known = next((n for n, c in CACHES.items() if _plain(c) == _plain(scheme)), None)
            if known is None:
                problems.append(f"{where} is no cache format of autoq ({_words({'weights': scheme})})")
            fmt_kv = kv_format(known) if known else KV_ORIGINAL
            caches[attention.name] = (fmt_kv, fmt_kv)
    return Found(weights, caches, tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)))


def _is_known(name: str, subject: Subject) -> bool:
    """True for a module of the model, a regular expression, or a class (names of classes are capitalized)."""
    return name.startswith("re:") or name in subject.modules or name[:1].isupper()


def _targets(name: str, group: Any) -> Iterable[str]:
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        raise UserError(f"the group {name!r} has no list of targets")
    return [str(target) for target in group["targets"]]


def _rank(target: str, name: str, kind: str) -> int:
    """1 for an exact name, 2 for a regular expression (a prefix match), 3 for a class, 0 for no match."""
    if target == name:
        return 1
    if target.startswith("re:"):
        try:
            return 2 if re.match(target[3:], name) else 0
        except re.error as error:
            raise UserError(f"the target {target!r} is no regular expression: {error}") from error
    return 3 if target == kind else 0


# Schemes that go by a name in recipes (`compressed_tensors.quantization.quant_scheme`).
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": (_int(4, 128), None), "W4A16_ASYM": (_int(4, 128, False), None), "W8A16": (_int(8, None), None),
    "W8A8": SCHEMES["int8_w8a8_half"][:2], "INT8": SCHEMES["int8_w8a8_half"][:2], "FP8_DYNAMIC": SCHEMES["fp8_w8a8"][:2],
    "NVFP4A16": (_NVFP4, None), "NVFP4": SCHEMES["nvfp4_w4a4"][:2],
}  # fmt: skip


def expanded(modifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return a modifier's arguments with schemes that go by a name written out; raises UserError for a name that is not known."""
    found, groups = dict(modifier), {}
    scheme, targets = modifier.get("scheme"), modifier.get("targets") or ["Linear"]
    named = {scheme: targets} if isinstance(scheme, str) else scheme if isinstance(scheme, Mapping) else {}
    for name, group in {**named, **(modifier.get("config_groups") or {})}.items():
        if isinstance(group, Mapping):
            groups[name] = group
            continue
        if str(name).upper() not in PRESETS:
            raise unknown("scheme", str(name), PRESETS)
        weights, inputs = PRESETS[str(name).upper()]
        groups[name] = {"targets": [group] if isinstance(group, str) else group, "weights": weights, "input_activations": inputs}
    return {**found, "config_groups": groups}


_IGNORED = ("observer", "observer_kwargs", "actorder", "zp_dtype", "block_structure")


def _plain(args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return arguments without defaults, and without what does not say which numbers are stored."""
    if args is None:
        return None
    found = {k: v for k, v in args.items() if k not in _IGNORED and v is not None and v != {} and v is not False}
    found.setdefault("type", "int")
    found["symmetric"] = args.get("symmetric", True)
    group = found.get("group_size")
    if "strategy" not in found:
        found["strategy"] = "tensor" if group is None else "channel" if group == -1 else "group"
    if found["strategy"] in ("channel", "token"):
        found.pop("group_size", None)
    if found["strategy"] != "group" or found["type"] == "int":
        found = {k: v for k, v in found.items() if k != "scale_dtype" or found["strategy"] == "tensor_group"}
    if "scale_dtype" in found:
        found["scale_dtype"] = str(found["scale_dtype"]).removeprefix("torch.")
    return found


def _format(group: Mapping[str, Any]) -> Format | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or group.get("output_activations"):
        return None
    for name, (known, known_inputs, _) in SCHEMES.items():
        if _plain(known) == _plain(weights) and _plain(known_inputs) == _plain(inputs):
            return WEIGHT_FORMATS[name]
    plain = _plain(weights)
    if plain is None or inputs is not None or plain["type"] != "int" or plain["strategy"] not in ("group", "channel"):
        return None
    if plain["strategy"] == "group" and "group_size" not in plain:
        raise UserError("a strategy of groups needs a group_size")
    return integer(weights.get("num_bits", 8), plain.get("group_size"), plain["symmetric"], "half_step")


def _words(group: Mapping[str, Any]) -> str:
    parts = [
        f"{k} {_plain(group[k])}"
        for k in ("weights", "input_activations", "output_activations")
        if isinstance(group.get(k), Mapping)
    ]
    return "; ".join(parts) or "it has no weights"
