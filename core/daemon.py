"""A prefill, decode or colocated daemon: attach to the segment, prove the arithmetic, then step while there is work.

Holds nothing that the segment does not: killed at any instruction, its rows go on elsewhere. Forked from the
zygote with the weights already there; `python -m pdctl.core.daemon` loads its own (slower, more memory).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from pdctl.core import logs
from pdctl.core.attention import TokenRun
from pdctl.core.child import DAEMON_PLACES
from pdctl.core.colocated import ColocatedEngine
from pdctl.core.config import ClusterSpec
from pdctl.core.decode import DecodeEngine
from pdctl.core.model import Model
from pdctl.core.prefill import PrefillEngine
from pdctl.core.private_files import read_private
from pdctl.core.process import die_with_parent, set_process_name
from pdctl.core.wake import Wake, keep_bell
from pdctl.transport.doorbell import Bell
from pdctl.transport.layout import H, P
from pdctl.transport.names import SegmentName, cluster_dir, log_dir, parse_segment_name
from pdctl.transport.segment import ParticipantState, Role, Segment

_log = logging.getLogger("daemon")
# Without a bell, look for work this often.
_SCAN_S = 1.0
_POPULATE_STEP_BYTES = 32 << 20
# Above the others of this user, below nothing: prefill gives way to decode where they share a core.
_PREFILL_NICENESS = 5


class _StoppedMidway(Exception):  # noqa: N818  (not an error)
    """Raised inside a forward to end it: nothing of it is committed, and its rows can be put back."""


class Daemon:
    """One daemon process, from attach to the last step.

    A colocated one has two places in the segment, each with an open file of its own, as two processes have.

    Args:
        segment: its name, or a descriptor that leads to it.
        kind: see DAEMON_PLACES.
        index: among the daemons of its kind.
    """

    def __init__(self, spec: ClusterSpec, segment: SegmentName | int, kind: str, index: int, model: Model) -> None:
        self._stopping = False
        self._drained = False
        torch.set_num_threads(spec.threads_decode if kind == "decode" else spec.threads_prefill)
        if kind == "prefill":
            os.nice(_PREFILL_NICENESS)
        # Checked before a slot is taken: an incompatible daemon never attaches.
        opened = [(Segment.open(segment, expected=spec.expected), role) for role in DAEMON_PLACES[kind]]
        self._places = [(segment, segment.attach(role)) for segment, role in opened]
        self._segment = self._places[0][0]
        self._bell = Bell(cluster_dir(spec.state_dir, spec.name), *(me.slot for _, me in self._places))
        self._put(P.INDEX, index)
        self._put(P.THREADS, torch.get_num_threads())
        self._pages = map_pages(self._segment)
        self._model = model
        self._ticked_ns = 0
        model.on_tick = self._tick
        model.use_pages(self._pages)
        self._engine = self._make_engine(kind, spec)

    def _make_engine(self, kind: str, spec: ClusterSpec) -> PrefillEngine | DecodeEngine | ColocatedEngine:
        if kind == "colocated":
            prefill, decode = self._places
            return ColocatedEngine(prefill, decode, self._model, spec, self._bell)
        [(segment, me)] = self._places
        engine = PrefillEngine if kind == "prefill" else DecodeEngine
        return engine(segment, me, self._model, spec, Wake(segment, me.slot, self._bell))

    def _put(self, name: P, value: int) -> None:
        """A word about the process as a whole, in all its places."""
        for _, me in self._places:
            me.put(name, value)

    def run(self, proof_ns: int | None = None) -> None:
        """Serve until SIGTERM, or until the segment is closed.

        Args:
            proof_ns: the longest tick of another process of this image and kind, which proved the numerics; None:
                none has.
        """
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._populate, name="populate", daemon=True).start()
        self._prove_numerics(proof_ns)
        self._put(P.READY_NS, time.monotonic_ns())
        self._put(P.STATE, ParticipantState.READY)
        self._ring(Role.SUPERVISOR)
        self._ring(Role.ROUTER)
        exact = self._places[0][1].get(P.BIT_EXACT) == 2
        slots = " and ".join(str(me.slot) for _, me in self._places)
        _log.info("ready: slot %s, %s, bit-exact %s", slots, self._model.numerics.label, exact)
        collected = True
        while not self._stopping and not self._segment.is_closed():
            for _, me in self._places:
                me.add(P.PROGRESS, 1)
            keep_bell(self._bell)
            # Drain before the scan: a bell rung during it must wake us.
            self._bell.drain()
            if self._follow_drain_wish():
                self._bell.wait(_SCAN_S)
                continue
            self._ticked_ns = time.thread_time_ns()
            try:
                worked = self._engine.step()
            except _StoppedMidway:
                break
            if worked:
                collected = False
                continue
            if self._bell.wait(_SCAN_S):
                continue
            if not collected:
                gc.collect()  # automatic collection is off: it would pause a step
                collected = True
        self._put(P.STATE, ParticipantState.STOPPING)
        self._engine.release()
        for segment, me in self._places:
            segment.detach(me)
        self._bell.close()
        _log.info("stopped")

    def _prove_numerics(self, proof_ns: int | None) -> None:
        if proof_ns is not None:
            # A restart must not cost more than it has to: rows wait.
            self._put(P.LONGEST_TICK_NS, proof_ns)
            self._put(P.BIT_EXACT, 2)
            return
        self._ticked_ns = time.thread_time_ns()
        exact = numerics_hold(self._model)
        self._put(P.BIT_EXACT, 1 + exact)
        if not exact:
            _log.warning("numerics: batch size or chunking changes bits here; answers are exact up to ties")

    def _tick(self) -> None:
        """A part of a forward is done: progress, however long the whole takes.

        How long one may take is measured by those before, in this thread's CPU time: it has its share of all work.
        Told to stop, we do not compute a long chunk to its end: whoever waits for us would kill us first.
        """
        me, now_ns = self._places[0][1], time.thread_time_ns()
        me.add(P.TICKS, 1)
        if now_ns - self._ticked_ns > me.get(P.LONGEST_TICK_NS):
            self._put(P.LONGEST_TICK_NS, now_ns - self._ticked_ns)
        self._ticked_ns = now_ns
        if self._stopping and me.get(P.READY_NS):
            raise _StoppedMidway

    def _follow_drain_wish(self) -> bool:
        """Whether we are to stand idle. Our rows are put back, for our peers, before we say that we do."""
        wished = any(me.get(P.DRAIN) for _, me in self._places)
        if wished != self._drained:
            self._drained = wished
            if wished:
                self._engine.release()
            self._put(P.STATE, ParticipantState.DRAINED if wished else ParticipantState.READY)
            self._ring(Role.SUPERVISOR)
            _log.info("drained: stands idle" if wished else "serves again")
        return wished

    def _stop(self, *_: Any) -> None:
        self._stopping = True
        self._bell.ring(self._places[0][1].slot)

    def _ring(self, role: Role) -> None:
        for slot in self._segment.slots(role):
            self._bell.ring(slot)

    def _populate(self) -> None:
        """Map the pool's pages ahead, so that no request pays for the first touch."""
        start, total = self._segment.layout.kv_offset, self._segment.layout.total_bytes
        while start < total and not self._stopping:
            length = min(_POPULATE_STEP_BYTES, total - start)
            if not self._segment.mapping.populate(start, length, write=True):
                return
            start += length
            time.sleep(0)


