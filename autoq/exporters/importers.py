"""Read recipes that other tools wrote, by the tools' own matching rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from autoq.errors import UserError, unknown
from autoq.exporters import (
    auto_round,
    compressed_tensors,
    gptqmodel,
    hf_quant_config,
    llama_cpp,
    llm_compressor,
    mlx,
    modelopt,
    torchao,
)
from autoq.exporters.consumer import Found, Reader
from autoq.exporters.subject import Subject

READERS: dict[str, Reader] = {
    "modelopt": modelopt.read,
    "hf_quant_config": hf_quant_config.read,
    "llm-compressor": llm_compressor.read,
    "compressed-tensors": compressed_tensors.read,
    "auto-round": auto_round.read,
    "gptqmodel": gptqmodel.read,
    "torchao": torchao.read,
    "mlx": mlx.read,
    "gguf": llama_cpp.read,
}
# What tells a file's format, by the keys at its top; the first that fits.
_SIGNS: tuple[tuple[str, Callable[[str, Mapping[str, object]], bool]], ...] = (
    ("modelopt", lambda name, data: "metadata" in data and "quantize" in data),
    ("hf_quant_config", lambda name, data: "producer" in data or name == "hf_quant_config.json"),
    ("torchao", lambda name, data: data.get("_type") == "FqnToConfig"),
    ("gptqmodel", lambda name, data: "dynamic" in data or _method(data) == "gptq"),
    ("compressed-tensors", lambda name, data: _method(data) == "compressed-tensors" or "config_groups" in data),
    ("hf_quant_config", lambda name, data: _method(data) == "modelopt"),
    ("mlx", lambda name, data: "quantization" in data),
    ("llm-compressor", lambda name, data: any("modifiers" in str(value) or "Modifier" in str(value) for value in data.values())),
    ("auto-round", lambda name, data: bool(data) and all(isinstance(v, Mapping) and "bits" in v for v in data.values())),
)


def _method(data: Mapping[str, object]) -> object:
    inner = data.get("quantization_config", data)
    return inner.get("quant_method") if isinstance(inner, Mapping) else None


def read(path: Path, kind: str | None, subject: Subject) -> tuple[str, Found]:
    """Return (the file's format, what it says of the model's modules).

    Args:
        path: a file, or a checkpoint folder, whose hf_quant_config.json or config.json is read.
        kind: a name in READERS; None finds out.

    Raises UserError for a file that is missing, unreadable or of no known format.
    """
    if kind is not None and kind not in READERS:
        raise unknown("format to import", kind, READERS)
    if path.is_dir():
        found = [path / name for name in ("hf_quant_config.json", "config.json") if (path / name).is_file()]
        if not found:
            raise UserError(f"the folder {str(path)!r} has neither hf_quant_config.json nor config.json")
        path = found[0]
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no GGUF file {str(path)!r}")
        found_in_file = llama_cpp.read_gguf(path, subject)
        if not found_in_file.weights and not found_in_file.problems:
            raise UserError(f"{str(path)!r} quantizes no weight of this model")
        return "gguf", found_in_file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no file {str(path)!r} to import") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    kind = kind or _recognize(path, text)
    return kind, _guarded(kind, path, text, subject)


def _guarded(kind: str, path: Path, text: str, subject: Subject) -> Found:
    """Read a foreign file; whatever in it is of another shape than its tool writes ends as one sentence."""
    try:
        found = READERS[kind]({path.name: text}, subject)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        words = " ".join(str(error).split())[:120]
        raise UserError(f"{str(path)!r} is not as {kind} has it: {type(error).__name__}: {words}") from error
    if not found.problems and not found.weights and all(k.is_original and v.is_original for k, v in found.caches.values()):
        raise UserError(f"{str(path)!r} quantizes no weight and no cache of this model: is it of {kind}?")
    return found


def _recognize(path: Path, text: str) -> str:
    from autoq.exporters.documents import parse

    if path.suffix not in (".json", ".yaml", ".yml"):
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if lines and all("=" in line for line in lines):
            return "gguf"
        raise UserError(
            f"{str(path)!r} is neither JSON nor YAML nor a list of tensor types: say what it is with --from {', '.join(READERS)}"
        )
    data = parse(path.name, text)
    for kind, fits in _SIGNS:
        if fits(path.name, data):
            return kind
    raise UserError(f"{str(path)!r} is of no format that is known by its looks: say what it is with --from {', '.join(READERS)}")
