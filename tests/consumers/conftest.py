"""Recipes that hold every format a consumer has, exported, and run in the consumer's own environment (`make consumers`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from autoq import api
from autoq.api.applying import recipe_assignment
from autoq.api.entries import provenance, recipe_of
from autoq.api.exporting import ExportReport
from autoq.exporters.consumers import CONSUMERS
from autoq.formats import reference
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS, kv_format
from autoq.measure.calibrate import calibrate
from autoq.measure.divergence import Yardstick
from autoq.model import load
from autoq.model.text import sequences, text_sources
from autoq.model.units import find_units
from autoq.recipe import Recipe, read_recipe

DRIVERS = Path(__file__).parent / "drivers"
ENVIRONMENTS = Path(os.environ.get("AUTOQ_CONSUMERS", Path(__file__).parents[2] / ".venv" / "consumers")).resolve()
WINDOWS, TOKENS = 6, 96


@dataclass(frozen=True)
class Bench:
    """The demo model, loaded, with text to calibrate and to measure on."""

    model: PreTrainedModel
    ids: torch.Tensor
    calibration: torch.Tensor
    folder: Path
    long_calibration: torch.Tensor

    def recipe(self, weights: list[str], cache: dict[int, tuple[str, str]] | None = None) -> Path:
        """Write a recipe: the weight formats in turn over the units they fit, K and V of some layers in a cache format."""
        units = find_units(self.model)
        turn = cycle(weights)
        chosen = {}
        for unit in units.weights:
            for _ in weights:
                fmt = WEIGHT_FORMATS[next(turn)]
                if not any(t.width % (fmt.block or 1) for t in unit.tensors):
                    break
            chosen[unit.name] = fmt
        pairs = cache or {}
        caches = {u.name: kv_format(pairs.get(u.layer or 0, ("bf16", "bf16"))[u.kind == "value"]) for u in units.caches}
        dtype = str(self.model.dtype).removeprefix("torch.")
        known = calibrate(self.model, units, self.calibration)
        recipe = recipe_of(
            "demo", self.model, units, chosen, caches, known, provenance(0, "test", "stdlib", 0, 0, dtype, "cpu"), 512
        )
        path = self.folder / f"recipe-{len(list(self.folder.glob('*.yaml')))}.yaml"
        recipe.write(path)
        return path

    def original(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.model.get_parameter(f"{name}.weight").detach().float()
        return found

    def kl(self, recipe: Recipe) -> list[float]:
        """Return autoq's own measurement, by window."""
        units = find_units(self.model)
        yardstick = Yardstick(self.model, units, self.ids, batch=1)
        found: list[float] = yardstick.measure(recipe_assignment(recipe, units)).kl.mean(1).tolist()
        return found

    def weights(self, recipe: Recipe, share_tensor_scales: bool = False) -> dict[str, torch.Tensor]:
        """Return the rounded weights by module, float32; a unit's tensors under one tensor scale where the consumer shares it."""
        formats, found = recipe.weight_formats(), {}
        for unit in find_units(self.model).weights:
            fmt = formats[unit.name]
            if fmt.is_original:
                continue
            values = {t.name: self.model.get_parameter(t.parameter).data for t in unit.tensors}
            largest = torch.stack([v.abs().amax() for v in values.values()]).amax().float()
            for name, value in values.items():
                absmax = largest if share_tensor_scales and fmt.tensor_scale else None
                found[name] = reference.fake_quantize(fmt, value, absmax=absmax).to(value.dtype).float()
        return found


@pytest.fixture(scope="module", params=["float32"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    source = load.model_source("demo")
    model, tokenizer = load.load_model(source, "cpu", request.param), load.load_tokenizer(source)
    profile, measure = text_sources(None, None)
    ids = sequences(tokenizer, measure, WINDOWS, TOKENS)
    short, long = (sequences(tokenizer, profile, count, TOKENS) for count in (WINDOWS, 96))
    return Bench(model, ids, short, tmp_path_factory.mktemp("consumer"), long)


def formats_of(consumer: str) -> list[str]:
    names = CONSUMERS[consumer].weights
    assert names is not None
    return list(names)


def caches_of(consumer: str) -> list[str]:
    names = CONSUMERS[consumer].caches
    assert names is not None
    return [n for n in names if n in KV_FORMATS]


def exported(bench: Bench, path: Path, consumer: str) -> tuple[Recipe, ExportReport]:
    """Export a recipe that the consumer can have whole; fail if it says that something is lost."""
    report = api.export(path, consumer, out=path.with_suffix("") / consumer)
    assert not report.losses
    return read_recipe(path), report


def apart(found: torch.Tensor, expected: torch.Tensor, original: torch.Tensor) -> float:
    """Return the squared difference to what is expected over the squared rounding error: 1 if nothing was rounded, or more.

    Another rule of picking scales makes 0.2 and more (absmax / 127 against 127.5: 1.2), scales kept with other digits some per cent.
    """
    return float((found - expected).square().sum() / (original - expected).square().sum())


Driver = Callable[..., dict[str, Any]]


@pytest.fixture
def drive(bench: Bench, tmp_path: Path) -> Driver:
    """Return a function that runs a driver in an environment on a job and returns what it found, with "weights" by module."""

    def run(environment: str, driver: str, recipe: Path, **job: Any) -> dict[str, Any]:
        python = ENVIRONMENTS / environment / "bin" / "python"
        if not python.exists():
            pytest.fail(f"{python} is missing: `make consumers` builds the environments and runs these tests")
        job = {
            "model": str(load.DEMO_FOLDER), "recipe": str(recipe), "ids": bench.ids.tolist(), "calibration": bench.calibration.tolist(),
            "weights": str(tmp_path / "weights.safetensors"), "checkpoint": str(tmp_path / "checkpoint"), **job,
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job))
        command = [str(python), str(DRIVERS / f"run_{driver}.py"), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
        environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")} | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=1200)
        if done.returncode:
            pytest.fail(f"{driver} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        if Path(job["weights"]).exists():
            result["weights"] = load_file(job["weights"])
        return result

    return run
