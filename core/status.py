"""What a cluster and its segment look like at one moment, as frozen records.

    take_snapshot -> describe -> SegmentStatus            any segment: live, left by a crash, or a copied file
    state.json + SegmentStatus + /proc -> ClusterStatus   a cluster whose supervisor lives

Reads only and takes no lock: a copy of the segment, and /proc. Prints nothing; `pdctl.cli.tables` renders.
Never holds prompt text or token ids. No torch. Values in a broken segment are shown as they are, not believed:
nothing here raises because of them.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from pdctl.core.cluster import ClusterState, command, has_supervisor, is_locked, running
from pdctl.core.numerics import numerics
from pdctl.core.process import ProcessStat
from pdctl.transport import lock as lock_module
from pdctl.transport import recovery
from pdctl.transport.errors import CorruptSegmentError, NotFoundError
from pdctl.transport.layout import RING_WORDS, B, BlockState, H, P, R, SegmentState
from pdctl.transport.lock import Op
from pdctl.transport.machine import CpuShare, cpu_share
from pdctl.transport.mapping import boot_id, descriptor_of, leads_to
from pdctl.transport.names import SHM_DIR, SegmentName, log_dir, segments_of
from pdctl.transport.rows import OWNED, WAITING, FinishReason, RowState
from pdctl.transport.segment import (
    ParticipantState,
    Role,
    Segment,
    Snapshot,
    open_to_look,
    process_start_time,
    take_snapshot,
)

STATUS_SCHEMA = 1
# The daemons' attention gathers a row's blocks with torch (attention.py).
ATTENTION_PATH = "torch"
DAEMON_ROLES = (Role.PREFILL.label, Role.DECODE.label)
_ZYGOTE = "pdctl-zygote"
_SNAPSHOT_TRIES = 5
_SNAPSHOT_PAUSE_S = 0.05
_NS = 1e9


class BlockKind(Enum):
    """A block as the block map shows it."""

    FREE = "."
    PRIVATE = "#"
    REUSABLE = "o"
    REFERENCED = "@"
    BROKEN = "!"
    UNKNOWN = "?"


@dataclass(frozen=True, kw_only=True)
class ParticipantStatus:
    """One process of a cluster.

    Attributes:
        slot: its place in the segment; None for the zygote, which has none.
        name: as in commands and logs: decode-0, router.
        state: starting, ready, drained, stopping; stopped (by a signal); dead (its guard byte is not held).
        num_rows: rows it works on now.
        bit_exact: what its probe at start found; None if there was none yet.
        private_bytes: memory that it shares with nobody; None if /proc does not say.
    """

    slot: int | None
    name: str
    role: str
    pid: int
    alive: bool
    state: str
    incarnation: int
    num_threads: int
    num_rows: int
    num_claims: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_local_prefill_tokens: int
    num_cached_tokens: int
    num_adopted_rows: int
    num_steps: int
    busy_s: float
    bit_exact: bool | None
    draining: bool
    private_bytes: int | None
    cpu_s: float | None

    @property
    def num_tokens(self) -> int:
        """Tokens computed, of whatever kind."""
        return self.num_prefill_tokens + self.num_decode_tokens + self.num_local_prefill_tokens


@dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """The block pool, counted block by block."""

    num_blocks: int
    num_private: int
    num_cached: int
    num_referenced: int
    num_reusable: int
    num_free: int
    num_broken: int
    num_unknown: int
    block_tokens: int
    block_bytes: int
    token_bytes: int


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Since the segment was made."""

    num_requests: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_preemptions: int
    num_adoptions: int
    num_deaths: int
    num_repairs: int
    num_evictions: int
    num_broken_blocks: int
    num_cached_tokens: int
    num_prompt_tokens: int
    num_lock_sections: int
    num_rejected: int
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class OwnerStatus:
    """Who works on a row. `alive` is False for a process that died and was not reaped yet."""

    slot: int
    role: str
    pid: int
    alive: bool


