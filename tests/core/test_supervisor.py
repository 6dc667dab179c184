"""The supervisor's loop in this process, without processes of its own: what fails in it ends nothing."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import supervisor as supervisor_module
from pdctl.core import zygote
from pdctl.core.child import MAX_QUICK_DEATHS, Child
from pdctl.core.cluster import read_state
from pdctl.core.config import ClusterSpec
from pdctl.core.private_files import private_directory
from pdctl.core.supervisor import Supervisor
from pdctl.transport.errors import CapacityError, CorruptSegmentError
from pdctl.transport.names import segments_of

WATCHDOG_S = 30


class Loop:
    """A cluster that is up, as far as its supervisor knows, whose processes are never started."""

    def __init__(self, state_dir: Path) -> None:
        self.name = f"t-{secrets.token_hex(4)}"
        self.spec = ClusterSpec(
            name=self.name,
            state_dir=state_dir,
            model_path=state_dir,
            model_name="tiny",
            fingerprint=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=16,
            eos_token_ids=(2,),
            port=0,
            dtype="float32",
            num_blocks=8,
            max_context=64,
        )
        private_directory(state_dir)
        self.supervisor = Supervisor(self.spec)
        assert self.supervisor._lock.acquire(0)
        self.supervisor._lock.sign()
        self.supervisor._open()
        for child in self.supervisor.children:
            child.start_at = None
        self.supervisor._router.ready = True
        self.supervisor._announced = True
        self._thread = threading.Thread(target=self.supervisor._loop, daemon=True)

    def run(self) -> None:
        self._thread.start()

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WATCHDOG_S
        while time.monotonic() < deadline:
            assert self._thread.is_alive(), "the loop ended"
            if value := condition():
                return value
            time.sleep(0.01)
        raise AssertionError(f"{what}: not in {WATCHDOG_S} s")

    def wake(self) -> None:
        self.supervisor._wakeup_writer.send(b"x")

    @property
    def warnings(self) -> dict[str, str]:
        state = read_state(self.spec.state_dir, self.name)
        return {} if state is None else state.warnings

    def close(self) -> None:
        self.supervisor._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(WATCHDOG_S)
            assert not self._thread.is_alive()
        self.supervisor._close()
        self.supervisor._lock.release(remove=True)
        assert segments_of(self.name) == []
        assert not (self.spec.state_dir / self.name).exists()


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    # It collects every child of this process.
    monkeypatch.setattr(supervisor_module, "_end_children", lambda: None)
    made = Loop(tmp_path / "state")
    yield made
    made.close()


def test_a_handler_that_always_fails_ends_nothing_and_takes_no_core(loop: Loop) -> None:
    ours, theirs = socket.socketpair()

    def fail() -> None:
        raise ZeroDivisionError("as nobody expected")

    loop.supervisor._selector.register(ours, selectors.EVENT_READ, fail)
    theirs.send(b"never read")
    before = time.process_time()
    loop.run()
    loop.wait_for(lambda: loop.supervisor._faults.number >= 9, "nine failures")
    # They came at growing distances.
    assert time.process_time() - before < WATCHDOG_S / 2
    warning = loop.wait_for(lambda: loop.warnings.get("supervisor"), "a warning")
    assert "an event: ZeroDivisionError: as nobody expected" in warning
    loop.supervisor._selector.unregister(ours)
    ours.close()
    theirs.close()


def test_each_step_of_the_loop_may_fail(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorruptSegmentError("broken")

    for step in ("sweep", "leads_to", "state_and_cpu_s"):
        monkeypatch.setattr(supervisor_module, step, fail)
    monkeypatch.setattr(loop.supervisor._operations, "advance", fail)
    loop.run()
    loop.wait_for(lambda: loop.supervisor._faults.number >= 4, "four failures")


def test_before_it_is_up_a_failure_is_the_reason_why_it_is_not(loop: Loop) -> None:
    loop.supervisor._announced = False
    with pytest.raises(ZeroDivisionError):
        loop.supervisor._guarded("it", lambda: 1 // 0)
    with pytest.raises(CapacityError, match="router: cannot be started: no memory"):
        loop.supervisor._put_off(loop.supervisor._router, "no memory")


@pytest.mark.parametrize("gone", ["interpreter", "descriptors", "logs"])
def test_a_process_that_cannot_be_made_is_tried_again(loop: Loop, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    router = loop.supervisor._router
    router.ready = False
    started: list[Any] = []
    monkeypatch.setattr(supervisor_module.subprocess, "Popen", _popen(started, fails=gone == "descriptors"))
    if gone == "interpreter":
        monkeypatch.setattr(supervisor_module.subprocess, "Popen", _REAL_POPEN)
        monkeypatch.setattr(sys, "executable", "/none/python")
    if gone == "logs":
        directory = loop.spec.state_dir / "logs"
        directory.rmdir() if directory.exists() else None
        directory.write_text("in the way")
    router.start_at = time.monotonic()
    loop.run()
    if gone == "logs":
        loop.wait_for(lambda: started, "a start without a log")
        assert "logs" in loop.wait_for(lambda: loop.warnings, "a warning")
        (loop.spec.state_dir / "logs").unlink()
        loop.wait_for(lambda: "logs" not in loop.warnings, "logs again")
    else:
        loop.wait_for(lambda: router.num_refused >= 2, "two tries")
        assert not router.gave_up
        loop.wait_for(lambda: "router cannot be started" in loop.warnings.get("router", ""), "a warning")
        monkeypatch.setattr(supervisor_module.subprocess, "Popen", _popen(started))
        loop.wait_for(lambda: started and router.num_refused == 0, "a start")
        loop.wait_for(lambda: "router" not in loop.warnings, "no warning")


_REAL_POPEN, _PYTHON = supervisor_module.subprocess.Popen, sys.executable


def _popen(started: list[Any], *, fails: bool = False) -> Callable[..., Any]:
    """As Popen, but of a process that only sleeps until its parent ends it."""

    def make(*_: object, **more: Any) -> Any:
        if fails:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(_REAL_POPEN([_PYTHON, "-c", "import time; time.sleep(600)"], **more))
        return started[-1]

    return make


def test_a_router_that_gave_up_is_said_to_clients_at_once(loop: Loop) -> None:
    router = loop.supervisor._router
    router.ready, router.quick_deaths = False, MAX_QUICK_DEATHS
    loop.run()
    with socket.create_connection(loop.supervisor._listener.getsockname(), timeout=WATCHDOG_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After" not in head
    message = json.loads(body)["error"]["message"]
    assert message.startswith(f"the router gave up after 8 deaths in a row; pdctl restart router --name {loop.name}")


def test_a_vanished_control_socket_and_bell_are_heard_again(loop: Loop) -> None:
    loop.run()
    directory = loop.spec.state_dir / loop.name
    for name in ("control", "bell-0"):
        (directory / name).unlink()
    loop.wait_for(lambda: {"control", "bell-0"} <= {path.name for path in directory.iterdir()}, "both")
    heard: list[int] = []
    bell = loop.supervisor._bell
    drain = bell.drain
    bell.drain = lambda: bool(heard.append(1)) or drain()  # type: ignore[method-assign, func-returns-value]
    loop.supervisor._selector.modify(bell, selectors.EVENT_READ, bell.drain)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringer:
        ringer.sendto(b"", str(directory / "bell-0"))
    loop.wait_for(lambda: heard, "the ring")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WATCHDOG_S)
        client.connect(str(directory / "control"))
        client.sendall(b'{"operation": "scale", "numbers": {"decode": 16}, "timeout_s": 5}\n')
        lines = [json.loads(line) for line in client.makefile("rb")]
    assert lines[-1]["error"]["exit_code"] == CapacityError.exit_code


def test_a_start_that_the_system_refuses_is_never_given_up() -> None:
    child = Child(name="decode-0", role=None)
    pauses = [child.put_off() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, 5.0)
    assert not child.gave_up
    assert child.start_at is not None
    child.begin(object())  # type: ignore[arg-type]
    assert child.put_off() == 0.2


def test_a_zygote_that_cannot_fork_says_so_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(12, "Cannot allocate memory")

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "fork", refuse)
    assert zygote._fork(theirs, "decode", 3) is None
    told = json.loads(ours.recv(4096))
    assert told == {"unforked": "Cannot allocate memory", "kind": "decode", "index": 3}
    ours.close()
    theirs.close()
