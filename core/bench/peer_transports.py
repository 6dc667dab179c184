"""Transports of other projects, as their own documentation has it: used where they are installed, never required.

Both move 2 x layers stretches of memory at once, as engines with a KV tensor a layer do, between memory that is
registered beforehand.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import mmap
import socket
import time
from collections.abc import Sequence
from typing import Any

from pdctl.core.bench.transports import Card, Setup, Transport, private_memory
from pdctl.transport.errors import DeadlineError, PdctlError


class Registered(Transport):
    """Memory in 2 x layers stretches, a page between them: neighbours would be merged into one."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        g = setup.geometry
        self._number = 2 * g.num_layers
        self._stride = setup.max_bytes // self._number + mmap.PAGESIZE
        self._memory = private_memory(self._number * self._stride)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _length(self, num_blocks: int) -> int:
        return num_blocks * self.setup.geometry.block_bytes // self._number

    def pieces(self, num_blocks: int) -> Sequence[memoryview]:
        length, starts = self._length(num_blocks), range(0, self._number * self._stride, self._stride)
        return [self._memory[start : start + length] for start in starts]

    def _addresses(self, base: int) -> list[int]:
        return [base + index * self._stride for index in range(self._number)]


class Nixl(Registered):
    """NIXL over UCX: the sender writes into the receiver's memory, with a notification at the end."""

    name = "nixl"

    def prepare(self, card: Card) -> Card:
        package = _first_of("nixl_cu12", "nixl_cu13", "nixl")
        role = "sender" if self.setup.sends else "receiver"
        # Its progress threads never sleep: all other transports would be measured beside them. Both ends poll anyway.
        config = package.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = package.nixl_agent(f"pdctl-bench-{role}", config)
        self._agent.register_memory([(self._address, len(self._memory), 0, "")], "DRAM")
        self._handles: dict[int, Any] = {}
        if card:
            self._agent.add_remote_agent(base64.b64decode(card["agent"]))
        return {"agent": base64.b64encode(self._agent.get_agent_metadata()).decode(), "address": self._address}

    def connect(self, card: Card) -> None:
        self._remote = self._agent.add_remote_agent(base64.b64decode(card["agent"]))
        if isinstance(self._remote, bytes):
            self._remote = self._remote.decode()
        self._remote_address = int(card["address"])

    def _descriptors(self, base: int, num_blocks: int) -> Any:
        length = self._length(num_blocks)
        return self._agent.get_xfer_descs([(address, length, 0) for address in self._addresses(base)], "DRAM")

    def fill(self, num_blocks: int, seed: int) -> None:
        super().fill(num_blocks, seed)
        if num_blocks not in self._handles:
            self._handles[num_blocks] = self._agent.initialize_xfer(
                "WRITE",
                self._descriptors(self._address, num_blocks),
                self._descriptors(self._remote_address, num_blocks),
                self._remote,
                b"done",
            )

    def send(self, num_blocks: int) -> int:
        handle = self._handles[num_blocks]
        until = time.monotonic() + self.setup.timeout_s
        began = time.monotonic_ns()
        state = self._agent.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise PdctlError("NIXL: the transfer failed")
            if time.monotonic() > until:
                raise DeadlineError(f"NIXL: the transfer was not over in {self.setup.timeout_s:g} s")
            state = self._agent.check_xfer_state(handle)
        return began

    def receive(self, num_blocks: int) -> int:
        until = time.monotonic() + self.setup.timeout_s
        # This is how its users wait: there is nothing to sleep on.
        while not self._agent.get_new_notifs():
            if time.monotonic() > until:
                raise DeadlineError(f"NIXL: no notification in {self.setup.timeout_s:g} s")
        return time.monotonic_ns()


class Mooncake(Registered):
    """Mooncake's Transfer Engine over TCP: told by one byte over a socket, the receiver reads the sender's memory.

    A read, because it is over when the bytes are there; a write ends for the sender alone.
    """

    name = "mooncake"

    def prepare(self, card: Card) -> Card:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise PdctlError("Mooncake: TransferEngine.initialize failed")
        if self._engine.register_memory(self._address, len(self._memory)) != 0:
            raise PdctlError("Mooncake: register_memory failed")
        path = str(self.setup.directory / "mooncake")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if self.setup.sends:
            self._socket.bind(path)
            self._socket.listen(1)
        else:
            self._socket.connect(path)
            self._sender = f"127.0.0.1:{card['port']}"
            self._sender_address = int(card["address"])
        return {"port": self._engine.get_rpc_port(), "address": self._address}

    def connect(self, card: Card) -> None:
        listener = self._socket
        self._socket = listener.accept()[0]
        listener.close()
        (self.setup.directory / "mooncake").unlink()

    def send(self, num_blocks: int) -> int:
        began = time.monotonic_ns()
        self._socket.sendall(b"!")
        return began

    def receive(self, num_blocks: int) -> int:
        here, there = self._addresses(self._address), self._addresses(self._sender_address)
        lengths = [self._length(num_blocks)] * self._number
        if not self._socket.recv(1):
            raise ConnectionError("the socket was closed")
        if self._engine.batch_transfer_sync_read(self._sender, here, there, lengths) != 0:
            raise PdctlError("Mooncake: the transfer failed")
        return time.monotonic_ns()


def _first_of(*names: str) -> Any:
    """The first of these modules that is there."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise PdctlError(f"none of {', '.join(names)} is installed")