@dataclass(frozen=True, kw_only=True)
class RowStatus:
    """One request in the segment.

    Attributes:
        owner: None in states that have none.
        age_s: time in the present state, up to the segment's `as_of`; None if the stamps make no sense.
        queued_s, prefill_s, ready_s, first_token_s: what lay between its stamps; None if it did not happen (yet).
    """

    row: int
    state: str
    request_id: str
    owner: OwnerStatus | None
    num_prompt_tokens: int
    num_output_tokens: int
    limit_tokens: int
    kv_len: int
    num_blocks: int
    num_published_blocks: int
    num_cached_tokens: int
    num_attempts: int
    num_preemptions: int
    num_adoptions: int
    cancel_requested: bool
    preempt_requested: bool
    finish_reason: str | None
    error: str | None
    age_s: float | None
    queued_s: float | None
    prefill_s: float | None
    ready_s: float | None
    first_token_s: float | None


@dataclass(frozen=True, kw_only=True)
class SectionStatus:
    """An operation that was under way, or cut off, when the snapshot was taken."""

    operation: str
    slot: int | None
    row: int | None
    num_stores: int
    holder_alive: bool


@dataclass(frozen=True, kw_only=True)
class SegmentStatus:
    """A segment.

    Attributes:
        name: file name.
        in_use: whether any participant is alive.
        as_of: "now", or "last move" for a segment that nobody uses: ages end there.
        torn: the copy may contradict itself, because the segment changed too fast or a section is under way.
        another_boot, foreign_pid_namespace: PIDs are those of another world.
        num_queued: requests that wait for a row or, in one, for a daemon: their first or next.
        block_map: one character a block, see BlockKind.
    """

    name: str
    path: str
    layout_version: int
    state: str
    total_bytes: int
    kv_bytes: int
    num_blocks: int
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_rows: int
    max_context: int
    max_participants: int
    block_bytes: int
    token_bytes: int
    fingerprint: str
    numerics_id: str
    created_unix_ns: int
    sequence: int
    in_use: bool
    as_of: str
    torn: bool
    section: SectionStatus | None
    another_boot: bool
    foreign_pid_namespace: bool
    participants: tuple[ParticipantStatus, ...]
    rows_by_state: dict[str, int]
    rows: tuple[RowStatus, ...]
    pool: PoolStatus
    counters: Counters
    block_map: str
    num_queued: int


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """A running cluster.

    Attributes:
        health: "healthy", "starting" or "degraded"; `causes` says what is missing, one a line.
        supervisor_state: "running", or "stopped": then nothing is restarted and no row is recovered.
        bit_exact: True if every daemon proved it, False if one did not, None while one has not probed.
        colocated: whether one process has the places of the prefill and of the decode daemon.
        processes: the participants, and the zygote.
        num_queued, max_queue: requests that wait for a daemon, and how many may.
        num_cores, cpu_quota: what the cluster may use of the CPU: see `CpuShare`; None: its supervisor is gone, or
            there is no quota.
    """

    name: str
    health: str
    causes: tuple[str, ...]
    phase: str
    model: str
    model_path: str
    dtype: str
    numerics: str
    numerics_id: str
    bit_exact: bool | None
    attention: str
    linear: str
    url: str
    started_unix_ns: int
    uptime_s: float
    supervisor_pid: int
    supervisor_state: str
    wanted_prefill: int
    wanted_decode: int
    colocated: bool
    log_dir: str
    segment: str
    segment_bytes: int
    kv_bytes: int
    processes: tuple[ParticipantStatus, ...]
    rows_by_state: dict[str, int]
    pool: PoolStatus
    counters: Counters
    num_queued: int
    max_queue: int
    num_cores: int | None
    cpu_quota: float | None


