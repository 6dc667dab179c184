"""Attention over the KV pool, in one fixed order, for every decoder that transformers can plug it into.

    keys of a row, by absolute position:   |-- 128 --|-- 128 --|-- 128 --| ... masked beyond the query

For one query: scores against each range of 128 keys (a matrix product of fixed width), the exact maximum over
all, exponentials, the sum and the weighted values of each range by themselves, and then the ranges added first
to last. Nothing in this depends on who else is in the batch, on the chunk or on the number of threads; ranges
beyond the query, or before its sliding window, add exact zeros, and so may be left out. In float32, whatever the
KV's dtype; the running sum over ranges in float64.

Prefill chunks, decode steps and mixtures of both are one packed forward: tokens [1, T], cut into runs.

This form gathers a row's blocks into contiguous memory before it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdctl.transport.errors import IncompatibleError

# Keys of one range. A multiple of every block size allowed.
RANGE_TOKENS = 128
# Fewer query rows than this and the matrix kernels add in another order (see numerics.py).
MIN_QUERY_ROWS = 4
# Scores of one part of a chunk's attention: what is done between two ticks, and in memory at once (64 MiB).
_PART_SCORES = 1 << 24
# Keys that one part of a decode batch gathers. Rows of one length share it; a long one does not widen all others.
_PART_KEYS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Consecutive tokens of one row inside a packed forward.

    Attributes:
        block_table: the row's blocks, at least up to its last position here.
        start: absolute position of the first token.
        length: number of tokens.
    """

    block_table: list[int]
    start: int
    length: int


