"""Ends of transports that fail, each in its own way: run as the processes of a bench by test_bench_handoff.py."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from pdctl.core.bench.endpoint import serve
from pdctl.core.bench.helper import run
from pdctl.core.bench.transports import Card, Pipe, SharedMemory


class Corrupts(Pipe):
    name = "corrupts"

    def receive(self, num_blocks: int) -> int:
        ended_ns = super().receive(num_blocks)
        self.pieces(num_blocks)[0][1234] ^= 1
        return ended_ns


class Misreads(SharedMemory):
    """Looks for the KV in the right blocks, in the wrong order."""

    name = "misreads"

    def receive(self, num_blocks: int) -> int:
        ended_ns = super().receive(num_blocks)
        self._table = self._table[::-1]
        return ended_ns


class Hangs(Pipe):
    name = "hangs"

    def receive(self, num_blocks: int) -> int:
        time.sleep(60)
        return 0


class Dies(Pipe):
    name = "dies"

    def receive(self, num_blocks: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


class Refuses(Pipe):
    name = "refuses"

    def prepare(self, card: Card) -> Card:
        raise ImportError("libnothing.so: cannot open shared object file")


class Prints(Pipe):
    """Libraries print whatever they like."""

    name = "prints"

    def send(self, num_blocks: int) -> int:
        os.write(1, b'{"error": "no message of ours"}\n')
        return super().send(num_blocks)


if __name__ == "__main__":
    run(partial(serve, transports=(Corrupts, Misreads, Hangs, Dies, Refuses, Prints)))