@dataclass(frozen=True, kw_only=True)
class FoundSegment:
    """Where a cluster's segment lies, and what a person should know about it.

    Attributes:
        note: None for a live cluster whose segment has its name.
        fd: leads to the segment (see `Mapping.door`); None: only its name does. The caller closes it.
    """

    name: SegmentName
    note: str | None
    fd: int | None = None

    @property
    def target(self) -> SegmentName | int:
        """What to open."""
        return self.name if self.fd is None else self.fd


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A recount.

    Attributes:
        problems: one a line, with the numbers; empty: clean.
        num_sealed: blocks whose KV was compared with a checksum (see `up --verify-kv`).
        undone: operation that was cut off by a death and undone (in the copy) before the recount.
    """

    problems: tuple[str, ...]
    num_blocks: int
    num_rows: int
    num_sealed: int
    undone: str | None


def to_dict(status: Any) -> dict[str, Any]:
    """A record as plain values for JSON: snake_case keys, units in them."""
    return {"schema": STATUS_SCHEMA, **dataclasses.asdict(status)}


# --- finding and looking -----------------------------------------------------------------------------------


def find_segment(state_dir: Path, name: str) -> FoundSegment:
    """The segment of a cluster that runs, or that a dead one left in shared memory.

    Raises:
        NotFoundError: there is neither.
    """
    locked = is_locked(state_dir, name)
    try:
        return _segment_of(running(state_dir, name))
    except NotFoundError:
        left = sorted(segments_of(name), key=_changed_ns, reverse=True)
        if not left:
            raise
    newest = left[0]
    more = f"; {len(left) - 1} older left as well" if len(left) > 1 else ""
    if locked:
        return FoundSegment(name=newest, note=f"cluster {name!r} is just starting or stopping{more}")
    if has_supervisor(newest):
        return FoundSegment(
            name=newest, note=f"cluster {name!r} runs with another state directory than {state_dir}{more}"
        )
    return FoundSegment(
        name=newest,
        note=f"cluster {name!r} crashed: its supervisor is gone, this segment was left "
        f"({command('down', name, state_dir)} removes it){more}",
    )


def _segment_of(state: ClusterState) -> FoundSegment:
    """The segment of a running cluster, from its supervisor: its name may be gone, or stand for another file."""
    name, fd = state.segment_name, None
    if process_start_time(state.supervisor_pid) == state.supervisor_start_time:
        fd = descriptor_of(state.supervisor_pid, name)
    note = _lost_name(state) if fd is not None and not leads_to(name, fd) else None
    return FoundSegment(name=name, note=note, fd=fd)


def _lost_name(state: ClusterState) -> str:
    down, up = (command(verb, state.name, state.spec.state_dir) for verb in ("down", "up"))
    return (
        f"the segment's name {state.segment_name.path} was removed: serving and restarts go on, through the "
        f"supervisor's descriptor; only {down} && {up} brings a name back"
    )


def _changed_ns(name: SegmentName) -> int:
    try:
        return name.path.stat().st_ctime_ns
    except OSError:
        return 0


def look(name: SegmentName | Path | int) -> Snapshot:
    """A snapshot that is not torn, if a few tries give one; else a torn one.

    Args:
        name: or a path, or a descriptor (see `FoundSegment`).

    Raises:
        NotFoundError, CorruptSegmentError, IncompatibleError: see `take_snapshot`.
    """
    target = name.resolve() if isinstance(name, Path) else name
    snapshot = take_snapshot(target)
    for _ in range(_SNAPSHOT_TRIES - 1):
        section = _section_of(snapshot)
        # One that a dead process began stays until somebody undoes it: waiting changes nothing.
        if not snapshot.torn or (section is not None and not section.holder_alive):
            break
        time.sleep(_SNAPSHOT_PAUSE_S)
        snapshot = take_snapshot(target)
    return snapshot


def verify(snapshot: Snapshot, target: SegmentName | Path | int) -> Verification:
    """Recount everything in a snapshot, and compare sealed KV with its checksums where it lies.

    A section that a dead process left half done is first undone, in the copy only, as the next one to take
    the lock would do.
    """
    segment, undone = snapshot.segment, None
    section = _section_of(snapshot)
    if section is not None and not section.holder_alive:
        words = memoryview(bytearray(segment.words)).cast("Q")
        try:
            undone = lock_module.repair(words, segment.layout).name
        except (CorruptSegmentError, ValueError, IndexError) as error:
            return _verification(segment, [f"cannot undo the section that was cut off: {error}"], 0, None)
        segment = Segment(segment.mapping, segment.geometry, words)
    num_sealed, broken = _verify_seals(target) if segment.pool.seals else (0, [])
    return _verification(segment, recovery.verify(segment) + broken, num_sealed, undone)


def _verify_seals(target: SegmentName | Path | int) -> tuple[int, list[str]]:
    segment = open_to_look(target)
    try:
        return recovery.verify_seals(segment)
    finally:
        segment.close()


def _verification(segment: Segment, problems: list[str], num_sealed: int, undone: str | None) -> Verification:
    g = segment.geometry
    return Verification(
        problems=tuple(problems),
        num_blocks=g.num_blocks,
        num_rows=g.max_rows,
        num_sealed=num_sealed,
        undone=undone,
    )


# --- a segment ---------------------------------------------------------------------------------------------


def describe(snapshot: Snapshot, path: Path) -> SegmentStatus:
    """All that a snapshot holds but tokens."""
    segment = snapshot.segment
    words, g = segment.words, segment.geometry
    another_boot = words[H.BOOT_ID] != boot_id()
    foreign = another_boot or words[H.PID_NAMESPACE] != _own_pid_namespace()
    participants = tuple(
        _participant(snapshot, slot, foreign=foreign)
        for slot in range(g.max_participants)
        if segment.participant_word(slot, P.ROLE) != Role.NONE
    )
    in_use = bool(snapshot.held)
    as_of_ns = snapshot.taken_ns if in_use else _last_move_ns(segment)
    by_slot = {one.slot: one for one in participants}
    states = segment.rows.states()
    kinds = _block_kinds(segment)
    return SegmentStatus(
        name=path.name,
        path=str(path),
        layout_version=words[H.VERSION],
        state=_label(SegmentState, words[H.STATE]),
        total_bytes=segment.layout.total_bytes,
        kv_bytes=g.kv_bytes,
        num_blocks=g.num_blocks,
        block_tokens=g.block_tokens,
        num_layers=g.num_layers,
        num_kv_heads=g.num_kv_heads,
        head_dim=g.head_dim,
        dtype=g.dtype.label,
        max_rows=g.max_rows,
        max_context=g.max_context,
        max_participants=g.max_participants,
        block_bytes=g.block_bytes,
        token_bytes=g.token_bytes,
        fingerprint=f"{words[H.FINGERPRINT]:016x}",
        numerics_id=f"{words[H.NUMERICS_ID]:016x}",
        created_unix_ns=words[H.CREATED_UNIX_NS],
        sequence=words[H.SEQUENCE],
        in_use=in_use,
        as_of="now" if in_use else "last move",
        torn=snapshot.torn,
        section=_section_of(snapshot),
        another_boot=another_boot,
        foreign_pid_namespace=foreign and not another_boot,
        participants=participants,
        rows_by_state={state.name.lower(): states.count(state) for state in RowState},
        rows=tuple(
            _row(segment, row, state, by_slot, as_of_ns) for row, state in enumerate(states) if state != RowState.FREE
        ),
        pool=_pool(segment, kinds),
        counters=_counters(words),
        block_map=kinds,
        num_queued=_num_queued(segment, states),
    )


def _label(kind: type[IntEnum], value: int) -> str:
    """An enum member's name in small letters; a value that no member has, as it is."""
    try:
        return kind(value).name.lower()
    except ValueError:
        return f"?{value}"


