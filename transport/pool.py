"""The block pool: free list, least-recently-used list and prefix index, all in the segment.

    FREE --allocate--> OWNED --publish--> CACHED --evict--> FREE
                       OWNED --release--> FREE
                                          CACHED --condemn--> BAD --evict--> FREE

A block is private to one row while it is written (OWNED) and immutable once published (CACHED); a CACHED block
counts the rows whose block tables name it. With none left it waits in the LRU list until the room is needed.
Rows let go of their blocks last first, so a child is always older in that list than its parent.

All changes go through a `Section`; `match` alone reads without the lock, and `pin` re-checks what it found.
With `VerifyKv` a block is sealed when it is published: a checksum over its KV bytes says later whether they are
still the same. Knows blocks and hashes; what a row is, rows.py knows.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdctl.transport.errors import CorruptSegmentError
from pdctl.transport.layout import LAYOUT_VERSION, B, BlockState, H, Layout, VerifyKv
from pdctl.transport.lock import Section

# Integers rather than enum members where every token counts.
_STATE, _GENERATION, _ROW, _PARENT, _PARENT_GENERATION = map(
    int, (B.STATE, B.GENERATION, B.ROW, B.PARENT, B.PARENT_GENERATION)
)
_HASH, _REFS, _LAST_USE, _CHECKSUM = map(int, (B.HASH, B.REFS, B.LAST_USE_NS, B.CHECKSUM))
_BUCKET_NEXT, _LRU_PREV, _LRU_NEXT, _FREE_NEXT = map(int, (B.BUCKET_NEXT, B.LRU_PREV, B.LRU_NEXT, B.FREE_NEXT))
# A chain longer than this is one that changed under a lock-free reader: give up, a miss costs only time.
_LONGEST_CHAIN = 64


@dataclass(frozen=True)
class BlockRef:
    """A block at one moment of its life: reused blocks have another generation."""

    block: int
    generation: int


def chain_hash(parent_hash: int, tokens: Sequence[int]) -> int:
    """64-bit hash of a block's tokens and all that stands before them; never 0.

    The same in every process: blake2b over the parent's hash and the tokens as 64-bit words.
    """
    data = parent_hash.to_bytes(8, "little") + array("Q", tokens).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


class Pool:
    """The blocks of one segment.

    Args:
        kv: gives the KV pages' bytes, or None where they are not mapped.
    """

    def __init__(self, words: memoryview, layout: Layout, kv: Callable[[], memoryview | None]) -> None:
        self._words = words
        self._layout = layout
        self._kv = kv
        g = layout.geometry
        self.num_blocks = g.num_blocks
        self.block_tokens = g.block_tokens
        self._bucket_mask = g.num_buckets - 1

    def hash_seed(self) -> int:
        """Where chains begin: KV is shared only between equal model, dtype, block size and kernels."""
        words, g = self._words, self._layout.geometry
        seed = (words[H.FINGERPRINT], words[H.NUMERICS_ID], g.dtype, g.block_tokens, LAYOUT_VERSION)
        return chain_hash(0, seed)

    # --- reading -------------------------------------------------------------------------------------------

    def state(self, block: int) -> int:
        return self._words[self._layout.block(block) + _STATE]

    def generation(self, block: int) -> int:
        return self._words[self._layout.block(block) + _GENERATION]

    def refs(self, block: int) -> int:
        return self._words[self._layout.block(block) + _REFS]

    def num_free(self) -> int:
        return self._words[H.FREE_COUNT]

    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and unreferenced cached ones."""
        return self._words[H.FREE_COUNT] + self._words[H.LRU_COUNT]

    def tokens_of(self, block: int) -> list[int]:
        start = self._layout.block_tokens + block * self.block_tokens
        return self._words[start : start + self.block_tokens].tolist()

    def chain_hashes(self, tokens: Sequence[int]) -> list[int]:
        """Chain hashes of the full blocks of `tokens`: equal up to where two sequences have the same blocks."""
        size, hashes, hash_ = self.block_tokens, [], self.hash_seed()
        for start in range(0, len(tokens) - size + 1, size):
            hashes.append(hash_ := chain_hash(hash_, tokens[start : start + size]))
        return hashes

    def match(
        self, tokens: Sequence[int], limit_blocks: int, after: tuple[BlockRef, int] | None = None
    ) -> list[BlockRef]:
        """The published blocks that hold the beginning of `tokens`, longest run from the start.

        Takes no lock: `pin` decides whether each is still what it was.

        Args:
            limit_blocks: at most so many; a row never shares the block of its position N-1.
            after: the block that `tokens` follow, and its chain hash; None: they begin a sequence.
        """
        found: list[BlockRef] = []
        parent, parent_hash = after or (None, self.hash_seed())
        for index in range(limit_blocks):
            part = tokens[index * self.block_tokens : (index + 1) * self.block_tokens]
            parent_hash = chain_hash(parent_hash, part)
            ref = self._lookup(parent_hash, part, parent)
            if ref is None:
                break
            found.append(ref)
            parent = ref
        return found

    def _lookup(self, hash_: int, tokens: Sequence[int], parent: BlockRef | None) -> BlockRef | None:
        words = self._words
        at = words[self._layout.buckets + (hash_ & self._bucket_mask)]
        for _ in range(_LONGEST_CHAIN):
            if not 0 < at <= self.num_blocks:
                return None
            base = self._layout.block(at - 1)
            if words[base + _HASH] == hash_:
                ref = BlockRef(at - 1, words[base + _GENERATION])
                if self._holds(ref, hash_, tokens, parent):
                    return ref
            at = words[base + _BUCKET_NEXT]
        return None

    def _holds(self, ref: BlockRef, hash_: int, tokens: Sequence[int], parent: BlockRef | None) -> bool:
        words, base = self._words, self._layout.block(ref.block)
        return (
            words[base + _STATE] == BlockState.CACHED
            and words[base + _HASH] == hash_
            and words[base + _PARENT] == (0 if parent is None else parent.block + 1)
            and words[base + _PARENT_GENERATION] == (0 if parent is None else parent.generation)
            and self.tokens_of(ref.block) == list(tokens)
            and words[base + _GENERATION] == ref.generation
        )

    # --- seals ---------------------------------------------------------------------------------------------

    @property
    def seals(self) -> bool:
        """Whether published blocks carry a checksum here."""
        return bool(self._words[H.VERIFY_KV] != VerifyKv.OFF)

    def checksum(self, block: int) -> int:
        """CRC-32 over a block's KV bytes, plus 2^32: 0 is for a block without one."""
        kv, size = self._kv(), self._layout.geometry.block_bytes
        if kv is None:
            raise CorruptSegmentError(f"block {block}: its KV is not mapped here")
        return 1 << 32 | zlib.crc32(kv[block * size : (block + 1) * size])

    def is_broken(self, ref: BlockRef) -> bool:
        """Whether a published block's KV is not what was sealed. Without a lock: a block reused meanwhile is not."""
        base = self._layout.block(ref.block)
        sealed = self._words[base + _CHECKSUM]
        if not sealed or self.checksum(ref.block) == sealed:
            return False
        return (
            self._words[base + _GENERATION] == ref.generation
            and self._words[base + _STATE] == BlockState.CACHED
            and self._words[base + _CHECKSUM] == sealed
        )

    def condemn(self, section: Section, ref: BlockRef) -> None:
        """A broken block is matched no more; rows that have it keep it, and it is evicted in its turn."""
        base = self._layout.block(ref.block)
        same = self._words[base + _GENERATION] == ref.generation
        if same and self._words[base + _STATE] == BlockState.CACHED:
            section.set(base + _STATE, BlockState.BAD)
            section.add(H.BAD_BLOCKS, 1)

    # --- changing ------------------------------------------------------------------------------------------

    def pin(self, section: Section, ref: BlockRef) -> bool:
        """Count one more row on a matched block; False if it has been evicted since."""
        base = self._layout.block(ref.block)
        words = self._words
        if words[base + _STATE] != BlockState.CACHED or words[base + _GENERATION] != ref.generation:
            return False
        if words[base + _REFS] == 0:
            self._lru_remove(section, base)
        section.add(base + _REFS, 1)
        return True

    def allocate(self, section: Section, row: int) -> int | None:
        """A private block for `row`: a free one, else the longest unused cached one. None: no room."""
        words = self._words
        head = words[H.FREE_HEAD]
        if head == 0:
            if words[H.LRU_HEAD] == 0:
                return None
            self._evict(section, words[H.LRU_HEAD] - 1)
            head = words[H.FREE_HEAD]
        base = self._layout.block(head - 1)
        section.set(H.FREE_HEAD, words[base + _FREE_NEXT])
        section.add(H.FREE_COUNT, -1)
        section.set(base + _FREE_NEXT, 0)
        section.add(base + _GENERATION, 1)
        section.set(base + _ROW, row + 1)
        section.set(base + _STATE, BlockState.OWNED)
        return head - 1

    def publish(
        self,
        section: Section,
        block: int,
        hash_: int,
        tokens: Sequence[int],
        parent: BlockRef | None,
        checksum: int = 0,
    ) -> int:
        """Make a full private block known by its content.

        Args:
            checksum: of its KV, if this segment seals blocks.

        Returns:
            The block that holds this content from now on. If another row was first, that is its block (one
            more row counts on it) and `block` goes back to the free list: the caller's table must follow.
        """
        twin = self._lookup(hash_, tokens, parent)
        if twin is not None and self.pin(section, twin):
            self._free(section, block)
            return twin.block
        words, base = self._words, self._layout.block(block)
        # Nobody reads these tokens before the block is CACHED, and undoing its state is enough.
        start = self._layout.block_tokens + block * self.block_tokens
        words[start : start + self.block_tokens] = memoryview(array("Q", tokens))
        section.set(base + _HASH, hash_)
        section.set(base + _PARENT, 0 if parent is None else parent.block + 1)
        section.set(base + _PARENT_GENERATION, 0 if parent is None else parent.generation)
        section.set(base + _REFS, 1)
        section.set(base + _CHECKSUM, checksum)
        section.set(base + _ROW, 0)
        section.set(base + _LAST_USE, time.monotonic_ns())
        section.set(base + _STATE, BlockState.CACHED)
        bucket = self._layout.buckets + (hash_ & self._bucket_mask)
        section.set(base + _BUCKET_NEXT, words[bucket])
        section.set(bucket, block + 1)  # SYNC: block-published
        section.add(H.CACHED_COUNT, 1)
        return block

    def release(self, section: Section, block: int) -> None:
        """One row lets go: a private block is free, a published one waits in the LRU list for the next hit."""
        base = self._layout.block(block)
        words = self._words
        if words[base + _STATE] == BlockState.OWNED:
            self._free(section, block)
            return
        section.add(base + _REFS, -1)
        section.set(base + _LAST_USE, time.monotonic_ns())
        if words[base + _REFS] == 0:
            self._lru_append(section, block)

    def _free(self, section: Section, block: int) -> None:
        base = self._layout.block(block)
        section.set(base + _STATE, BlockState.FREE)
        section.set(base + _ROW, 0)
        section.set(base + _FREE_NEXT, self._words[H.FREE_HEAD])
        section.set(H.FREE_HEAD, block + 1)
        section.add(H.FREE_COUNT, 1)

    def _evict(self, section: Section, block: int) -> None:
        words, base = self._words, self._layout.block(block)
        self._lru_remove(section, base)
        before = self._layout.buckets + (words[base + _HASH] & self._bucket_mask)
        while words[before] != block + 1:
            before = self._layout.block(words[before] - 1) + _BUCKET_NEXT
        section.set(before, words[base + _BUCKET_NEXT])
        section.set(base + _BUCKET_NEXT, 0)
        section.set(base + _HASH, 0)
        section.set(base + _PARENT, 0)
        section.set(base + _PARENT_GENERATION, 0)
        section.add(H.CACHED_COUNT, -1)
        section.add(H.EVICTIONS, 1)
        self._free(section, block)

    def _lru_append(self, section: Section, block: int) -> None:
        base, tail = self._layout.block(block), self._words[H.LRU_TAIL]
        section.set(base + _LRU_PREV, tail)
        section.set(base + _LRU_NEXT, 0)
        section.set(self._layout.block(tail - 1) + _LRU_NEXT if tail else H.LRU_HEAD, block + 1)
        section.set(H.LRU_TAIL, block + 1)
        section.add(H.LRU_COUNT, 1)

    def _lru_remove(self, section: Section, base: int) -> None:
        words = self._words
        before, after = words[base + _LRU_PREV], words[base + _LRU_NEXT]
        section.set(self._layout.block(before - 1) + _LRU_NEXT if before else H.LRU_HEAD, after)
        section.set(self._layout.block(after - 1) + _LRU_PREV if after else H.LRU_TAIL, before)
        section.set(base + _LRU_PREV, 0)
        section.set(base + _LRU_NEXT, 0)
        section.add(H.LRU_COUNT, -1)
