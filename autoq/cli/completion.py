"""What a shell completes an option's value with. Lists are written out where reading them would import torch; a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

CONSUMERS = (
    "modelopt", "llm-compressor", "compressed-tensors", "auto-round", "gptqmodel", "torchao", "transformers", "vllm", "sglang", "tensorrt-llm",
    "llama.cpp", "mlx",
)  # fmt: skip
ENGINES = ("none", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")
TARGETS = ("any", "cpu", "a100", "l40s", "h100", "h200", "b200", "rtx4090", "rtx5090")
SAMPLERS = ("tpe", "gp", "nsga3", "cmaes", "random")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KINDS = (
    "modelopt", "hf_quant_config", "llm-compressor", "compressed-tensors", "auto-round", "gptqmodel", "torchao", "mlx", "gguf",
)  # fmt: skip
ROUNDS = ("none", "scales", "up")

Complete = Callable[[str], list[str]]


def among(names: Sequence[str]) -> Complete:
    """Return what completes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def spaces(incomplete: str) -> list[str]:
    """Complete bundled search spaces and YAML files."""
    bundled = sorted(path.stem for path in (Path(__file__).resolve().parent.parent / "search_spaces").glob("*.yaml"))
    return [*among(bundled)(incomplete), *_paths(incomplete, lambda p: p.suffix in (".yaml", ".yml"))]


def models(incomplete: str) -> list[str]:
    """Complete the demo, model folders and GGUF files."""
    return [*among(["demo"])(incomplete), *_paths(incomplete, lambda p: p.suffix == ".gguf" or (p / "config.json").is_file())]


def runs(incomplete: str) -> list[str]:
    """Complete run folders and recipe files."""
    found = [str(p) for p in sorted(Path("runs").glob("*")) if (p / "run.json").is_file() and str(p).startswith(incomplete)]
    return [*found, *(p for p in _paths(incomplete, lambda p: p.suffix == ".yaml" or (p / "run.json").is_file()) if p not in found)]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    """Return the paths that go on from what is typed: what is wanted, and folders on the way."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    start = "" if incomplete.endswith("/") else Path(incomplete).name
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    matching = [p for p in entries if p.name.startswith(start) and not p.name.startswith(".")]
    return [str(p) if wanted(p) else f"{p}/" for p in matching if wanted(p) or p.is_dir()]