def _own_pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _section_of(snapshot: Snapshot) -> SectionStatus | None:
    segment = snapshot.segment
    words = segment.words
    if words[H.INTENT_OP] == Op.NONE:
        return None
    slot = words[H.INTENT_SLOT] - 1
    known = 0 <= slot < segment.geometry.max_participants
    # Another incarnation in that slot: the one that began this section is gone.
    alive = (
        known
        and slot in snapshot.held
        and segment.participant_word(slot, P.INCARNATION) == words[H.INTENT_INCARNATION]
    )
    return SectionStatus(
        operation=_label(Op, words[H.INTENT_OP]),
        slot=slot if known else None,
        row=words[H.INTENT_ROW] - 1 if 0 < words[H.INTENT_ROW] <= segment.geometry.max_rows else None,
        num_stores=words[H.INTENT_COUNT],
        holder_alive=alive,
    )


def _num_queued(segment: Segment, states: list[int]) -> int:
    waiting = sum(segment.participant_word(slot, P.WAITING) for slot in segment.slots(Role.ROUTER))
    return waiting + sum(state in WAITING for state in states)


def _last_move_ns(segment: Segment) -> int:
    """The newest monotonic stamp in a segment that nobody uses: the closest to "when it was left"."""
    words, layout, g = segment.words, segment.layout, segment.geometry
    stamps = words[layout.ring : layout.ring + g.ring_events * RING_WORDS : RING_WORDS].tolist()
    stamps += [segment.rows.get(row, R.T_STATE) for row in range(g.max_rows)]
    stamps += [segment.participant_word(slot, P.ATTACHED_NS) for slot in range(g.max_participants)]
    return max(stamps)


