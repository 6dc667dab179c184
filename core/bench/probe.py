"""What the machine can do at most: bytes read from memory and floating-point operations, in a second.

Best of several tries, because anything else on the machine only takes away. Loads torch; called by engine_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Beyond any cache.
_BUFFER_BYTES = 512 << 20
_MATRIX = 1024


def _best_s(work: Callable[[], object], tries: int) -> float:
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


class Probe:
    """Both limits, for as many threads as torch has when it is asked.

    Args:
        dtype: that linear layers multiply in.
    """

    def __init__(self, dtype: torch.dtype, buffer_bytes: int = _BUFFER_BYTES, matrix: int = _MATRIX) -> None:
        self._buffer = torch.ones(buffer_bytes // 4)
        self._matrix = torch.ones(matrix, matrix).to(dtype)

    def read_bytes_per_s(self, tries: int = 3) -> float:
        """Adding up a big buffer: every byte is read once, nothing is written."""
        return self._buffer.nbytes / _best_s(self._buffer.sum, tries)

    def flops_per_s(self, tries: int = 3) -> float:
        """Multiplying a square matrix, as a linear layer does; an addition and a multiplication an element."""
        work = 2 * self._matrix.shape[0] ** 3
        return work / _best_s(lambda: torch.nn.functional.linear(self._matrix, self._matrix), tries)
