"""A process beside the router's for one long piece of work at a time: neither its loop nor its memory bears it.

    router --- length, job ---> reader     forked from the router with all it has loaded, on a socket pair;
           <-- length, answer --           ended with its client, when it is slow, when it is done with a large job,
                                           or when there was nothing to do for a while

A fork takes a few milliseconds and no memory for what both only read; the router has no second thread that could hold
a lock meanwhile. Knows nothing of what a job is: `work` turns its bytes into others. Used by intake.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from pdctl.core import process

# What a reader may take on top of what the router had when it was forked.
MEMORY_BYTES = 1 << 30
IDLE_S = 10.0
# After a larger job its memory goes back to the system with it.
_LARGE_JOB_BYTES = 1 << 20
# Prompts are read for prefill, which gives way to decode as well.
_NICE = 5
_HEAD_BYTES = 8
_DONE, _NO_MEMORY, _RAISED = b"\0\1\2"

Buffer = bytes | bytearray | memoryview


class ReaderError(Exception):
    """The work was not done, through no fault of the loop: it raised, or its process died."""


class ReaderMemoryError(ReaderError):
    """The work would have taken more memory than it may."""


class Reader:
    """One process at a time, made when there is something to do; jobs wait for their turn.

    Args:
        work: runs in the other process; must not touch sockets, logs or the segment.
        timeout_s: for one job, from when its turn has come.
    """

    def __init__(self, work: Callable[[bytearray], Buffer], *, timeout_s: float) -> None:
        self._work = work
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def run(self, *job: Buffer) -> memoryview:
        """The answer to the joined parts of `job`. Cancelled, it ends the work at once.

        Raises:
            TimeoutError: not done in time; whoever waits next gets a new process.
            ReaderMemoryError, ReaderError: see there.
        """
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            if self._child is not None and not self._child.lives():
                self.close()
            if self._child is None:
                self._child = _Child(self._work)
            healthy = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._child.ask(job)
                healthy = sum(map(len, job)) <= _LARGE_JOB_BYTES
            finally:
                if not healthy:
                    self.close()
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.close)
            return answer

    def close(self) -> None:
        """End the process, and with it what it works on."""
        if self._child is not None:
            self._child.end()
            self._child = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid


class _Child:
    """The router's end of one process."""

    def __init__(self, work: Callable[[bytearray], Buffer]) -> None:
        ours, theirs = socket.socketpair()
        parent, room = os.getpid(), _data_bytes() + MEMORY_BYTES
        with _signals_blocked(), _no_collection():
            self.pid = os.fork()
            if self.pid == 0:
                _serve(theirs, work, parent, room)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours

    def lives(self) -> bool:
        """Whether nobody has killed it while it had nothing to do."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    async def ask(self, job: tuple[Buffer, ...]) -> memoryview:
        loop, ours = asyncio.get_running_loop(), self._socket
        try:
            await loop.sock_sendall(ours, sum(map(len, job)).to_bytes(_HEAD_BYTES, "little"))
            for part in job:
                await loop.sock_sendall(ours, part)
            length = int.from_bytes(await self._receive(_HEAD_BYTES), "little")
            answer = memoryview(await self._receive(length))
        except (EOFError, ConnectionError):
            raise ReaderError(f"the reader died: {self._exit_text()}") from None
        if answer[0] == _DONE:
            return answer[1:]
        if answer[0] == _NO_MEMORY:
            raise ReaderMemoryError(f"the work would take more than {MEMORY_BYTES} bytes of memory")
        raise ReaderError(str(answer[1:], "utf-8", "replace"))

    async def _receive(self, length: int) -> bytearray:
        data, at = bytearray(length), 0
        while at < length:
            number = await asyncio.get_running_loop().sock_recv_into(self._socket, memoryview(data)[at:])
            if not number:
                raise EOFError
            at += number
        return data

    def _exit_text(self) -> str:
        """After its end of the socket is closed: it is dead, or will be before it does anything else."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return process.exit_text(status)

    def end(self) -> None:
        self._socket.close()
        if not self.pid:
            return
        os.kill(self.pid, signal.SIGKILL)
        try:
            # Giving back its memory takes it a while: the loop does not wait for that.
            loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(self.pid)
        except RuntimeError:
            os.waitpid(self.pid, 0)
            return
        loop.add_reader(descriptor, _bury, loop, descriptor, self.pid)


def _bury(loop: asyncio.AbstractEventLoop, descriptor: int, pid: int) -> None:
    loop.remove_reader(descriptor)
    os.close(descriptor)
    os.waitpid(pid, 0)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """The child must not run our handlers: they would write into the loop's own pipe."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the child inherits is never looked at by its collector: that would copy all of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _data_bytes() -> int:
    """This process's private writable memory, as RLIMIT_DATA counts it."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


# --- in the other process ----------------------------------------------------------------------------------


def _serve(theirs: socket.socket, work: Callable[[bytearray], Buffer], parent: int, room: int) -> NoReturn:
    """Work until the router closes its end. Whatever happens, the router's code is never returned to."""
    status = 1
    try:
        process.die_with_parent(parent)
        process.set_process_name("pdctl-reader")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        # Connections of clients end when the router closes them, not when we do.
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] & 0x7FFFFFFF)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # prompts do not end in core files
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
        os.nice(_NICE)
        theirs.setblocking(True)
        while head := _read(theirs, _HEAD_BYTES):
            answer = _answer(work, _read(theirs, int.from_bytes(head, "little")))
            theirs.sendall(sum(map(len, answer)).to_bytes(_HEAD_BYTES, "little"))
            for part in answer:
                theirs.sendall(part)
        status = 0
    finally:
        os._exit(status)


def _answer(work: Callable[[bytearray], Buffer], job: bytearray) -> tuple[Buffer, ...]:
    try:
        return bytes((_DONE,)), work(job)
    except MemoryError:
        return (bytes((_NO_MEMORY,)),)
    except Exception:
        return bytes((_RAISED,)), traceback.format_exc().encode("utf-8", "replace")


def _read(theirs: socket.socket, length: int) -> bytearray:
    """So many bytes; none if the router has gone."""
    data, at = bytearray(length), 0
    while at < length:
        number = theirs.recv_into(memoryview(data)[at:])
        if not number:
            return bytearray()
        at += number
    return data
