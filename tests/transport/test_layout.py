from __future__ import annotations

from dataclasses import fields, replace
from enum import IntEnum
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.transport.layout import (
    BLOCK_WORDS,
    HEADER_WORDS,
    HUGE_PAGE_BYTES,
    LOGPROB_RING,
    LOGPROB_WORDS,
    MAX_LOGPROBS,
    NUM_GEOMETRY_WORDS,
    PARTICIPANT_WORDS,
    RING_WORDS,
    ROW_FIELD_WORDS,
    WORD,
    B,
    DType,
    Geometry,
    H,
    Layout,
    P,
    R,
)
from pdctl.transport.lock import MutationLock, NoFileLock, Op
from pdctl.transport.pool import Pool

GEOMETRIES = st.builds(
    Geometry,
    num_blocks=st.integers(1, 1 << 20),
    block_tokens=st.integers(1, 512),
    num_layers=st.integers(1, 128),
    num_kv_heads=st.integers(1, 128),
    head_dim=st.integers(1, 512),
    dtype=st.sampled_from(DType),
    max_rows=st.integers(1, 4096),
    max_context=st.integers(1, 1 << 20),
    max_participants=st.integers(1, 512),
    ring_events=st.integers(1, 4096),
)
HUGE = Geometry(
    num_blocks=1 << 34,
    block_tokens=256,
    num_layers=128,
    num_kv_heads=64,
    head_dim=256,
    dtype=DType.BFLOAT16,
    max_rows=1 << 16,
    max_context=1 << 24,
)


def sections(layout: Layout) -> list[tuple[str, int, int]]:
    """(name, first word, number of words) of everything in front of the KV pages."""
    g = layout.geometry
    return [
        ("header", 0, HEADER_WORDS),
        ("participants", layout.participants, g.max_participants * PARTICIPANT_WORDS),
        ("row states", layout.row_states, g.max_rows),
        ("rows", layout.rows, g.max_rows * layout.row_words),
        ("blocks", layout.blocks, g.num_blocks * BLOCK_WORDS),
        ("block tokens", layout.block_tokens, g.num_blocks * g.block_tokens),
        ("buckets", layout.buckets, g.num_buckets),
        ("journal", layout.journal, 2 * g.journal_entries),
        ("ring", layout.ring, g.ring_events * RING_WORDS),
    ]


@given(GEOMETRIES)
def test_sections_follow_each_other(g: Geometry) -> None:
    layout = Layout(g)
    end = 0
    for name, start, length in sections(layout):
        assert start == end, name
        end = start + length
    assert layout.meta_words == end
    assert layout.kv_offset % HUGE_PAGE_BYTES == 0
    assert 0 <= layout.kv_offset - end * WORD < HUGE_PAGE_BYTES
    assert layout.total_bytes == layout.kv_offset + g.num_blocks * g.block_bytes


@given(GEOMETRIES)
def test_parts_of_a_row_follow_each_other(g: Geometry) -> None:
    layout = Layout(g)
    parts = [
        layout.row_request_id,
        layout.row_error,
        layout.row_params,
        layout.row_blocks,
        layout.row_tokens,
        layout.row_logprobs,
        layout.row_words,
    ]
    assert parts == sorted(set(parts))
    assert layout.row_request_id >= ROW_FIELD_WORDS
    assert layout.row_tokens - layout.row_blocks == g.blocks_per_row
    assert g.blocks_per_row * g.block_tokens >= g.max_context
    assert layout.row_logprobs - layout.row_tokens == g.max_context
    assert layout.row_words - layout.row_logprobs == LOGPROB_RING * LOGPROB_WORDS
    assert LOGPROB_WORDS == 1 + MAX_LOGPROBS
    assert layout.row(1) - layout.row(0) == layout.row_words


@pytest.mark.parametrize(
    ("words", "room"), [(H, HEADER_WORDS), (P, PARTICIPANT_WORDS), (R, ROW_FIELD_WORDS), (B, BLOCK_WORDS)]
)
def test_words_have_a_place_of_their_own(words: type[IntEnum], room: int) -> None:
    assert len(words.__members__) == len({word.value for word in words})
    assert max(words) < room


def test_geometry_words_end_before_the_next() -> None:
    inside = [word for word in H if H.GEOMETRY < word < H.GEOMETRY + NUM_GEOMETRY_WORDS]
    assert inside == []


@given(GEOMETRIES)
def test_geometry_survives_its_words(g: Geometry) -> None:
    words = g.to_words()
    assert len(words) == NUM_GEOMETRY_WORDS == len(fields(Geometry))
    assert Geometry.from_words(words) == g


def test_geometry_words_keep_their_order(kit: ModuleType) -> None:
    """Swapped fields would survive the round trip: the order is part of the layout version."""
    g = replace(kit.geometry(), num_layers=2, num_kv_heads=3, head_dim=5, dtype=DType.BFLOAT16)
    assert g.to_words() == [12, 4, 2, 3, 5, 2, 6, 32, 12, 16]


def test_block_bytes() -> None:
    g = Geometry(num_blocks=10, block_tokens=16, num_layers=3, num_kv_heads=5, head_dim=64, dtype=DType.BFLOAT16)
    assert g.token_bytes == 3 * 2 * 5 * 64 * 2
    assert g.block_bytes == 16 * g.token_bytes
    assert replace(g, dtype=DType.FLOAT32).kv_bytes == 2 * 10 * g.block_bytes


@given(GEOMETRIES)
def test_the_journal_holds_the_longest_section(g: Geometry) -> None:
    # For each place of a row: evict (17 stores) and allocate (7), or pin (7) and release (7); besides, a row's
    # 71 fields.
    assert g.journal_entries >= 24 * g.blocks_per_row + 200


def test_offsets_beyond_32_bits_are_exact() -> None:
    layout = Layout(HUGE)
    last = layout.block(HUGE.num_blocks - 1)
    assert last == layout.blocks + (HUGE.num_blocks - 1) * BLOCK_WORDS
    assert layout.row(HUGE.max_rows - 1) > 1 << 32
    assert last > 1 << 32
    assert layout.journal > last
    assert layout.total_bytes > 1 << 60
    assert layout.total_bytes == layout.kv_offset + HUGE.num_blocks * HUGE.block_bytes


class SparseWords(dict[int, int]):
    """The words of a segment far too big to exist."""

    def __missing__(self, key: int) -> int:
        return 0

    def __setitem__(self, key: int, value: int) -> None:
        if not 0 <= value < 1 << 64:
            raise ValueError(value)
        super().__setitem__(key, value)


def test_lists_and_journal_work_beyond_32_bits() -> None:
    layout, words = Layout(HUGE), SparseWords()
    block = HUGE.num_blocks - 1
    words[H.FREE_HEAD], words[H.FREE_COUNT] = block + 1, 1
    pool = Pool(words, layout, lambda: None)  # type: ignore[arg-type]
    lock = MutationLock(words, layout, NoFileLock())  # type: ignore[arg-type]
    before = dict(words)
    with pytest.raises(ZeroDivisionError), lock.section(Op.GROW) as section:
        assert pool.allocate(section, 5) == block
        assert words[layout.block(block) + B.ROW] == 6
        raise ZeroDivisionError
    with lock.section(Op.GROW):
        assert {at: words[at] for at in (*before, layout.block(block) + B.ROW)} == {
            **before,
            layout.block(block) + B.ROW: 0,
        }
