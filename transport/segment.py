"""A segment as its users see it: attach, take a slot, and reach rows and pool; or look without touching.

Everything that must outlive a process is in here. Called by the router, the daemons, the supervisor (which
creates it) and the viewers (which never lock: they copy under the sequence word).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pdctl.transport import mapping as _mapping
from pdctl.transport.errors import CapacityError, IncompatibleError, NotFoundError, OtherSegmentError
from pdctl.transport.layout import PARTICIPANT_WORDS, DType, Geometry, H, Layout, P, SegmentState, VerifyKv
from pdctl.transport.lock import MutationLock, Op
from pdctl.transport.mapping import Mapping
from pdctl.transport.names import SegmentName
from pdctl.transport.pool import Pool
from pdctl.transport.rows import Actor, Rows, RowState


class Role(IntEnum):
    NONE = 0
    SUPERVISOR = 1
    ROUTER = 2
    PREFILL = 3
    DECODE = 4

    @property
    def label(self) -> str:
        return self.name.lower()


class ParticipantState(IntEnum):
    STARTING = 0
    READY = 1
    STOPPING = 2
    # Asked to stand idle (P.DRAIN), and its rows are put back.
    DRAINED = 3


_CLAIMS = {
    Role.PREFILL: (RowState.QUEUED, RowState.PREFILLING, Actor.PREFILL),
    Role.DECODE: (RowState.READY, RowState.DECODING, Actor.DECODE),
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an attacher was built for; every field must be what the segment holds."""

    fingerprint: int
    numerics_id: int
    dtype: DType
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


class Participant:
    """This process's place in a segment."""

    def __init__(self, words: memoryview, layout: Layout, slot: int, role: Role, incarnation: int) -> None:
        self._words = words
        self._base = layout.participant(slot)
        self.slot = slot
        self.role = role
        self.incarnation = incarnation

    @property
    def claims(self) -> tuple[RowState, RowState, Actor]:
        """(state claimed from, state claimed to, who we are in the table of moves)."""
        return _CLAIMS[self.role]

    def get(self, name: P) -> int:
        return self._words[self._base + name]

    def put(self, name: P, value: int) -> None:
        self._words[self._base + name] = value

    def add(self, name: P, delta: int) -> None:
        """Our own words have one writer: no lock."""
        self._words[self._base + name] += delta


