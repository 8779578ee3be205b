"""llama.cpp: a type for every tensor of a GGUF, and the cache's flags.

Sources: `llama-quantize --tensor-type-file` (a regular expression on the GGUF name, the first that is found wins), `llama-server -ctk -ctv`, and
gguf's own map from the names of checkpoints to those of GGUF. In some releases an override that equals the base type is not taken for one,
and any override is dropped where the base type falls back for a width: so the base is a type that no tensor has, with blocks of 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer, Found
from autoq.exporters.subject import KV_ORIGINAL, Layer, Subject
from autoq.formats.catalog import WEIGHT_FORMATS, kv_format
from autoq.formats.format import Format

_TYPES = {"q8_0": "q8_0", "q5_0": "q5_0", "q4_0": "q4_0", "mxfp4": "mxfp4"}
_PLAIN = ("f32", "f16", "bf16")
_CACHES = {"bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0"}
BASE = "Q5_1"


def write(subject: Subject) -> dict[str, str]:
    """Return tensor-types.txt and quantize-and-serve.sh."""
    names = gguf_names(subject)
    head = next((_TYPES.get(la.format.name, "bf16") for la in subject.layers if names.get(la.name) == "output.weight"), "bf16")
    lines = [
        f"^{re.escape(names[layer.name])}$={_TYPES.get(layer.format.name, 'bf16')}"
        for layer in subject.layers
        if layer.name in names
    ]
    keys, values = (
        {_CACHES[fmt.name] for fmt in formats}
        for formats in ([a.key for a in subject.attentions], [a.value for a in subject.attentions])
    )
    flags = f" -ctk {next(iter(keys))} -ctv {next(iter(values))}" if keys and keys | values != {"bf16"} else ""
    script = (
        "#!/bin/sh\n# sh quantize-and-serve.sh MODEL-BF16.gguf MODEL.gguf\nset -e\n"
        f'llama-quantize --tensor-type-file "$(dirname "$0")/tensor-types.txt" --token-embedding-type bf16 --output-tensor-type {head} "$1" "$2" {BASE}\n'
        f'exec llama-server -m "$2"{flags}{" -fa on" if flags else ""}\n'
    )
    return {"tensor-types.txt": "\n".join(lines) + "\n", "quantize-and-serve.sh": script}


def gguf_names(subject: Subject) -> dict[str, str]:
    """Return layer -> tensor name in the GGUF; raises UserError for an architecture that gguf does not know."""
    kinds = {name.replace("-", "_"): arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = {"mixtral": "llama", "mistral": "llama"}.get(subject.kind, subject.kind).replace("-", "_")
    if kind not in kinds:
        raise UserError(f"llama.cpp has no architecture called {subject.kind!r}, so its tensor names are not known")
    depth = 1 + max((a.layer for a in subject.attentions), default=0)
    known = gguf.get_tensor_name_map(kinds[kind], depth)
    found = {}
    for layer in subject.layers:
        name = known.get_name(layer.name, (".weight",))
        if name is not None:
            found[layer.name] = f"{name}.weight"
        elif not layer.format.is_original:
            raise UserError(f"gguf has no name for {layer.name} of a {subject.kind} model")
    return found


def read(files: Mapping[str, str], subject: Subject) -> Found:
    """Resolve a list of tensor types (`regular expression=type` a line) on the modules of a model."""
    file, text = next(iter(files.items()))
    script = files.get("quantize-and-serve.sh")  # as `write` gives it beside the types
    rules: list[tuple[str, re.Pattern[str], str]] = []
    for line in (word for whole in text.splitlines() if not whole.lstrip().startswith("#") for word in whole.split()):
        pattern, _, kind = line.rpartition("=")
        try:
            rules.append((pattern, re.compile(pattern), kind.lower()))
        except re.error as error:
            raise UserError(f"{file!r}: {pattern!r} is no regular expression: {error}") from error
        if not pattern:
            raise UserError(f"{file!r}: {line!r} is not a line like blk.0.attn_q=q8_0")
    found = resolve(rules, subject)
    if script is None:
        return found
    sides = [re.search(rf"-ct{side} (\w+)", script) for side in "kv"]
    key, value = (kv_format(side[1]) if side else KV_ORIGINAL for side in sides)
    return replace(found, caches={a.name: (key, value) for a in subject.attentions})


def resolve(rules: list[tuple[str, re.Pattern[str], str]], subject: Subject) -> Found:
    """Return the formats that (text, pattern, type) give the layers: the first pattern that is found in the GGUF name wins."""
    used: set[str] = set()
    weights: dict[str, Format] = {}
    unknown: dict[str, int] = {}
    problems: list[str] = []
    notes: list[str] = []
    for layer, name in gguf_names(subject).items():
        matched = [(text, kind) for text, pattern, kind in rules if pattern.search(name)]
        used |= {text for text, _ in matched}
        if len(matched) > 1:
            notes.append(f"{layer} is matched by {' and by '.join(text for text, _ in matched)}: the first holds")
        kind = matched[0][1] if matched else "bf16"
        if kind in _TYPES:
            weights[layer] = WEIGHT_FORMATS[kind]
        elif kind not in _PLAIN:
            unknown[kind] = unknown.get(kind, 0) + 1
    others = {f"{n}.weight" for n in ("token_embd", "output")}
    for text, pattern, kind in rules:
        if text in used or kind in _PLAIN:
            continue
        if any(pattern.search(other) for other in others):
            notes.append(f"{text} in {kind} is left out: autoq counts it with 16 bit")
        else:
            problems.append(f"{text} matches nothing in the model")
    problems += [f"{count} tensors are in {kind}, which is no format of autoq" for kind, count in unknown.items()]
    return Found(weights, {}, tuple(problems), tuple(notes))


def read_gguf(path: Path, subject: Subject) -> Found:
    """Resolve the tensor types of a GGUF file; raises UserError for a file that is none."""
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, OSError, IndexError) as error:
        raise UserError(f"{str(path)!r} cannot be read as GGUF: {error}") from error
    rules = [(t.name, re.compile(f"^{re.escape(t.name)}$"), t.tensor_type.name.lower()) for t in tensors]
    return resolve(rules, subject)


def _refuses(layer: Layer, fmt: Format) -> str | None:
    return None if fmt.is_original or layer.width % 32 == 0 else f"a width of {layer.width} is no multiple of 32"


CONSUMER = Consumer(
    "llama.cpp",
    "a type for every tensor for `llama-quantize`, and the flags of `llama-server`",
    tuple(_TYPES),
    ("q8_0", "q4_0"),
    "two",
    write,
    read,
    refuses=_refuses,
    notes=("embeddings and the output matrix stay in 16 bit; not run here: llama.cpp is no Python package",),
)
