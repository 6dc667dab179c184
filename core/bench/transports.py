"""Ways to hand the KV of a prompt from one process to another: the product's own, and what copies it.

Each class is one end, the sender's or the receiver's, in a process of its own. The same number of bytes lies ready
at the sender before the clock starts, and at the receiver when it stops; only then are they compared with what they
must be. Transports of packages that are not part of pdctl: peer_transports.py. Called by endpoint.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pdctl.core.room import Wanted, claim_row
from pdctl.core.wake import Wake
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import CapacityError, DeadlineError
from pdctl.transport.layout import Geometry, P, R
from pdctl.transport.names import SegmentName
from pdctl.transport.rows import Claim, FinishReason, RowParams, RowState
from pdctl.transport.segment import ParticipantState, Role, Segment

_CHUNK_BYTES = 64 << 10
_MARK = struct.Struct("<II")
_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_SOCKET_BYTES = 4 << 20

Card = dict[str, Any]
"""What one end tells the other before the first hand-over: addresses, descriptors. JSON."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both ends of a transport know.

    Attributes:
        directory: private, for sockets.
        segment: the name of the segment to make, for those who make one.
        geometry: of the KV; its pool has room for the largest hand-over.
        max_blocks: of one hand-over.
        timeout_s: of any wait.
    """

    sends: bool
    directory: Path
    segment: SegmentName
    geometry: Geometry
    max_blocks: int
    timeout_s: float

    @property
    def max_bytes(self) -> int:
        return self.max_blocks * self.geometry.block_bytes


class Pattern:
    """Bytes that both ends can make for themselves; other ones for every seed, and for every place."""

    def __init__(self, seed: int) -> None:
        self._chunk = bytearray(random.Random(seed).randbytes(_CHUNK_BYTES))

    def _at(self, piece: int, chunk: int, length: int) -> bytes:
        self._chunk[: _MARK.size] = _MARK.pack(piece, chunk)
        return bytes(self._chunk[:length])

    def fill(self, pieces: Sequence[memoryview]) -> None:
        for index, piece in enumerate(pieces):
            for start in range(0, len(piece), _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, len(piece) - start)
                piece[start : start + length] = self._at(index, start // _CHUNK_BYTES, length)

    def fault(self, pieces: Sequence[memoryview]) -> str | None:
        """Which byte is not what was sent; None: all are."""
        for index, piece in enumerate(pieces):
            for start in range(0, len(piece), _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, len(piece) - start)
                wanted = self._at(index, start // _CHUNK_BYTES, length)
                found = bytes(piece[start : start + length])
                if found != wanted:
                    at = next(place for place in range(length) if found[place] != wanted[place])
                    return (
                        f"wrong bytes arrived: piece {index} of {len(pieces)}, byte {start + at}: "
                        f"{found[at]:#04x} found, {wanted[at]:#04x} sent"
                    )
        return None


class Transport(ABC):
    """One end. `fill` and `send` are the sender's, `receive` and `fault` the receiver's."""

    name: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def prepare(self, card: Card) -> Card:
        """Get everything ready that is ready in steady state.

        Args:
            card: of the sender, for the receiver; empty for the sender, who comes first.
        """

    def connect(self, card: Card) -> None:  # noqa: B027 where there are not two ends, nothing is to be done
        """The sender gets to know the receiver's card."""

    @abstractmethod
    def pieces(self, num_blocks: int) -> Sequence[memoryview]:
        """Where the bytes of this hand-over lie at this end, in order."""

    def fill(self, num_blocks: int, seed: int) -> None:
        """Before the clock: the bytes are there, as prefill has written them."""
        Pattern(seed).fill(self.pieces(num_blocks))

    @abstractmethod
    def send(self, num_blocks: int) -> int:
        """Hand over; returns when it began (monotonic ns)."""

    @abstractmethod
    def receive(self, num_blocks: int) -> int:
        """Wait for it; returns when all of it could be read (monotonic ns)."""

    def fault(self, num_blocks: int, seed: int) -> str | None:
        """After the clock: what is wrong with the bytes that came."""
        return Pattern(seed).fault(self.pieces(num_blocks))

    def close(self) -> None:  # noqa: B027 most have nothing that would
        """Let go of what would outlive the process. Everything else ends with it."""