def map_pages(segment: Segment) -> torch.Tensor:
    """The KV pages, not copied: [num_blocks, layers, 2, kv_heads, block_tokens, head_dim]."""
    g = segment.geometry
    dtype = getattr(torch, g.dtype.label)
    shape = (g.num_blocks, g.num_layers, 2, g.num_kv_heads, g.block_tokens, g.head_dim)
    count = g.kv_bytes // g.dtype.num_bytes
    flat = torch.frombuffer(segment.mapping.memory, dtype=dtype, count=count, offset=int(segment.words[H.KV_OFFSET]))
    return flat.view(shape)


def numerics_hold(model: Model) -> bool:
    """Whether this machine gives one prompt the same bits as one chunk, as several, and among others of both kinds.

    Runs on pages of its own: nothing here touches the segment. Also the warm-up of every kernel.
    """
    paged = model.paged
    if paged is None:
        raise RuntimeError("numerics: no KV pages in use")
    shape = (8, *paged.pages.shape[1:4], 16, paged.pages.shape[5])
    tokens = [(7 * position + 3) % model.vocab_size for position in range(26)]
    others = [[(5 * position + row) % model.vocab_size for position in range(9)] for row in range(3)]
    table = [0, 1]
    try:
        model.use_pages(torch.zeros(shape, dtype=model.dtype))
        whole = model.forward(tokens, [TokenRun(block_table=table, start=0, length=26)], [25])
        pages_whole = _used(model)
        model.use_pages(torch.zeros(shape, dtype=model.dtype))
        for row, other in enumerate(others):
            model.forward(other[:8], [TokenRun(block_table=[2 + row], start=0, length=8)], [])
        model.forward(tokens[:7], [TokenRun(block_table=table, start=0, length=7)], [])
        model.forward(tokens[7:25], [TokenRun(block_table=table, start=7, length=18)], [])
        runs = [TokenRun(block_table=[2 + row], start=8, length=1) for row in range(3)]
        runs.insert(1, TokenRun(block_table=table, start=25, length=1))
        runs.append(TokenRun(block_table=[5], start=0, length=8))
        packed = [others[0][8], tokens[25], others[1][8], others[2][8], *others[0][:8]]
        among = model.forward(packed, runs, [0, 1, 2, 3])
        pages_among = _used(model)
    finally:
        model.use_pages(paged.pages)
    assert whole is not None and among is not None
    return bool(torch.equal(whole[0], among[1]) and torch.equal(pages_whole, pages_among))


