"""The machine and the versions that figures were measured with: they mean nothing without."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pdctl.transport.machine import usable_cores

# Instructions that decide how fast a matrix is multiplied here.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("pdctl", "torch", "transformers", "safetensors")


def describe() -> dict[str, Any]:
    """CPU, cores, memory, kernel, load, and what is installed; figures with units in their keys."""
    cpu = _fields(Path("/proc/cpuinfo"))
    memory = _fields(Path("/proc/meminfo"))
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "usable_cores": usable_cores(),
        "instructions": [flag for flag in _TELLING_FLAGS if flag in flags],
        "memory_gib": round(int(memory.get("MemTotal", "0 kB").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "virtual": "hypervisor" in flags,
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _fields(path: Path) -> dict[str, str]:
    """`key: value` lines, the first of each key."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
