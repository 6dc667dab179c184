"""Attention over the KV pool, in one fixed order, for every decoder that transformers can plug it into.

    keys of a row, by absolute position:   |-- 128 --|-- 128 --|-- 128 --| ... masked beyond the query

For one query: scores against each range of 128 keys (a matrix product of fixed width), the exact maximum over
all, exponentials, the sum and the weighted values of each range by themselves, and then the ranges added first
to last. Nothing in this depends on who else is in the batch, on the chunk or on the number of threads; ranges
beyond the query add exact zeros. In float32, whatever the KV's dtype; the running sum over ranges in float64.

Prefill chunks, decode steps and mixtures of both are one packed forward: tokens [1, T], cut into runs.

This form gathers a row's blocks into contiguous memory before it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Keys of one range. A multiple of every block size allowed.
RANGE_TOKENS = 128
# Fewer query rows than this and the matrix kernels add in another order (see numerics.py).
MIN_QUERY_ROWS = 4


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
    """

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages
        self.block_tokens = pages.shape[4]
        self._decode: _DecodeRuns | None = None
        self._chunks: list[_Chunk] = []
        self._write_blocks = torch.empty(0, dtype=torch.int64)
        self._write_offsets = torch.empty(0, dtype=torch.int64)

    def prepare(self, runs: list[TokenRun]) -> None:
        """Lay out the next forward: where tokens are written, and which keys each query sees.

        Args:
            runs: in the order of the packed tokens.
        """
        blocks: list[int] = []
        offsets: list[int] = []
        single: list[tuple[int, TokenRun]] = []
        self._chunks = []
        at = 0
        for run in runs:
            positions = range(run.start, run.start + run.length)
            blocks += [run.block_table[position // self.block_tokens] for position in positions]
            offsets += [position % self.block_tokens for position in positions]
            if run.length == 1:
                single.append((at, run))
            else:
                self._chunks.append(_Chunk(at, run, self.block_tokens))
            at += run.length
        self._write_blocks = torch.tensor(blocks)
        self._write_offsets = torch.tensor(offsets)
        self._decode = _DecodeRuns(single, self.block_tokens) if single else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the new tokens' KV into the pages, then attend.

        Args:
            query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; T includes padding at the end,
                which is neither written nor attended for.

        Returns:
            [T, heads, head_dim], zero for padding, in the query's dtype.
        """
        keys, values = self.pages[:, layer, 0], self.pages[:, layer, 1]
        number = len(self._write_blocks)
        keys[self._write_blocks, :, self._write_offsets] = key[:number]
        values[self._write_blocks, :, self._write_offsets] = value[:number]
        out = torch.zeros(query.shape, dtype=torch.float32)
        if self._decode is not None:
            out[self._decode.tokens] = self._decode.attend(keys, values, query, scale)
        for chunk in self._chunks:
            out[chunk.at : chunk.at + chunk.length] = chunk.attend(keys, values, query, scale)
        return out.to(query.dtype)


class _Chunk:
    """Several tokens of one row: queries of one key/value head are one matrix."""

    def __init__(self, at: int, run: TokenRun, block_tokens: int) -> None:
        self.at = at
        self.length = run.length
        end = run.start + run.length
        self._table = torch.tensor(_padded_table(run.block_table, end, block_tokens))
        self._num_keys = end
        width = len(self._table) * block_tokens
        positions = torch.arange(width).view(1, -1, 1, RANGE_TOKENS)
        queries = torch.arange(run.start, end)
        # [1, ranges, queries, keys]: True where the query may not look.
        self._hidden = positions > queries.view(1, 1, -1, 1)

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, scale: float) -> Tensor:
        _, kv_heads, _, dim = keys.shape
        heads, length = query.shape[1], self.length
        group = heads // kv_heads
        k = keys[self._table].transpose(0, 1).reshape(kv_heads, -1, RANGE_TOKENS, dim).float()
        v = values[self._table].transpose(0, 1).reshape(kv_heads, -1, dim).float()
        v[:, self._num_keys :] = 0
        v = v.view(kv_heads, -1, RANGE_TOKENS, dim)
        q = query[self.at : self.at + length].float() * scale
        q = q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * length, dim)
        hidden = self._hidden.repeat(1, 1, group, 1)
        if (missing := MIN_QUERY_ROWS - group * length) > 0:
            q = torch.nn.functional.pad(q, (0, 0, 0, missing))
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        out = _attend(q, k, v, hidden)[:, : group * length]
        return out.view(kv_heads, group, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim)


class _DecodeRuns:
    """One token each of several rows: one matrix a row and key/value head."""

    def __init__(self, runs: list[tuple[int, TokenRun]], block_tokens: int) -> None:
        self.tokens = torch.tensor([at for at, _ in runs])
        longest = max(run.start for _, run in runs) + 1
        self._table = torch.tensor([_padded_table(run.block_table, longest, block_tokens) for _, run in runs])
        width = self._table.shape[1] * block_tokens
        positions = torch.arange(width).view(1, -1)
        starts = torch.tensor([run.start for _, run in runs]).view(-1, 1)
        self._hidden = positions > starts  # [rows, keys]

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, scale: float) -> Tensor:
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
        out = _attend(q, k, v, hidden.reshape(rows * kv_heads, -1, 1, RANGE_TOKENS))
        return out[:, :group].reshape(rows, heads, dim)


def _padded_table(block_table: list[int], num_keys: int, block_tokens: int) -> list[int]:
    """Blocks of the first `num_keys` positions, filled up to whole ranges with a block that masks hide."""
    per_range = RANGE_TOKENS // block_tokens
    number = -(-num_keys // RANGE_TOKENS) * per_range
    table = block_table[:number]
    return table + [block_table[0]] * (number - len(table))


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Softmax attention, ranges added first to last.

    Args:
        q: [matrices, query rows, head_dim], scaled; k, v: [matrices, ranges, RANGE_TOKENS, head_dim];
            float32; v finite where hidden.
        hidden: bool, broadcasts to [matrices, ranges, query rows, RANGE_TOKENS].

    Returns:
        [matrices, query rows, head_dim] float32.
    """
    matrices, ranges, _, dim = k.shape
    num_rows = q.shape[1]
    spread = q.unsqueeze(1).expand(-1, ranges, -1, -1).reshape(matrices * ranges, num_rows, dim)
    scores = torch.bmm(spread, k.view(matrices * ranges, RANGE_TOKENS, dim).transpose(1, 2))
    scores = scores.view(matrices, ranges, num_rows, RANGE_TOKENS).masked_fill_(hidden, -torch.inf)
    peak = scores.amax(dim=(1, 3), keepdim=True)
    weights = scores.sub_(peak).exp_()
    sums = weights.sum(dim=-1)
    parts = torch.bmm(
        weights.view(matrices * ranges, num_rows, RANGE_TOKENS), v.view(matrices * ranges, RANGE_TOKENS, dim)
    ).view(matrices, ranges, num_rows, dim)
    if ranges == 1:
        return parts[:, 0] / sums[:, 0].unsqueeze(-1)
    # A running sum adds strictly in order, so trailing ranges of zeros change nothing.
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
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' AttentionInterface calls: query [1, heads, T, head_dim], key/value [1, kv_heads, T, ...]."""
    if _current is None:
        raise RuntimeError("attention: no KV pool in use")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _current.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
    )
    return out.unsqueeze(0), None


def no_mask(*_: Any, **__: Any) -> None:
    """Masks are ours; transformers need build none."""