def _used(model: Model) -> torch.Tensor:
    assert model.paged is not None
    blocks = model.paged.pages[:2]
    return torch.cat([blocks[0], blocks[1, :, :, :, :10]], dim=-2).clone()


def serve(
    spec: ClusterSpec,
    segment: SegmentName | int,
    kind: str,
    index: int,
    model: Model,
    proof_ns: int | None = None,
) -> None:
    """The life of a forked daemon, up to its exit code."""
    logs.setup(log_dir(spec.state_dir, spec.name), f"{kind}-{index}")
    set_process_name(f"pdctl-{kind}-{index}")
    Daemon(spec, segment, kind, index, model).run(proof_ns)


def main() -> None:
    """Run one daemon that loads its own weights; refuses a segment that was made for others."""
    parser = argparse.ArgumentParser(prog="python -m pdctl.core.daemon")
    parser.add_argument("kind", choices=list(DAEMON_PLACES))
    parser.add_argument("--spec", type=Path, required=True, help="the cluster's spec.json, perhaps edited")
    parser.add_argument("--segment", required=True)
    parser.add_argument("--index", type=int, default=99)
    parser.add_argument("--parent", type=int, default=0)
    given = parser.parse_args()
    from pdctl.core.served_model import load_model
    from pdctl.transport.errors import PdctlError

    if given.parent:
        die_with_parent(given.parent)
    spec = ClusterSpec.from_json(read_private(given.spec))
    name = parse_segment_name(given.segment)
    if name is None:
        sys.exit(f"{given.segment}: not a segment's name")
    try:
        # Before the weights: a daemon that does not fit says so at once.
        Segment.open(name, expected=spec.expected).close()
        serve(spec, name, given.kind, given.index, load_model(spec))
    except PdctlError as error:
        sys.stderr.write(f"error: {error.message}{f' ({error.hint})' if error.hint else ''}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