def _participant(snapshot: Snapshot, slot: int, *, foreign: bool) -> ParticipantStatus:
    segment = snapshot.segment

    def word(name: P) -> int:
        return segment.participant_word(slot, name)

    pid, alive = word(P.PID), slot in snapshot.held
    # Another process may have got the PID of a dead one.
    visible = alive and not foreign and process_start_time(pid) == word(P.START_TIME)
    proc = ProcessStat.read(pid) if visible else None
    role, state = _label(Role, word(P.ROLE)), _label(ParticipantState, word(P.STATE))
    if not alive:
        state = "dead"
    elif proc is not None and proc.stopped:
        state = "stopped"
    return ParticipantStatus(
        slot=slot,
        name=f"{role}-{word(P.INDEX)}" if role in DAEMON_ROLES else role,
        role=role,
        pid=pid,
        alive=alive,
        state=state,
        incarnation=word(P.INCARNATION),
        num_threads=word(P.THREADS),
        num_rows=word(P.LOAD),
        num_claims=word(P.CLAIMS),
        num_prefill_tokens=word(P.PREFILL_TOKENS),
        num_decode_tokens=word(P.DECODE_TOKENS),
        num_local_prefill_tokens=word(P.LOCAL_PREFILL_TOKENS),
        num_cached_tokens=word(P.CACHED_TOKENS),
        num_adopted_rows=word(P.ADOPTED_ROWS),
        num_steps=word(P.STEPS),
        busy_s=word(P.BUSY_NS) / _NS,
        bit_exact={1: False, 2: True}.get(word(P.BIT_EXACT)),
        draining=bool(word(P.DRAIN)),
        private_bytes=None if proc is None else private_bytes(pid),
        cpu_s=None if proc is None else proc.cpu_s,
    )


