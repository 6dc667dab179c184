"""Where everything lies in a segment. One picture, one version number, and arithmetic.

    +--------------------+ 0
    | header             |  magic, version (stored last), geometry, fingerprint, counters, list heads
    +--------------------+
    | participants       |  [max_participants][PARTICIPANT_WORDS]   who is attached
    +--------------------+
    | row states         |  [max_rows]                              dense: one scan sees all
    +--------------------+
    | rows               |  [max_rows][row_words]                   fields | texts | params | block table
    |                    |                                          | tokens | logprob ring
    +--------------------+
    | blocks             |  [num_blocks][BLOCK_WORDS]               state, generation, parent, hash, links
    +--------------------+
    | block tokens       |  [num_blocks][block_tokens]              what a published block holds
    +--------------------+
    | buckets            |  [num_buckets]                           prefix index: hash -> chain of blocks
    +--------------------+
    | journal            |  intent + [journal_entries][2]           old values of the section under way
    +--------------------+
    | ring               |  [ring_events][RING_WORDS]               the last moves made in sections, for people
    +--------------------+ kv_offset, a multiple of 2 MiB
    | KV pages           |  [num_blocks][layers][2][kv_heads][block_tokens][head_dim]
    +--------------------+ total_bytes

All before the KV pages is 64-bit words: offsets, ids, counters, times in ns (CLOCK_MONOTONIC) and the bits of
float64 alike. An aligned 64-bit store is atomic on every machine supported (x86-64, whose stores are also seen
in program order), so a reader never sees half a word. Indices that may be absent are stored plus one: 0 is none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property

MAGIC = int.from_bytes(b"pdctlKV1", "little")
LAYOUT_VERSION = 4
WORD = 8
HUGE_PAGE_BYTES = 2 << 20

HEADER_WORDS = 512
PARTICIPANT_WORDS = 64
BLOCK_WORDS = 16
RING_WORDS = 8
ROW_FIELD_WORDS = 128
ROW_REQUEST_ID_WORDS = 16
ROW_ERROR_WORDS = 64
# Stop ids, then logit bias; schemas of later versions fit here too (16 KiB).
ROW_PARAM_WORDS = 2048
# Log-probabilities of a row's latest tokens: an entry is the token's own word and those of the likeliest ones. The
# entry of a position is overwritten LOGPROB_RING positions later, once the router has read it (READ_TOKENS).
LOGPROB_RING = 64
MAX_LOGPROBS = 20
LOGPROB_WORDS = 1 + MAX_LOGPROBS


class DType(IntEnum):
    """Element type of the KV pages, as stored in the header."""

    FLOAT32 = 1
    BFLOAT16 = 2

    @property
    def num_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2

    @property
    def label(self) -> str:
        return self.name.lower()


class SegmentState(IntEnum):
    FORMATTING = 0
    OPEN = 1
    CLOSED = 2


class VerifyKv(IntEnum):
    """Whether published blocks carry a checksum of their KV, and what becomes of a row that meets a wrong one.

    Checked on every cache hit, and when a row is taken over from a dead daemon.
    """

    OFF = 0
    RECOMPUTE = 1
    FAIL = 2


class H(IntEnum):
    """Header words."""

    MAGIC = 0
    VERSION = 1
    STATE = 2
    TOTAL_BYTES = 3
    KV_OFFSET = 4
    # geometry, in the order of Geometry's fields
    GEOMETRY = 8
    FINGERPRINT = 32
    NUMERICS_ID = 33
    CREATED_UNIX_NS = 34
    PID_NAMESPACE = 35
    TIME_NAMESPACE = 36
    BOOT_ID = 37
    OWNER_PID = 38
    VERIFY_KV = 39  # VerifyKv, for the segment's whole life
    # the lock
    SEQUENCE = 64
    LOCK_SLOT = 65
    LOCK_PID = 66
    # the intent; OP != 0 means that a section is under way or its process died in it
    INTENT_OP = 72
    INTENT_SLOT = 73
    INTENT_INCARNATION = 74
    INTENT_ROW = 75
    INTENT_COUNT = 76
    # derived, written only inside a section
    FREE_HEAD = 96
    FREE_COUNT = 97
    LRU_HEAD = 98
    LRU_TAIL = 99
    LRU_COUNT = 100
    CACHED_COUNT = 101
    # counters
    NEXT_INCARNATION = 128
    NEXT_ORDER = 129
    RING_HEAD = 130
    REPAIRS = 131
    EVICTIONS = 132
    PREEMPTIONS = 133
    ADOPTIONS = 134
    DEATHS = 135
    REQUESTS = 136
    CACHED_TOKENS = 137
    PROMPT_TOKENS = 138
    LOCK_SECTIONS = 139
    FINISHED = 140
    FAILED = 141
    CANCELLED = 142
    BAD_BLOCKS = 143
    OUTPUT_TOKENS = 144  # of rows that have ended
    REJECTED = 145  # written by the router alone, outside sections


class P(IntEnum):
    """Participant words. All but ROLE..INCARNATION and DRAIN, the supervisor's wish, are the participant's own."""

    ROLE = 0
    PID = 1
    START_TIME = 2
    INCARNATION = 3
    STATE = 4
    PROGRESS = 5  # turns of its loop, with or without work; within one, TICKS
    LOAD = 6
    DRAIN = 7
    THREADS = 8
    BIT_EXACT = 9
    READY_NS = 10
    ATTACHED_NS = 11
    WANTS_ROOM = 12  # order + 1 of a row that blocks are wanted for: ring when some come free
    WAITING = 13  # of a router: requests that wait for a row
    INDEX = 14  # of its role: 0 for decode-0
    LONGEST_TICK_NS = 15  # CPU time of the main thread between two TICKS
    # counters
    CLAIMS = 16
    PREFILL_TOKENS = 17
    DECODE_TOKENS = 18
    LOCAL_PREFILL_TOKENS = 19
    STEPS = 20
    BUSY_NS = 21
    CACHED_TOKENS = 22
    ADOPTED_ROWS = 23
    # Counted within a forward, by whatever computes it: a layer of at most SLICE_TOKENS tokens, or a part of its
    # attention of bounded size (model.py, attention.py). Hung is who owns rows and counts neither turns nor these.
    TICKS = 24


class R(IntEnum):
    """Row words. The state is apart, in the dense array."""

    GENERATION = 0
    OWNER = 1  # slot + 1; means something only in an owned state
    OWNER_INCARNATION = 2
    CLIENT = 3  # the router's slot + 1
    CLIENT_INCARNATION = 4
    ORDER = 5
    DEADLINE_NS = 6
    LEASE_NS = 7
    ATTEMPTS = 8
    CLAIMED_ALONE = 9
    DEATHS_ALONE = 10
    NUM_PROMPT = 16
    NUM_TOKENS = 17
    KV_LEN = 18
    NUM_BLOCKS = 19
    NUM_PUBLISHED = 20
    CACHED_TOKENS = 21
    LIMIT_TOKENS = 22  # prompt and output together
    FINISH_REASON = 23
    LAST_HASH = 24  # chain hash of the last published block
    PREFILL_SLOT = 25
    DECODE_SLOT = 26
    PREFILLED_TOKENS = 27
    LOCAL_TOKENS = 28
    PREEMPTIONS = 29
    ADOPTIONS = 30
    # wishes, written by others
    CANCEL = 32
    PREEMPT = 33  # the generation that is meant
    # tokens of the row (the prompt's too) whose log-probabilities the router has copied out
    READ_TOKENS = 34
    # sampling
    TEMPERATURE = 40
    TOP_P = 41
    TOP_K = 42
    MIN_P = 43
    SEED = 44
    FLAGS = 45
    NUM_STOP_IDS = 46
    MIN_TOKENS = 47
    NUM_LOGPROBS = 48  # of likeliest tokens, plus one: 0 is no log-probabilities at all
    REPETITION_PENALTY = 49
    PRESENCE_PENALTY = 50
    FREQUENCY_PENALTY = 51
    NUM_LOGIT_BIAS = 52
    # time stamps, ns
    T_CREATED = 64
    T_QUEUED = 65
    T_PREFILLING = 66
    T_READY = 67
    T_DECODING = 68
    T_FIRST_TOKEN = 69
    T_FINISHED = 70
    T_STATE = 71


class RowFlag(IntEnum):
    IGNORE_EOS = 1


class B(IntEnum):
    """Block words."""

    STATE = 0
    GENERATION = 1
    ROW = 2  # row + 1 that writes it, while OWNED
    PARENT = 3  # block + 1
    PARENT_GENERATION = 4
    HASH = 5
    REFS = 6
    LAST_USE_NS = 7
    CHECKSUM = 8
    BUCKET_NEXT = 9
    LRU_PREV = 10
    LRU_NEXT = 11
    FREE_NEXT = 12


class BlockState(IntEnum):
    """FREE -> OWNED -> CACHED -> FREE, or OWNED -> FREE, or CACHED -> BAD -> FREE."""

    FREE = 0
    OWNED = 1  # private to one row, being written
    CACHED = 2  # published: full, immutable, shared
    BAD = 3  # as CACHED, but its KV is not what was sealed: never matched again


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """All numbers that two processes must agree on to share a segment.

    Attributes:
        num_blocks: KV blocks in the pool.
        block_tokens: tokens a block holds.
        num_layers, num_kv_heads, head_dim: of the model.
        dtype: element type of KV.
        max_rows: requests that can be in the segment at once.
        max_context: tokens a row can hold, prompt and output together.
    """

    num_blocks: int
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    max_rows: int = 128
    max_context: int = 8192
    max_participants: int = 64
    ring_events: int = 1024

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's KV over all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_tokens * self.head_dim
        return elements * self.dtype.num_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_context // self.block_tokens)

    @property
    def num_buckets(self) -> int:
        return 1 << max(4, (self.num_blocks - 1).bit_length())

    @property
    def journal_entries(self) -> int:
        # The longest section evicts, unlinks and pins a block for every place of a row: under 32 stores each.
        return 32 * self.blocks_per_row + 1024

    def to_words(self) -> list[int]:
        return [int(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def from_words(cls, words: list[int]) -> Geometry:
        values = dict(zip((field.name for field in fields(cls)), words, strict=True))
        return cls(**{**values, "dtype": DType(values["dtype"])})  # type: ignore[arg-type]


NUM_GEOMETRY_WORDS = len(fields(Geometry))
# More than anybody can want, field by field: a file that claims it is no segment, and nobody loops so far.
MOST = Geometry(
    num_blocks=1 << 32,
    block_tokens=1 << 12,
    num_layers=1 << 16,
    num_kv_heads=1 << 16,
    head_dim=1 << 16,
    dtype=DType.BFLOAT16,
    max_rows=1 << 20,
    max_context=1 << 24,
    max_participants=999,  # the sockets' names have room for so many
    ring_events=1 << 20,
)


class Layout:
    """Word offsets of every section, from the geometry alone."""

    def __init__(self, geometry: Geometry) -> None:
        g = geometry
        self.geometry = g
        self.row_request_id = ROW_FIELD_WORDS
        self.row_error = self.row_request_id + ROW_REQUEST_ID_WORDS
        self.row_params = self.row_error + ROW_ERROR_WORDS
        self.row_blocks = self.row_params + ROW_PARAM_WORDS
        self.row_tokens = self.row_blocks + g.blocks_per_row
        self.row_logprobs = self.row_tokens + g.max_context
        self.row_words = self.row_logprobs + LOGPROB_RING * LOGPROB_WORDS

        at = HEADER_WORDS
        self.participants = at
        at += g.max_participants * PARTICIPANT_WORDS
        self.row_states = at
        at += g.max_rows
        self.rows = at
        at += g.max_rows * self.row_words
        self.blocks = at
        at += g.num_blocks * BLOCK_WORDS
        self.block_tokens = at
        at += g.num_blocks * g.block_tokens
        self.buckets = at
        at += g.num_buckets
        self.journal = at
        at += 2 * g.journal_entries
        self.ring = at
        at += g.ring_events * RING_WORDS
        self.meta_words = at

    @cached_property
    def kv_offset(self) -> int:
        """Bytes from the start of the segment to the KV pages."""
        return -(-self.meta_words * WORD // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @cached_property
    def total_bytes(self) -> int:
        return self.kv_offset + self.geometry.kv_bytes

    def participant(self, slot: int) -> int:
        return self.participants + slot * PARTICIPANT_WORDS

    def row(self, row: int) -> int:
        return self.rows + row * self.row_words

    def block(self, block: int) -> int:
        return self.blocks + block * BLOCK_WORDS
