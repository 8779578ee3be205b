"""NVIDIA ModelOpt: a PTQ recipe, and hf_quant_config.json for engines that load its checkpoints.

Sources: `modelopt.recipe` and `modelopt.torch.quantization.config` of 0.44 to 0.47. `quant_cfg` is an ordered list, quantizer names are
matched with fnmatch, the last match wins and replaces the whole configuration. Quantizers of K and V sit on the attention module.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from autoq.errors import UserError
from autoq.exporters import hf_quant_config
from autoq.exporters.consumer import Consumer, Found
from autoq.exporters.documents import at, parse, to_json, to_yaml
from autoq.exporters.integers import integer
from autoq.exporters.subject import KV_ORIGINAL, Subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import Format, KVFormat

_PER_TOKEN = {"block_sizes": {-1: None}, "type": "dynamic"}
_NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
_FP8, _INT8 = {"num_bits": "e4m3", "axis": 0}, {"num_bits": 8, "axis": 0}

# format -> (weight_quantizer, input_quantizer)
_WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8": (_FP8, None),
    "int8": (_INT8, None),
    "int4_g128": ({"num_bits": 4, "block_sizes": {-1: 128}}, None),
    "int4_g64": ({"num_bits": 4, "block_sizes": {-1: 64}}, None),
    "nvfp4": (_NVFP4, None),
    "mxfp4_ceil": ({"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}}, None),
    "fp8_w8a8": (_FP8, {"num_bits": "e4m3", **_PER_TOKEN}),
    "int8_w8a8": (_INT8, {"num_bits": 8, **_PER_TOKEN}),
    "nvfp4_w4a4": (_NVFP4, _NVFP4),
}
# format -> k_bmm_quantizer or v_bmm_quantizer
_CACHES: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": "e4m3"},
    "fp8_cast": {"num_bits": "e4m3", "use_constant_amax": True},
    "int8_head": {"num_bits": 8, **_PER_TOKEN},
    "nvfp4": _NVFP4,
}
_SIDES = (("k_bmm_quantizer", "key"), ("v_bmm_quantizer", "value"))


def write(subject: Subject) -> dict[str, str]:
    """Return recipe.yaml, and hf_quant_config.json where every format has a name there."""
    off: dict[str, Any] = {"enable": False}
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", **off}]
    for layer in subject.quantized:
        weight, inputs = _WEIGHTS[layer.format.name]
        entries.append({"quantizer_name": f"{layer.name}.weight_quantizer", "cfg": weight})
        if inputs is not None:
            entries.append({"quantizer_name": f"{layer.name}.input_quantizer", "cfg": inputs})
    entries += [{"quantizer_name": f"{layer.name}.weight_quantizer", **off} for layer in subject.kept if layer.layout == "linear"]
    for attention in subject.attentions:
        for quantizer, fmt in (("k_bmm_quantizer", attention.key), ("v_bmm_quantizer", attention.value)):
            state = off if fmt.is_original else {"cfg": _CACHES[fmt.name]}
            entries.append({"quantizer_name": f"{attention.name}.{quantizer}", **state})
    data = {
        "metadata": {"recipe_type": "ptq", "description": f"Mixed precision for {subject.model}, searched by autoq."},
        "quantize": {"algorithm": "max", "quant_cfg": entries},
    }
    files = {"recipe.yaml": to_yaml(_fresh(data))}
    engine = hf_quant_config.document(subject)
    return files if engine is None else files | {"hf_quant_config.json": to_json(engine)}


def _fresh(data: Any) -> Any:
    """Copy nested mappings and lists, so that YAML writes them out rather than as anchors."""
    if isinstance(data, Mapping):
        return {key: _fresh(value) for key, value in data.items()}
    return [_fresh(value) for value in data] if isinstance(data, list) else data


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve a recipe on the modules of a model, as ModelOpt does."""
    name = next(iter(files))
    data = parse(name, files[name])
    entries = at(data, "quantize.quant_cfg", name, list)
    problems: list[str] = []
    quantizers = {
        f"{layer.name}.{q}": None for layer in subject.layers for q in ("weight_quantizer", "input_quantizer", "output_quantizer")
    }
    quantizers |= {f"{a.name}.{q}": None for a in subject.attentions for q in ("q_bmm_quantizer", *(q for q, _ in _SIDES))}
    resolved: dict[str, dict[str, Any] | None] = dict(quantizers)
    classes = {layer.name: "nn.Linear" for layer in subject.layers} | {a.name: a.class_name for a in subject.attentions}
    notes: list[str] = []
    named: set[str] = set()
    for entry in entries:
        if isinstance(entry, Mapping) and any("import" in str(key) for key in entry):
            raise UserError(
                f"{name!r} imports other files: write it out whole first, with yaml.safe_dump of load_recipe(...).model_dump()"
            )
        if not isinstance(entry, Mapping) or not isinstance(entry.get("quantizer_name"), str):
            raise UserError(f"{name!r}: every entry of quant_cfg needs a quantizer_name")
        pattern, config, parent = entry["quantizer_name"], entry.get("cfg"), entry.get("parent_class")
        if config is not None and not isinstance(config, Mapping):
            raise UserError(f"{name!r}: the cfg of {pattern} must be a mapping, and is {config!r}")
        is_on, is_exact = entry.get("enable", True), not any(c in pattern for c in "*?[")
        matched = [q for q in resolved if fnmatchcase(q, pattern) and parent in (None, classes[q.rpartition(".")[0]])]
        if not matched and parent is None and (pattern.rpartition(".")[0] not in subject.modules if is_exact else is_on):
            (problems if is_exact else notes).append(f"{pattern} matches nothing in the model")
        if is_exact and pattern in named:
            problems.append(f"{pattern} is set twice")
        named.add(pattern)
        for quantizer in matched:
            resolved[quantizer] = dict(config or {"num_bits": 8}) if is_on else None
    unsaid = [q for q, config in resolved.items() if config is not None and q.endswith(("output_quantizer", "q_bmm_quantizer"))]
    problems += [f"{quantizer} is on, and autoq has no format for what it quantizes" for quantizer in unsaid]
    weights: dict[str, Format] = {}
    for layer in subject.layers:
        weight, inputs = resolved[f"{layer.name}.weight_quantizer"], resolved[f"{layer.name}.input_quantizer"]
        if weight is None and inputs is None:
            continue
        fmt = _weight_format(weight, inputs)
        if fmt is None:
            problems.append(f"{layer.name}: {weight} with inputs in {inputs} is no format of autoq")
        else:
            weights[layer.name] = fmt
    caches: dict[str, tuple[KVFormat, KVFormat]] = {}
    for attention in subject.attentions:
        sides = []
        for quantizer, _ in _SIDES:
            config = resolved[f"{attention.name}.{quantizer}"]
            fmt_name = "bf16" if config is None else next((n for n, c in _CACHES.items() if _plain(c) == _plain(config)), None)
            if fmt_name is None:
                problems.append(f"{attention.name}.{quantizer}: {config} is no cache format of autoq")
            sides.append(kv_format(fmt_name) if fmt_name else KV_ORIGINAL)
        caches[attention.name] = (sides[0], sides[1])
    algorithm = data["quantize"].get("algorithm", "max")
    plain = algorithm in ("max", None) or (isinstance(algorithm, Mapping) and algorithm.get("method") == "max")
    if not plain:
        notes.append(f"its algorithm {algorithm} changes weights before they are rounded: autoq rounds them as they are")
    if "hf_quant_config.json" in files:  # as `write` gives it beside the recipe
        beside = hf_quant_config.read({"hf_quant_config.json": files["hf_quant_config.json"]}, subject)
        if beside.weights != weights or beside.problems:
            problems.append(f"hf_quant_config.json says something else {beside.problems}")
    return Found(weights, caches, tuple(problems), tuple(notes))


