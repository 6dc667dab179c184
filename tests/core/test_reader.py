"""The process that reads large bodies: what it does, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pdctl.core.server import reader as reader_module
from pdctl.core.server.reader import Buffer, Reader, ReaderError, ReaderMemoryError

WATCHDOG_S = 60


def work(job: bytearray) -> Buffer:
    """What the first word of a job says."""
    word, _, rest = bytes(job).partition(b" ")
    if word == b"hang":
        time.sleep(WATCHDOG_S)
    elif word == b"die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == b"exit":
        sys.exit(3)
    elif word == b"raise":
        raise ValueError("bad luck")
    elif word == b"eat":
        # More than once: this process may have inherited memory that is free.
        eaten = [bytes(reader_module.MEMORY_BYTES // 2) for _ in range(64)]
        return eaten[0][:1]
    elif word == b"pid":
        return str(os.getpid()).encode()
    elif word == b"files":
        return " ".join(os.listdir("/proc/self/fd")).encode()  # noqa: PTH208
    return rest


def with_reader(scenario: Callable[[Reader], Awaitable[None]], timeout_s: float = WATCHDOG_S) -> None:
    async def run() -> None:
        async with asyncio.timeout(WATCHDOG_S):
            reader = Reader(work, timeout_s=timeout_s)
            try:
                await scenario(reader)
            finally:
                reader.close()
                await asyncio.sleep(0)

    asyncio.run(run())


async def gone(pid: int) -> None:
    """Not even a zombie is left."""
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.005)


def test_jobs_are_done_one_after_the_other_by_one_process() -> None:
    async def scenario(reader: Reader) -> None:
        answers = await asyncio.gather(*(reader.run(b"say ", str(number).encode()) for number in range(20)))
        assert [bytes(answer) for answer in answers] == [str(number).encode() for number in range(20)]
        pid = reader.pid
        assert pid is not None and bytes(await reader.run(b"pid")) == str(pid).encode()
        large = b"x" * (3 << 20)
        assert bytes(await reader.run(b"say ", large)) == large
        assert reader.pid is None  # its memory has gone with it
        await gone(pid)
        assert int(bytes(await reader.run(b"pid"))) != pid

    with_reader(scenario)


def test_it_holds_no_file_of_the_router() -> None:
    """A client's connection must end when the router closes it."""

    async def scenario(reader: Reader) -> None:
        found = bytes(await reader.run(b"files")).decode().split()
        assert len([number for number in map(int, found) if number > 2]) <= 2  # its end, and that of the listing

    with_reader(scenario)


def test_whoever_leaves_ends_the_work() -> None:
    async def scenario(reader: Reader) -> None:
        job = asyncio.create_task(reader.run(b"hang"))
        waiting = asyncio.create_task(reader.run(b"say hello"))
        while reader.pid is None:
            await asyncio.sleep(0)
        pid = reader.pid
        await asyncio.sleep(0.01)
        job.cancel()
        assert bytes(await waiting) == b"hello"
        await gone(pid)

    with_reader(scenario)


def test_a_job_has_a_deadline() -> None:
    async def scenario(reader: Reader) -> None:
        with pytest.raises(TimeoutError):
            await reader.run(b"hang")
        reader._timeout_s = WATCHDOG_S
        assert bytes(await reader.run(b"say hello")) == b"hello"

    with_reader(scenario, timeout_s=0.2)


@pytest.mark.parametrize(
    ("job", "kind", "words"),
    [
        (b"die", ReaderError, "signal SIGSEGV"),
        (b"exit", ReaderError, "exit code 1"),
        (b"raise", ReaderError, "ValueError: bad luck"),
        (b"eat", ReaderMemoryError, "more than 1073741824 bytes"),
    ],
)
def test_a_job_that_goes_wrong_is_its_own_loss(job: bytes, kind: type[Exception], words: str) -> None:
    async def scenario(reader: Reader) -> None:
        failing = asyncio.create_task(reader.run(job))
        waiting = asyncio.create_task(reader.run(b"say hello"))
        with pytest.raises(kind, match=words):
            await failing
        assert bytes(await waiting) == b"hello"
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGKILL)  # between two jobs it costs nobody anything
        os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
        assert bytes(await reader.run(b"say", b" again")) == b"again"

    with_reader(scenario)


def test_with_nothing_to_do_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "IDLE_S", 0.05)

    async def scenario(reader: Reader) -> None:
        await gone(int(bytes(await reader.run(b"pid"))))
        assert reader.pid is None

    with_reader(scenario)


def test_it_ends_with_the_router() -> None:
    """However that ends, and whatever the reader is doing."""
    read, write = os.pipe()
    router = os.fork()
    if router == 0:
        signal.alarm(WATCHDOG_S)

        async def run() -> None:
            reader = Reader(work, timeout_s=WATCHDOG_S)
            pid = bytes(await reader.run(b"pid"))
            job = asyncio.create_task(reader.run(b"hang"))
            await asyncio.sleep(0.05)
            os.write(write, pid)
            await job

        try:
            asyncio.run(run())
        finally:
            os._exit(1)
    os.close(write)
    pid = int(os.read(read, 20))
    os.close(read)
    descriptor = os.pidfd_open(pid)
    os.kill(router, signal.SIGKILL)
    os.waitpid(router, 0)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(WATCHDOG_S * 1000), "the reader outlived the router"
    finally:
        os.close(descriptor)
