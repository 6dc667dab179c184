"""The machine that figures were measured on, its versions, and whether it was quiet: they mean nothing without."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pdctl.transport.machine import usable_cores

# Instructions that decide how fast a matrix is multiplied here.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("pdctl", "torch", "transformers", "safetensors")
# A machine that is busier than this before anything is measured does something else, too.
QUIET = 0.15
_LOOK_S = 0.5


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


def await_quiet(wait_s: float) -> float:
    """Wait at most so long until the machine has come to rest from what was done before.

    Returns:
        How busy it is then, of all its cores.
    """
    import psutil

    deadline = time.monotonic() + wait_s
    while True:
        share = float(psutil.cpu_percent(_LOOK_S)) / 100
        if share <= QUIET or time.monotonic() > deadline:
            return share


def doubts(busy: Sequence[float]) -> list[str]:
    """What to say if the machine was not quiet; nothing if it was.

    Args:
        busy: what `await_quiet` found before each turn; one turn: before all of it.
    """
    loud = sum(share > QUIET for share in busy)
    if not loud:
        return []
    when = "Before it began" if len(busy) == 1 else f"Before {loud} of {len(busy)} turns"
    most = f"{'up to ' if loud > 1 else ''}{max(busy):.0%} of its cores"
    return [f"{when} the machine was busy ({most}) with something else: the figures are not to be trusted."]


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