def _row(
    segment: Segment, row: int, state: int, by_slot: dict[int | None, ParticipantStatus], as_of_ns: int
) -> RowStatus:
    rows = segment.rows

    def word(name: R) -> int:
        return rows.get(row, name)

    def between(start: R, end: R) -> float | None:
        begun, ended = word(start), word(end)
        return (ended - begun) / _NS if 0 < begun <= ended else None

    num_prompt = word(R.NUM_PROMPT)
    since = word(R.T_STATE)
    return RowStatus(
        row=row,
        state=_label(RowState, state),
        request_id=printable(rows.request_id(row)),
        owner=_owner(segment, row, state, by_slot),
        num_prompt_tokens=num_prompt,
        num_output_tokens=max(0, rows.count_tokens(row) - num_prompt),
        limit_tokens=word(R.LIMIT_TOKENS),
        kv_len=word(R.KV_LEN),
        num_blocks=word(R.NUM_BLOCKS),
        num_published_blocks=word(R.NUM_PUBLISHED),
        num_cached_tokens=word(R.CACHED_TOKENS),
        num_attempts=word(R.ATTEMPTS),
        num_preemptions=word(R.PREEMPTIONS),
        num_adoptions=word(R.ADOPTIONS),
        cancel_requested=bool(word(R.CANCEL)),
        preempt_requested=0 != word(R.PREEMPT) == word(R.GENERATION),
        finish_reason=_label(FinishReason, word(R.FINISH_REASON)) if state == RowState.FINISHED else None,
        error=(printable(rows.error_text(row)) or None) if state == RowState.FAILED else None,
        age_s=max(0.0, (as_of_ns - since) / _NS) if since else None,
        queued_s=between(R.T_QUEUED, R.T_PREFILLING),
        prefill_s=between(R.T_PREFILLING, R.T_READY),
        ready_s=between(R.T_READY, R.T_DECODING),
        first_token_s=between(R.T_CREATED, R.T_FIRST_TOKEN),
    )


def _owner(
    segment: Segment, row: int, state: int, by_slot: dict[int | None, ParticipantStatus]
) -> OwnerStatus | None:
    if state not in OWNED:
        return None
    slot = segment.rows.get(row, R.OWNER) - 1
    found = by_slot.get(slot)
    if found is not None and found.incarnation == segment.rows.get(row, R.OWNER_INCARNATION):
        return OwnerStatus(slot=slot, role=found.role, pid=found.pid, alive=found.alive)
    known = 0 <= slot < segment.geometry.max_participants
    return OwnerStatus(slot=slot, role="gone", pid=0, alive=False) if known else None


def _block_kinds(segment: Segment) -> str:
    start, step = segment.layout.blocks, segment.layout.block(1) - segment.layout.block(0)
    stop = start + segment.geometry.num_blocks * step
    states = segment.words[start + B.STATE : stop : step].tolist()
    refs = segment.words[start + B.REFS : stop : step].tolist()
    free, private = BlockKind.FREE.value, BlockKind.PRIVATE.value
    of = {BlockState.FREE: (free, free), BlockState.OWNED: (private, private)}
    of[BlockState.CACHED] = (BlockKind.REUSABLE.value, BlockKind.REFERENCED.value)
    of[BlockState.BAD] = (BlockKind.BROKEN.value,) * 2
    kinds: dict[int, tuple[str, str]] = {int(state): pair for state, pair in of.items()}
    unknown = (BlockKind.UNKNOWN.value,) * 2
    return "".join(kinds.get(state, unknown)[count > 0] for state, count in zip(states, refs, strict=True))


def _pool(segment: Segment, kinds: str) -> PoolStatus:
    g = segment.geometry
    referenced, reusable = kinds.count(BlockKind.REFERENCED.value), kinds.count(BlockKind.REUSABLE.value)
    return PoolStatus(
        num_blocks=g.num_blocks,
        num_private=kinds.count(BlockKind.PRIVATE.value),
        num_cached=referenced + reusable,
        num_referenced=referenced,
        num_reusable=reusable,
        num_free=kinds.count(BlockKind.FREE.value),
        num_broken=kinds.count(BlockKind.BROKEN.value),
        num_unknown=kinds.count(BlockKind.UNKNOWN.value),
        block_tokens=g.block_tokens,
        block_bytes=g.block_bytes,
        token_bytes=g.token_bytes,
    )