class Segment:
    """A mapped segment.

    Attributes:
        geometry, layout: what lies where.
        rows, pool: see there.
        lock: the mutation lock.
    """

    def __init__(self, mapping: Mapping, geometry: Geometry, words: memoryview | None = None) -> None:
        self.mapping = mapping
        self.geometry = geometry
        self.layout = Layout(geometry)
        self.words = mapping.words if words is None else words
        self.lock = MutationLock(self.words, self.layout, mapping.file_lock())
        self.pool = Pool(self.words, self.layout, lambda: mapping.kv(self.layout))
        self.rows = Rows(self.words, self.layout, self.lock, self.pool)

    @classmethod
    def create(
        cls,
        name: SegmentName,
        geometry: Geometry,
        *,
        fingerprint: int,
        numerics_id: int,
        verify_kv: VerifyKv = VerifyKv.OFF,
    ) -> Segment:
        mapping = _mapping.create(name, geometry, fingerprint=fingerprint, numerics_id=numerics_id)
        mapping.words[H.VERIFY_KV] = verify_kv
        return cls(mapping, geometry)

    @classmethod
    def anonymous(cls, geometry: Geometry) -> Segment:
        return cls(_mapping.anonymous(geometry), geometry)

    @classmethod
    def open(cls, name: SegmentName | Path | int, *, expected: Expected | None = None) -> Segment:
        """Map an existing segment, by name or by descriptor, to work in it.

        Raises:
            NotFoundError, CorruptSegmentError: see `mapping.open_segment`.
            OtherSegmentError: names the first field that differs, with both values.
            IncompatibleError: it is another PID namespace's.
        """
        mapping, geometry = _mapping.open_segment(name, writable=True)
        segment = cls(mapping, geometry)
        try:
            segment._check(expected)
        except Exception:
            segment.close()
            raise
        return segment

    def _check(self, expected: Expected | None) -> None:
        words = self.words
        if words[H.STATE] != SegmentState.OPEN:
            raise NotFoundError("segment is closed")
        here = Path("/proc/self/ns/pid").stat().st_ino
        if words[H.PID_NAMESPACE] != here:
            raise IncompatibleError(
                f"segment: made in PID namespace {words[H.PID_NAMESPACE]}, this process is in {here}",
                hint="run it where the cluster runs",
            )
        if expected is None:
            return
        found: dict[str, int | str] = {
            "block_tokens": self.geometry.block_tokens,
            "dtype": self.geometry.dtype.label,
            "num_layers": self.geometry.num_layers,
            "num_kv_heads": self.geometry.num_kv_heads,
            "head_dim": self.geometry.head_dim,
            "numerics_id": f"{words[H.NUMERICS_ID]:016x}",
            "fingerprint": f"{words[H.FINGERPRINT]:016x}",
        }
        wanted: dict[str, int | str] = {
            "block_tokens": expected.block_tokens,
            "dtype": expected.dtype.label,
            "num_layers": expected.num_layers,
            "num_kv_heads": expected.num_kv_heads,
            "head_dim": expected.head_dim,
            "numerics_id": f"{expected.numerics_id:016x}",
            "fingerprint": f"{expected.fingerprint:016x}",
        }
        for field, value in found.items():
            if value != wanted[field]:
                raise OtherSegmentError(
                    f"cannot attach: the segment's {field} is {value}, this daemon's is {wanted[field]}"
                )

    def attach(self, role: Role) -> Participant:
        """Take a free slot, with its guard byte; both are ours until the process ends.

        Raises:
            CapacityError: all slots are taken.
        """
        for slot in range(self.geometry.max_participants):
            base = self.layout.participant(slot)
            if self.words[base + P.ROLE] != Role.NONE or not self.mapping.hold_byte(slot + 1):
                continue
            with self.lock.section(Op.ATTACH) as section:
                taken = self.words[base + P.ROLE] != Role.NONE
                if not taken:
                    incarnation = self.words[H.NEXT_INCARNATION]
                    section.set(H.NEXT_INCARNATION, incarnation + 1)
                    for word in range(max(P) + 1):
                        section.set(base + word, 0)
                    section.set(base + P.PID, os.getpid())
                    section.set(base + P.START_TIME, process_start_time(os.getpid()) or 0)
                    section.set(base + P.INCARNATION, incarnation)
                    section.set(base + P.ATTACHED_NS, time.monotonic_ns())
                    section.set(base + P.ROLE, role)
            if taken:
                self.mapping.drop_byte(slot + 1)
                continue
            self.mapping.drop_byte(0)  # held by a segment's maker until now
            self.lock.slot, self.lock.incarnation = slot, incarnation
            return Participant(self.words, self.layout, slot, role, incarnation)
        raise CapacityError(f"segment: all {self.geometry.max_participants} participant slots are taken")

    def detach(self, me: Participant) -> None:
        """Leave in order: the rows have been put back before."""
        with self.lock.section(Op.DETACH) as section:
            section.set(self.layout.participant(me.slot) + P.ROLE, Role.NONE)
        self.mapping.drop_byte(me.slot + 1)

    def slots(self, role: Role) -> list[int]:
        start = self.layout.participants + P.ROLE
        stop = start + self.geometry.max_participants * PARTICIPANT_WORDS
        roles = self.words[start:stop:PARTICIPANT_WORDS].tolist()
        return [slot for slot, found in enumerate(roles) if found == role]

    def least_loaded(self, role: Role, *, but: int = -1) -> int | None:
        """The slot of the participant that should be given work: ready, not drained, with the fewest rows in hand.

        Args:
            but: a slot that is left out.
        """
        able = [
            slot
            for slot in self.slots(role)
            if slot != but
            and self.participant_word(slot, P.STATE) == ParticipantState.READY
            and not self.participant_word(slot, P.DRAIN)
        ]
        return min(able, key=lambda slot: self.participant_word(slot, P.LOAD), default=None)

    def participant_word(self, slot: int, name: P) -> int:
        return self.words[self.layout.participant(slot) + name]

    def is_closed(self) -> bool:
        return bool(self.words[H.STATE] != SegmentState.OPEN)

    def mark_closed(self) -> None:
        self.words[H.STATE] = SegmentState.CLOSED

    def close(self) -> None:
        self.mapping.close()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of everything but the KV pages.

    Attributes:
        segment: the usual readers, over the copy.
        torn: True if the segment changed so fast that the copy may contradict itself.
        held: guard bytes that are held, by slot: who is alive. Empty for a file that is not in use.
    """

    segment: Segment
    torn: bool
    held: frozenset[int]
    taken_ns: int


_SNAPSHOT_TRIES = 50


def take_snapshot(name: SegmentName | Path | int) -> Snapshot:
    """Copy a live segment, or a file that once was one, without a lock.

    Args:
        name: or a path, or a descriptor (see `Mapping.door`).

    Raises:
        NotFoundError, CorruptSegmentError, IncompatibleError: as for attaching; another PID namespace is no
            obstacle to looking.
        CapacityError: there is no memory for a copy.
    """
    mapping, geometry = _mapping.open_segment(name, writable=False)
    try:
        layout = Layout(geometry)
        _mapping.check_copy_room(layout, f"segment {name}")
        torn, copy = True, b""
        for _ in range(_SNAPSHOT_TRIES):
            before = mapping.words[H.SEQUENCE]  # SYNC: snapshot
            copy = bytes(mapping.words[: layout.meta_words])
            torn = bool(before & 1) or mapping.words[H.SEQUENCE] != before
            if not torn:
                break
            time.sleep(0.002)
        held = frozenset(slot for slot in range(geometry.max_participants) if mapping.byte_is_held(slot + 1))
        words = memoryview(copy).cast("Q")
        return Snapshot(segment=Segment(mapping, geometry, words), torn=torn, held=held, taken_ns=time.monotonic_ns())
    finally:
        mapping.close()


def open_to_look(name: SegmentName | Path | int) -> Segment:
    """Map a segment, or a file that once was one, for reading alone; the caller closes it.

    Raises:
        NotFoundError, CorruptSegmentError, IncompatibleError: as for attaching.
    """
    mapping, geometry = _mapping.open_segment(name, writable=False)
    return Segment(mapping, geometry)


def process_start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; with its PID it names a process for good."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rsplit(")", 1)[1].split()[19])
    return None
