"""Choose a token from logits: a pure function of parameters, the row's tokens, logits, seed and position.

The order is that of vLLM's sampler (v1/sample/sampler.py):

    1. log-probabilities, if asked for: of the model's own logits, before anything below
    2. min_tokens: what would end the row is banned
    3. logit_bias
    4. penalties: repetition (prompt and output), frequency, presence (output alone)
    5. temperature 0 (or top_k 1): the largest; else temperature, min_p, top_k, top_p, and a draw

Ties go to the lowest id throughout. Randomness is a counter, not a stream: the number drawn for a position is a
hash of (seed, position), so a row that moves to another daemon, or is computed again, draws the same. What
penalties count is read from the row's tokens. Called by decode.py, once a row and step; knows nothing of batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pdctl.transport.rows import RowParams, TokenLogprobs

# Where nothing bounds the candidates, so many are tried before all are sorted: sorting 50,000 takes thirty times
# as long as finding the 128 largest.
_FEW = (128, 2048)


def uniform(seed: int, position: int) -> float:
    """The draw for one position, in [0, 1): 53 bits of blake2b over seed and position."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class RowSampler:
    """The sampler of one row. What it keeps can be read again from the row, and is, by the row's next owner.

    Args:
        params: what the request asks for.
        num_prompt: tokens of the prompt; what follows is output.
        end_ids: ids that end the row: banned until min_tokens are there. Those that the model does not have need
            no ban.
        read_tokens: (start, stop) -> the row's committed tokens; asked only if penalties count them.
    """

    def __init__(
        self,
        params: RowParams,
        *,
        num_prompt: int,
        end_ids: frozenset[int],
        read_tokens: Callable[[int, int], list[int]],
    ) -> None:
        self.params = params
        self._num_prompt = num_prompt
        self._read_tokens = read_tokens
        self._end_ids = sorted(end_ids)
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._repeats = params.repetition_penalty != 1.0
        self._counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._num_counted = 0
        self._seen: Tensor | None = None  # bool [vocab_size]
        self._output_counts: Tensor | None = None  # float32 [vocab_size]

    def sample(self, logits: Tensor, position: int) -> int:
        """The token for `position`; all before it are in the row.

        Args:
            logits: float32 [vocab_size], finite. Of this row: what other rows do has no part in it. Not changed.

        Raises:
            FloatingPointError: the logits are not finite, or the parameters leave no token.
            ValueError: a logit bias for an id that the model does not have.
        """
        return sample(self._adjust(logits, position), self.params, position)

    def _adjust(self, logits: Tensor, position: int) -> Tensor:
        """The logits after steps 2 to 4; themselves if there is nothing to do."""
        params = self.params
        bans = bool(self._end_ids) and position - self._num_prompt < params.min_tokens
        if not (bans or params.logit_bias or self._repeats or self._counts):
            return logits
        logits = logits.clone()
        if bans:
            logits[[token for token in self._end_ids if token < len(logits)]] = -math.inf
        if params.logit_bias:
            if (largest_id := int(self._bias_ids.max())) >= len(logits):
                raise ValueError(f"logit_bias for token id {largest_id}: the model has {len(logits)}")
            logits[self._bias_ids] += self._bias
        if self._repeats or self._counts:
            seen, counts = self._count(position, len(logits))
            # Products and differences in steps of their own: fused ones round differently at a vector's end.
            if self._repeats:
                penalty = params.repetition_penalty
                logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
            if self._counts:
                logits -= counts * params.frequency_penalty
                logits -= (counts > 0) * params.presence_penalty
        return logits

    def _count(self, position: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Which ids stand before `position`, and how often those of the output."""
        if self._seen is None or self._output_counts is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._output_counts = torch.zeros(vocab_size)
        tokens = self._read_tokens(self._num_counted, position)
        output = tokens[max(0, self._num_prompt - self._num_counted) :]
        self._seen[tokens] = True
        self._output_counts += torch.bincount(torch.tensor(output, dtype=torch.long), minlength=vocab_size)
        self._num_counted = position
        return self._seen, self._output_counts


def sample(logits: Tensor, params: RowParams, position: int) -> int:
    """Step 5: the token for `position`.

    Args:
        logits: float32 [vocab_size], no NaN and no +inf; -inf is a banned token.

    Raises:
        FloatingPointError: the logits are not finite, or all are banned.
    """
    likeliest = int(logits.argmax())
    peak = float(logits[likeliest])
    if not math.isfinite(peak):
        raise FloatingPointError("the model's logits are not finite" if peak != -math.inf else "no token is left")
    if params.temperature == 0.0 or params.top_k == 1:
        return likeliest
    chance = uniform(params.seed, position)
    running, ids, total = _candidates(logits, params, peak, chance)
    if params.top_p < 1.0:
        # The smallest set whose probability reaches top_p; always the first.
        running = running[: int((running < params.top_p * total).sum()) + 1]
        total = float(running[-1])
    return int(ids[int((running <= chance * total).sum())])


def _candidates(logits: Tensor, params: RowParams, peak: float, chance: float) -> tuple[Tensor, Tensor, float]:
    """What min_p and top_k leave, likeliest first.

    Returns:
        running: float64, sums of weights down to each candidate; the likeliest one's weight is 1.
        ids: of the candidates. Without filters, only as many as top_p and the draw can reach.
        total: the weight of all candidates.
    """

    def log_weights(values: Tensor) -> Tensor:
        return (values.double() - peak) / params.temperature

    def descend(number: int) -> tuple[Tensor, Tensor]:
        values, ids = largest(logits, number)
        # A cumulative sum adds in one order, whatever the number of threads; sum() does not.
        return log_weights(values).exp().cumsum(0), ids

    number = min(params.top_k or len(logits), len(logits))
    if params.min_p > 0.0:
        number = min(number, int((log_weights(logits) >= math.log(params.min_p)).sum()))
    if number == len(logits):
        total = float(log_weights(logits).exp().cumsum(0)[-1])
        needed = total * (params.top_p if params.top_p < 1.0 else chance)
        for few in _FEW:
            running, ids = descend(few)
            if float(running[-1]) > needed:
                return running, ids, total
    running, ids = descend(number)
    return running, ids, float(running[-1])


def largest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The `number` largest and their ids, largest first, of equal ones the lowest id first.

    What a stable sort of all would begin with, without sorting all.
    """
    if 8 * number > len(logits):
        values, order = torch.sort(logits, descending=True, stable=True)
        return values[:number], order[:number]
    # topk finds the values, but among equal ones at the end takes any.
    bound = torch.topk(logits, number).values[-1]
    ids = (logits >= bound).nonzero().squeeze(1)
    values, order = torch.sort(logits[ids], descending=True, stable=True)
    return values[:number], ids[order[:number]]


def token_logprobs(logits: Tensor, token: int, number: int) -> TokenLogprobs:
    """Step 1: log-softmax of the model's own logits, of `token` and of the `number` likeliest."""
    exact = logits.double()
    peak = exact.max()
    log_total = peak + (exact - peak).exp().cumsum(0)[-1].log()
    top: tuple[tuple[int, float], ...] = ()
    if number:
        values, ids = largest(logits, number)
        top = tuple(zip(ids.tolist(), (values.double() - log_total).tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=float(exact[token] - log_total), top=top)