def _counters(words: memoryview) -> Counters:
    return Counters(
        num_requests=words[H.REQUESTS],
        num_finished=words[H.FINISHED],
        num_failed=words[H.FAILED],
        num_cancelled=words[H.CANCELLED],
        num_preemptions=words[H.PREEMPTIONS],
        num_adoptions=words[H.ADOPTIONS],
        num_deaths=words[H.DEATHS],
        num_repairs=words[H.REPAIRS],
        num_evictions=words[H.EVICTIONS],
        num_broken_blocks=words[H.BAD_BLOCKS],
        num_cached_tokens=words[H.CACHED_TOKENS],
        num_prompt_tokens=words[H.PROMPT_TOKENS],
        num_lock_sections=words[H.LOCK_SECTIONS],
        num_rejected=words[H.REJECTED],
        num_output_tokens=words[H.OUTPUT_TOKENS],
    )


def printable(text: str) -> str:
    """Text from outside without what could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


# --- /proc -------------------------------------------------------------------------------------------------


def private_bytes(pid: int) -> int | None:
    """Memory of a process that no other shares, from /proc/PID/smaps; None if that cannot be read.

    A segment belongs to the cluster, also while one process alone has mapped it.
    """
    found, in_segment = 0, False
    try:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                found += 0 if in_segment else int(line.split()[1]) * 1024
            elif not line[0].isupper():  # "7f12…-7f13… rw-s … PATH": the next mapping
                in_segment = f" {SHM_DIR}/" in line
    except (OSError, IndexError, ValueError):
        return None
    return found or None


def _zygote(supervisor_pid: int) -> ParticipantStatus | None:
    """The process that holds the weights, among the supervisor's children; None while there is none."""
    try:
        children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split()
    except OSError:
        return None
    for pid in map(int, children):
        proc = ProcessStat.read(pid)
        # The daemons are forked from it and share its command line, but name themselves.
        if proc is None or proc.name != _ZYGOTE:
            continue
        return ParticipantStatus(
            slot=None,
            name="zygote",
            role="zygote",
            pid=pid,
            alive=True,
            state="stopped" if proc.stopped else "running",
            incarnation=0,
            num_threads=1,
            num_rows=0,
            num_claims=0,
            num_prefill_tokens=0,
            num_decode_tokens=0,
            num_local_prefill_tokens=0,
            num_cached_tokens=0,
            num_adopted_rows=0,
            num_steps=0,
            busy_s=0.0,
            bit_exact=None,
            draining=False,
            private_bytes=private_bytes(pid),
            cpu_s=proc.cpu_s,
        )
    return None


# --- a cluster ---------------------------------------------------------------------------------------------


def cluster_status(state_dir: Path, name: str) -> ClusterStatus:
    """A running cluster, with what is wrong with it.

    Raises:
        NotFoundError: not running, crashed, or just starting or stopping.
    """
    state = running(state_dir, name)
    found = _segment_of(state)
    try:
        segment = describe(look(found.target), found.name.path)
    finally:
        if found.fd is not None:
            os.close(found.fd)
    return cluster_status_of(state, segment, () if found.note is None else (found.note,))