class SharedMemory(Transport):
    """pdctl itself: a segment as `pdctl up` makes it, its rows, its bells. Nothing is copied.

    The clock is the product's: from the stamp before the READY store to the stamp after the claim. The sender is
    the router, too.
    """

    name = "pdctl"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._bell: Bell | None = None
        self._claim: Claim | None = None
        self._table: list[int] = []

    def prepare(self, card: Card) -> Card:
        setup = self.setup
        if setup.sends:
            # A prefill daemon and the router in one process: a mapping each, as each has a slot.
            self._router_segment = Segment.create(setup.segment, setup.geometry, fingerprint=0, numerics_id=0)
            self._router = self._router_segment.attach(Role.ROUTER)
        self._segment = Segment.open(setup.segment)
        self._rows = self._segment.rows
        self._me = self._segment.attach(Role.PREFILL if setup.sends else Role.DECODE)
        self._bell = Bell(setup.directory, self._me.slot)
        self._wake = Wake(self._segment, self._me.slot, self._bell)
        self._wanted = Wanted(self._segment, self._me)
        self._me.put(P.STATE, ParticipantState.READY)
        layout = self._segment.layout
        self._segment.mapping.populate(layout.kv_offset, layout.total_bytes - layout.kv_offset, write=True)
        return {}

    def connect(self, card: Card) -> None:
        # All who need it have it: whatever happens now, nothing is left behind.
        self.setup.segment.path.unlink()

    def pieces(self, num_blocks: int) -> Sequence[memoryview]:
        kv, size = self._segment.mapping.kv(self._segment.layout), self.setup.geometry.block_bytes
        assert kv is not None
        return [kv[block * size : (block + 1) * size] for block in self._table[:num_blocks]]

    def fill(self, num_blocks: int, seed: int) -> None:
        """A request that no cached prefix helps; its KV is computed, committed and published."""
        if self._claim is not None:
            self._router_segment.rows.recycle(self._claim.row, self._claim.generation)
        num_kv = num_blocks * self.setup.geometry.block_tokens
        source = random.Random(seed)
        asked = self._router_segment.rows.submit(
            self._router,
            request_id=f"bench-{seed}",
            # Prefill computes all but the last.
            tokens=[source.getrandbits(16) for _ in range(num_kv + 1)],
            limit_tokens=num_kv + 2,
            params=RowParams(),
            local_prefill_tokens=0,
        )
        self._claim = asked and self._rows.claim(self._me, asked.row, alone=True, local_prefill_tokens=0)
        if self._claim is None:
            raise CapacityError("the last request has not left its row: no room for another")
        row = self._claim.row
        self._table = self._rows.block_table(row)
        super().fill(num_blocks, seed)
        self._rows.commit_kv(row, num_kv)
        self._rows.publish(row)

    def send(self, num_blocks: int) -> int:
        assert self._claim is not None
        self._rows.hand_over(self._claim.row)
        self._wake.for_work(Role.DECODE)
        return self._rows.get(self._claim.row, R.T_READY)

    def receive(self, num_blocks: int) -> int:
        assert self._bell is not None
        bell, until = self._bell, time.monotonic() + self.setup.timeout_s
        while time.monotonic() < until:
            bell.drain()
            for row in self._rows.in_state(RowState.READY):
                claim = claim_row(
                    self._rows,
                    self._me,
                    row,
                    self._wanted,
                    self._wake,
                    alone=True,
                    local_prefill_tokens=0,
                    vocab_size=None,
                )
                if claim is not None:
                    self._claim, self._table = claim, self._rows.block_table(row)
                    return self._rows.get(row, R.T_DECODING)
            bell.wait(min(1.0, self.setup.timeout_s))
        raise DeadlineError(f"no row was handed over in {self.setup.timeout_s:g} s")

    def fault(self, num_blocks: int, seed: int) -> str | None:
        found = super().fault(num_blocks, seed)
        assert self._claim is not None
        self._rows.finish(self._claim.row, FinishReason.STOP)
        return found

    def close(self) -> None:
        if self.setup.sends:
            self.setup.segment.path.unlink(missing_ok=True)
        if self._bell is not None:
            self._bell.close()


