"""Which arithmetic a daemon computes with, known before torch is loaded.

Logits and KV must depend on a row's tokens and the model alone. Stock kernels choose other instruction orders by
batch size and thread count; these settings, padded forwards, an attention that adds in one fixed order (attention.py)
and activations that do not depend on place (activations.py) take that freedom away. What they settled on is the
segment's numerics id: daemons that compute differently cannot share KV.

Knows nothing of models; called by the supervisor, the zygote and the daemons. No torch.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from pdctl.transport.machine import usable_cores

# Raised whenever our own arithmetic changes: attention, sampler, padding.
NUMERICS_VERSION = 2
# Linear layers give a row the same bits for every number of rows from here on (measured; probed at start).
MIN_FORWARD_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """One way to compute.

    Attributes:
        isa: the instruction set that matrix kernels are held to: "avx512" or "avx2".
        linear: "native" runs linear layers in the model's dtype; "widened" multiplies bfloat16 weights as
            float32, because this CPU has no bfloat16 matrix kernels (its emulation is 4 times slower).
        dtype: of weights, activations and KV.
    """

    isa: str
    linear: str
    dtype: str
    torch_version: str
    transformers_version: str

    @property
    def id(self) -> int:
        text = "|".join(
            (
                str(NUMERICS_VERSION),
                self.isa,
                self.linear,
                self.dtype,
                self.torch_version,
                self.transformers_version,
            )
        )
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    @property
    def label(self) -> str:
        return f"{self.dtype}, {self.isa}, linear {self.linear}"


@cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def numerics(dtype: str) -> Numerics:
    """How this machine computes in `dtype` ("float32" or "bfloat16")."""
    flags = _cpu_flags()
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    return Numerics(
        isa="avx512" if avx512 else "avx2",
        linear="native" if dtype == "float32" or avx512 else "widened",
        dtype=dtype,
        torch_version=metadata.version("torch"),
        transformers_version=metadata.version("transformers"),
    )


def default_dtype(of_model: str) -> str:
    """What `--dtype auto` means: bfloat16 for a bfloat16 model on a CPU that multiplies it, else float32.

    Elsewhere bfloat16 would save KV memory only, and cost accuracy for no speed.
    """
    return "bfloat16" if of_model == "bfloat16" and "avx512_bf16" in _cpu_flags() else "float32"


def environment(chosen: Numerics) -> dict[str, str]:
    """Environment variables that must stand before torch is loaded.

    MKL_CBWR holds matrix kernels to one instruction order; a passive wait keeps the idle threads of one daemon
    from spinning on the cores of another (spinning halves prefill's speed). malloc keeps what a forward frees for
    the next one: giving it back and faulting it in again costs prefill a fifth of its time.
    """
    return {
        "MKL_CBWR": f"{chosen.isa.upper()},STRICT",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(usable_cores())),
    }