_ELEMENTS = {(4, 3): "e4m3", (2, 1): "e2m1", (8, 0): "e8m0"}


def _plain(config: Mapping[Any, Any] | None) -> Any:
    """Return a configuration with the spellings that ModelOpt takes for one another made one."""
    if config is None:
        return None
    found: dict[Any, Any] = {}
    for key, value in config.items():
        if isinstance(value, list):
            value = _ELEMENTS.get(tuple(value), value)
        if key in ("enable", "effective_bits") or (key in ("axis", "block_sizes", "bias", "rotate") and not value and value != 0):
            continue
        if key == "block_sizes":
            value = {int(k) if str(k).lstrip("-").isdigit() else k: v for k, v in value.items()}
            value = _plain({k: v for k, v in value.items() if (k, v) != ("type", "static")})
        if (key, value) not in (("type", "static"), ("calibrator", "max"), ("fake_quant", True)):
            found[key] = value
    return found


def _weight_format(weight: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None) -> Format | None:
    if weight is None:
        return None
    for name, (known, known_inputs) in _WEIGHTS.items():
        if _plain(known) == _plain(weight) and _plain(known_inputs) == _plain(inputs):
            return WEIGHT_FORMATS[name]
    plain, blocks = _plain(weight), _plain(weight).get("block_sizes", {})
    if inputs is None and set(plain) == {"num_bits", "block_sizes"} and set(blocks) == {-1} and isinstance(plain["num_bits"], int):
        return integer(plain["num_bits"], blocks[-1], True, "absmax")
    return None


CONSUMER = Consumer(
    "modelopt",
    "a PTQ recipe for `load_recipe` and `mtq.quantize`; hf_quant_config.json for engines",
    tuple(_WEIGHTS),
    tuple(_CACHES),
    "free",
    write,
    read,
    notes=(
        "fp8 caches are calibrated by ModelOpt, on the text of your forward_loop",
        "nvfp4 and mxfp4 are simulated on a GPU only; hf_quant_config.json is written where every format has a name in it",
    ),
)