class PagedKV:
    """The KV pages of a segment as one tensor, and the forward under way.

    Attributes:
        pages: [num_blocks, layers, 2, kv_heads, block_tokens, head_dim] over the shared memory itself.

    Args:
        tick: called whenever a layer's attention, or a part of it of bounded size, is done.
    """

    def __init__(self, pages: Tensor, tick: Callable[[], None]) -> None:
        self.pages = pages
        self._tick = tick
        self.block_tokens = pages.shape[4]
        self._single: list[tuple[int, TokenRun]] = []
        self._several: list[tuple[int, TokenRun]] = []
        self._views: dict[int | None, _View] = {}
        self._write_blocks = torch.empty(0, dtype=torch.int64)
        self._write_offsets = torch.empty(0, dtype=torch.int64)

    def prepare(self, runs: list[TokenRun]) -> None:
        """Lay out the next forward: where tokens are written; which keys each query sees follows layer by layer.

        Args:
            runs: in the order of the packed tokens.
        """
        blocks: list[int] = []
        offsets: list[int] = []
        self._single, self._several, self._views = [], [], {}
        at = 0
        for run in runs:
            positions = range(run.start, run.start + run.length)
            blocks += [run.block_table[position // self.block_tokens] for position in positions]
            offsets += [position % self.block_tokens for position in positions]
            (self._single if run.length == 1 else self._several).append((at, run))
            at += run.length
        self._write_blocks = torch.tensor(blocks)
        self._write_offsets = torch.tensor(offsets)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write the new tokens' KV into the pages, then attend.

        Args:
            query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; T includes padding at the end,
                which is neither written nor attended for.
            window: keys a query sees, itself the last of them; None: all up to itself.
            softcap: scores become softcap * tanh(score / softcap); None: they stay.

        Returns:
            [T, heads, head_dim], zero for padding, in the query's dtype.
        """
        keys, values = self.pages[:, layer, 0], self.pages[:, layer, 1]
        number = len(self._write_blocks)
        keys[self._write_blocks, :, self._write_offsets] = key[:number]
        values[self._write_blocks, :, self._write_offsets] = value[:number]
        view = self._views.get(window)
        if view is None:
            view = self._views[window] = _View(self._single, self._several, self.block_tokens, window)
        out = torch.zeros(query.shape, dtype=torch.float32)
        for decode in view.decode:
            out[decode.tokens] = decode.attend(keys, values, query, scale, softcap)
            self._tick()
        for chunk in view.chunks:
            out[chunk.at : chunk.at + chunk.length] = chunk.attend(keys, values, query, scale, softcap, self._tick)
        return out.to(query.dtype)


class _View:
    """Which keys the queries of one forward see through one window: the same in all layers that have it."""

    def __init__(
        self,
        single: list[tuple[int, TokenRun]],
        several: list[tuple[int, TokenRun]],
        block_tokens: int,
        window: int | None,
    ) -> None:
        self.decode = [_DecodeRuns(part, block_tokens, window) for part in _parts_of_batch(single)]
        self.chunks = [_Chunk(at, run, block_tokens, window) for at, run in several]


class _Chunk:
    """Several tokens of one row: queries of one key/value head are one matrix."""

    def __init__(self, at: int, run: TokenRun, block_tokens: int, window: int | None) -> None:
        self.at = at
        self.length = run.length
        end = run.start + run.length
        first = _first_range(run.start, window)
        num_ranges = _num_ranges(end) - first
        self._table = torch.tensor(_table_of(run.block_table, first, num_ranges, block_tokens))
        self._num_keys = end - first * RANGE_TOKENS
        positions = torch.arange(first * RANGE_TOKENS, (first + num_ranges) * RANGE_TOKENS)
        queries = torch.arange(run.start, end)
        # [1, ranges, queries, keys]: True where the query may not look.
        self._hidden = _hidden(positions.view(1, -1, 1, RANGE_TOKENS), queries.view(1, 1, -1, 1), window)

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        scale: float,
        softcap: float | None,
        tick: Callable[[], None],
    ) -> Tensor:
        _, kv_heads, _, dim = keys.shape
        heads, length = query.shape[1], self.length
        k = keys[self._table].transpose(0, 1).reshape(kv_heads, -1, RANGE_TOKENS, dim).float()
        v = values[self._table].transpose(0, 1).reshape(kv_heads, -1, dim).float()
        v[:, self._num_keys :] = 0
        v = v.view(kv_heads, -1, RANGE_TOKENS, dim)
        num_keys = k.shape[1] * RANGE_TOKENS
        size = max(1, _PART_SCORES // (heads * num_keys))
        parts = []
        for first in range(0, length, size):
            q = query[self.at + first : self.at + min(first + size, length)].float() * scale
            parts.append(_attend_chunk(q, k, v, self._hidden[:, :, first : first + size], softcap))
            tick()
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float | None) -> Tensor:
    """Some queries of one row: q and the result are [queries, heads, head_dim]; the rest as in `_attend`."""
    length, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    q = q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * length, dim)
    hidden = hidden.repeat(1, 1, group, 1)
    if (missing := MIN_QUERY_ROWS - group * length) > 0:
        q = torch.nn.functional.pad(q, (0, 0, 0, missing))
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
    out = _attend(q, k, v, hidden, softcap)[:, : group * length]
    return out.view(kv_heads, group, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim)


def _parts_of_batch(single: list[tuple[int, TokenRun]]) -> list[list[tuple[int, TokenRun]]]:
    """Rows of a decode batch in parts, shortest first: each gathers at most _PART_KEYS keys, or is one row."""
    parts: list[list[tuple[int, TokenRun]]] = []
    for one in sorted(single, key=lambda pair: pair[1].start):
        width = _num_ranges(one[1].start + 1) * RANGE_TOKENS
        if not parts or (len(parts[-1]) + 1) * width > _PART_KEYS:
            parts.append([])
        parts[-1].append(one)
    return parts


class _DecodeRuns:
    """One token each of several rows: one matrix a row and key/value head."""

    def __init__(self, runs: list[tuple[int, TokenRun]], block_tokens: int, window: int | None) -> None:
        self.tokens = torch.tensor([at for at, _ in runs])
        # Each row from its own first range on: the shorter ones have ranges of zeros behind them.
        firsts = [_first_range(run.start, window) for _, run in runs]
        num_ranges = max(_num_ranges(run.start + 1) - first for first, (_, run) in zip(firsts, runs, strict=True))
        self._table = torch.tensor(
            [
                _table_of(run.block_table, first, num_ranges, block_tokens)
                for first, (_, run) in zip(firsts, runs, strict=True)
            ]
        )
        positions = torch.tensor(firsts).view(-1, 1) * RANGE_TOKENS + torch.arange(num_ranges * RANGE_TOKENS)
        starts = torch.tensor([run.start for _, run in runs]).view(-1, 1)
        self._hidden = _hidden(positions, starts, window)  # [rows, keys]

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, scale: float, softcap: float | None) -> Tensor:
        _, kv_heads, _, dim = keys.shape
        rows, width = self._hidden.shape
        heads = query.shape[1]
        group = heads // kv_heads
        shape = (rows * kv_heads, -1, RANGE_TOKENS, dim)
        k = keys[self._table].transpose(1, 2).reshape(shape).float()
        v = values[self._table].transpose(1, 2).reshape(rows, kv_heads, width, dim).float()
        v = v.masked_fill(self._hidden.view(rows, 1, width, 1), 0).view(shape)
        q = (query[self.tokens].float() * scale).view(rows * kv_heads, group, dim)
        if group < MIN_QUERY_ROWS:
            q = torch.nn.functional.pad(q, (0, 0, 0, MIN_QUERY_ROWS - group))
        hidden = self._hidden.view(rows, 1, -1, 1, RANGE_TOKENS).expand(-1, kv_heads, -1, -1, -1)
        out = _attend(q, k, v, hidden.reshape(rows * kv_heads, -1, 1, RANGE_TOKENS), softcap)
        return out[:, :group].reshape(rows, heads, dim)


def _first_range(position: int, window: int | None) -> int:
    """The range of the first key that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // RANGE_TOKENS


def _num_ranges(num_keys: int) -> int:
    return -(-num_keys // RANGE_TOKENS)


def _hidden(positions: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """True where a query may not look: at keys after itself, and at those before its window."""
    hidden = positions > queries
    return hidden if window is None else hidden | (positions <= queries - window)


def _table_of(block_table: list[int], first: int, num_ranges: int, block_tokens: int) -> list[int]:
    """Blocks of the ranges from `first` on, filled up to whole ranges with a block that masks hide."""
    per_range = RANGE_TOKENS // block_tokens
    table = block_table[first * per_range : (first + num_ranges) * per_range]
    return table + [block_table[0]] * (num_ranges * per_range - len(table))


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float | None) -> Tensor:
    """Softmax attention, ranges added first to last.

    Args:
        q: [matrices, query rows, head_dim], scaled; k, v: [matrices, ranges, RANGE_TOKENS, head_dim];
            float32; v finite where hidden.
        hidden: bool, broadcasts to [matrices, ranges, query rows, RANGE_TOKENS].
        softcap: see `PagedKV.attend`.

    Returns:
        [matrices, query rows, head_dim] float32.
    """
    matrices, ranges, _, dim = k.shape
    num_rows = q.shape[1]
    if matrices == ranges == 1:
        # A product all by itself is split among threads along the keys, and so added in another order.
        q, k, v = (tensor.expand(2, *tensor.shape[1:]) for tensor in (q, k, v))
        return _attend(q, k, v, hidden, softcap)[:1]
    spread = q.unsqueeze(1).expand(-1, ranges, -1, -1).reshape(matrices * ranges, num_rows, dim)
    scores = torch.bmm(spread, k.reshape(matrices * ranges, RANGE_TOKENS, dim).transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(matrices, ranges, num_rows, RANGE_TOKENS).masked_fill_(hidden, -torch.inf)
    peak = scores.amax(dim=(1, 3), keepdim=True)
    weights = scores.sub_(peak).exp_()
    sums = weights.sum(dim=-1)
    parts = torch.bmm(
        weights.view(matrices * ranges, num_rows, RANGE_TOKENS), v.reshape(matrices * ranges, RANGE_TOKENS, dim)
    ).view(matrices, ranges, num_rows, dim)
    if ranges == 1:
        return parts[:, 0] / sums[:, 0].unsqueeze(-1)
    # A running sum adds strictly in order, so ranges of zeros before and behind change nothing.
    return parts.cumsum(1)[:, -1] / sums.cumsum(1)[:, -1].unsqueeze(-1)


_current: PagedKV | None = None


def use(paged: PagedKV) -> None:
    """Make `paged` the pool that the model's attention works on, in this process."""
    global _current
    _current = paged


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' AttentionInterface calls: query [1, heads, T, head_dim], key/value [1, kv_heads, T, ...].

    Raises:
        IncompatibleError: the model asks for something else than this attention does.
    """
    if _current is None:
        raise RuntimeError("attention: no KV pool in use")
    _refuse_others(module, attention_mask, key, value, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _current.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


# Positions are in keys and queries already, and no cache but ours is in use.
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache"})
# What this attention does anyway.
_DONE = {"dropout": 0.0, "is_causal": True}


def _refuse_others(
    module: torch.nn.Module, attention_mask: Tensor | None, key: Tensor, value: Tensor, others: dict[str, Any]
) -> None:
    """Raise for anything a caller may want that would be left out of the result.

    Nothing in the families that are served: this is for those to come, and for other versions of transformers.
    """
    name = type(module).__name__
    for argument, given in others.items():
        if given is None or argument in _WITHOUT_EFFECT or (argument in _DONE and given == _DONE[argument]):
            continue
        raise IncompatibleError(f"{name}: its attention wants {argument}, which pdctl's does not do")
    if attention_mask is not None:
        raise IncompatibleError(f"{name}: its attention wants a mask of its own; pdctl's sees all tokens before")
    if not getattr(module, "is_causal", True):
        raise IncompatibleError(f"{name}: its attention is not causal; pdctl's sees only tokens before")
    if key.shape != value.shape:
        raise IncompatibleError(
            f"{name}: keys of {tuple(key.shape)} and values of {tuple(value.shape)}; pdctl keeps them in one size"
        )


def no_mask(*_: Any, **__: Any) -> None:
    """Masks are ours; transformers need build none."""