def private_memory(num_bytes: int) -> memoryview:
    """Memory of this process alone, touched: no transfer pays for its first use."""
    view = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for start in range(0, num_bytes, mmap.PAGESIZE):
        view[start] = 1
    return view


class Copying(Transport):
    """A transport whose bytes lie in one stretch of private memory at each end."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._memory = private_memory(setup.max_bytes)

    def _bytes(self, num_blocks: int) -> memoryview:
        return self._memory[: num_blocks * self.setup.geometry.block_bytes]

    def pieces(self, num_blocks: int) -> Sequence[memoryview]:
        return [self._bytes(num_blocks)]


class Memcpy(Copying):
    """One copy inside one process, both ends in one: the least that any design that copies has to do."""

    name = "memcpy"

    def prepare(self, card: Card) -> Card:
        self._source = private_memory(self.setup.max_bytes)
        return {}

    def fill(self, num_blocks: int, seed: int) -> None:
        Pattern(seed).fill([self._source[: num_blocks * self.setup.geometry.block_bytes]])

    def send(self, num_blocks: int) -> int:
        number = num_blocks * self.setup.geometry.block_bytes
        began = time.monotonic_ns()
        self._memory[:number] = self._source[:number]
        self._ended = time.monotonic_ns()
        return began

    def receive(self, num_blocks: int) -> int:
        return self._ended


class Pipe(Copying):
    """A pipe of 1 MiB: written by one process, read by the other into memory it has."""

    name = "pipe"

    def prepare(self, card: Card) -> Card:
        path = self.setup.directory / "pipe"
        if self.setup.sends:
            os.mkfifo(path, 0o600)
        else:
            # Without O_NONBLOCK it would wait here for the writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(self._fd, True)
        return {}

    def connect(self, card: Card) -> None:
        path = self.setup.directory / "pipe"
        self._fd = os.open(path, os.O_WRONLY)
        fcntl.fcntl(self._fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        path.unlink()

    def send(self, num_blocks: int) -> int:
        rest = self._bytes(num_blocks)
        began = time.monotonic_ns()
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        return began

    def receive(self, num_blocks: int) -> int:
        rest = self._bytes(num_blocks)
        while rest:
            number = os.readv(self._fd, [rest])
            if number == 0:
                raise ConnectionError("the pipe was closed")
            rest = rest[number:]
        return time.monotonic_ns()


class UnixSocket(Copying):
    """A stream socket of this machine: written by one process, read by the other into memory it has."""

    name = "unix"

    def prepare(self, card: Card) -> Card:
        path = str(self.setup.directory / "unix")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        if self.setup.sends:
            self._socket.bind(path)
            self._socket.listen(1)
        else:
            self._socket.connect(path)
        return {}

    def connect(self, card: Card) -> None:
        listener = self._socket
        self._socket = listener.accept()[0]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        listener.close()
        (self.setup.directory / "unix").unlink()

    def send(self, num_blocks: int) -> int:
        began = time.monotonic_ns()
        self._socket.sendall(self._bytes(num_blocks))
        return began

    def receive(self, num_blocks: int) -> int:
        rest = self._bytes(num_blocks)
        while rest:
            number = self._socket.recv_into(rest)
            if number == 0:
                raise ConnectionError("the socket was closed")
            rest = rest[number:]
        return time.monotonic_ns()
