"""Choose a token from logits: a pure function of parameters, logits, seed and position.

Randomness is a counter, not a stream: the number drawn for a position is a hash of (seed, position), so a row
that moves to another daemon, or is computed again, draws the same. Ties go to the lowest id.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pdctl.transport.rows import RowParams


def uniform(seed: int, position: int) -> float:
    """The draw for one position, in [0, 1): 53 bits of blake2b over seed and position."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: Tensor, params: RowParams, position: int) -> int:
    """The token for `position`.

    Args:
        logits: float32 [vocab_size], finite. Of one row: what other rows do has no part in it.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    if params.temperature == 0.0 or params.top_k == 1:
        token = int(logits.argmax())
        if not torch.isfinite(logits[token]):
            raise FloatingPointError("the model's logits are not finite")
        return token
    # Stable, descending: equal logits stay in the order of their ids.
    values, order = torch.sort(logits, descending=True, stable=True)
    if not torch.isfinite(values[0]):
        raise FloatingPointError("the model's logits are not finite")
    values = values.double() / params.temperature
    if params.top_k > 0:
        values = values[: params.top_k]
    weights = torch.exp(values - values[0])
    running = weights.cumsum(0)
    if params.top_p < 1.0:
        # The smallest set whose probability reaches top_p; always the first.
        kept = int((running < params.top_p * running[-1]).sum()) + 1
        running = running[:kept]
    drawn = uniform(params.seed, position) * float(running[-1])
    index = int((running <= drawn).sum())
    return int(order[min(index, len(running) - 1)])