def cluster_status_of(state: ClusterState, segment: SegmentStatus, more: tuple[str, ...] = ()) -> ClusterStatus:
    """`cluster_status` of what has been read already.

    Args:
        more: further causes why it is degraded.
    """
    spec = state.spec
    supervisor = ProcessStat.read(state.supervisor_pid)
    supervisor_state = "gone" if supervisor is None else "stopped" if supervisor.stopped else "running"
    zygote = _zygote(state.supervisor_pid)
    processes = segment.participants if zygote is None else (*segment.participants, zygote)
    causes = (*_causes(state, segment, supervisor_state), *more)
    starting = state.phase == "starting" and supervisor_state == "running" and segment.state != "closed"
    share = _cpu_share(state.supervisor_pid)
    here = numerics(spec.dtype)
    # This command may run with other versions than the cluster was started with.
    same = f"{here.id:016x}" == segment.numerics_id
    return ClusterStatus(
        name=state.name,
        health="starting" if starting else "degraded" if causes else "healthy",
        causes=causes,
        phase=state.phase,
        model=spec.model_name,
        model_path=str(spec.model_path),
        dtype=spec.dtype,
        numerics=here.label if same else f"{spec.dtype}, other than this installation's",
        numerics_id=segment.numerics_id,
        bit_exact=_all_bit_exact(segment.participants),
        attention=ATTENTION_PATH,
        linear=here.linear if same else "unknown",
        url=state.url,
        started_unix_ns=state.started_unix_ns,
        uptime_s=max(0.0, (time.time_ns() - state.started_unix_ns) / _NS),
        supervisor_pid=state.supervisor_pid,
        supervisor_state=supervisor_state,
        wanted_prefill=spec.num_prefill,
        wanted_decode=spec.num_decode,
        colocated=spec.colocated,
        log_dir=str(log_dir(spec.state_dir, state.name)),
        segment=segment.path,
        segment_bytes=segment.total_bytes,
        kv_bytes=segment.kv_bytes,
        processes=processes,
        rows_by_state=segment.rows_by_state,
        pool=segment.pool,
        counters=segment.counters,
        num_queued=segment.num_queued,
        max_queue=spec.max_queue,
        num_cores=None if share is None else share.num_cores,
        cpu_quota=None if share is None else share.quota,
    )


def _cpu_share(pid: int) -> CpuShare | None:
    try:
        return cpu_share(pid)
    except OSError:
        return None


def _all_bit_exact(participants: tuple[ParticipantStatus, ...]) -> bool | None:
    found = [one.bit_exact for one in participants if one.alive and one.role in DAEMON_ROLES]
    if False in found:
        return False
    return None if None in found or not found else True


def _causes(state: ClusterState, segment: SegmentStatus, supervisor_state: str) -> list[str]:
    """What is not as it should be, the worst first."""
    causes = []
    if state.phase == "stopping" or segment.state == "closed":
        causes.append("the cluster is going down")
    if supervisor_state == "stopped":
        causes.append(
            f"the supervisor (pid {state.supervisor_pid}) is stopped: recovery is off, serving goes on "
            f"(kill -CONT {state.supervisor_pid})"
        )
    if supervisor_state == "gone":
        down = command("down", state.name, state.spec.state_dir)
        causes.append(f"the supervisor (pid {state.supervisor_pid}) is gone: {down}")
    for name in {**state.gave_up, **state.trouble}:
        deaths, said = state.gave_up.get(name), state.trouble.get(name)
        what = "does not start" if deaths is None else f"gave up after {deaths} deaths in a row"
        by_hand = command(f"{'logs' if deaths is None else 'restart'} {name}", state.name, state.spec.state_dir)
        causes.append(f"{name} {what}{'' if said is None else f': {said}'}; {by_hand}")
    for role, wanted in (("prefill", state.spec.num_prefill), ("decode", state.spec.num_decode), ("router", 1)):
        ours = [one for one in segment.participants if one.role == role]
        num_ready = sum(one.state == "ready" for one in ours)
        # Somebody wanted a drained one to be idle; without any other, nobody works.
        if num_ready and num_ready + sum(one.state == "drained" for one in ours) >= wanted:
            continue
        others = ", ".join(f"pid {one.pid} is {one.state}" for one in ours if one.state != "ready")
        count = f"no {role} is ready" if num_ready == 0 else f"{num_ready} of {wanted} {role} daemons are ready"
        causes.append(f"{count} ({others})" if others else count)
    if segment.section is not None and not segment.section.holder_alive:
        causes.append(f"an operation ({segment.section.operation}) was cut off and not undone yet")
    causes += [printable(warning) for warning in state.warnings.values()]
    return causes
