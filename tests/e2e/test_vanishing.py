"""The ground vanishes under a running cluster: files, names, directories, descriptors. It serves on, and mends it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import cluster as clusters
from pdctl.core import control_client
from pdctl.core.status import cluster_status, find_segment, look
from pdctl.transport.errors import PdctlError
from pdctl.transport.layout import P
from pdctl.transport.names import segments_of
from pdctl.transport.segment import Role

pytestmark = pytest.mark.e2e

DEADLINE_S = 120
PROMPT = list(range(40, 70))
OUTPUT_TOKENS = 300


def options(model: Path) -> list[str]:
    small = ["--kv-blocks", "128", "--threads", "1", "--max-context", "512", "--dtype", "float32"]
    return ["--model", str(model), *small, "--local-prefill-tokens", "0"]


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not in {timeout_s} s")


@contextlib.contextmanager
def looked(cluster: Any) -> Iterator[Any]:
    """The cluster's segment, whether it has a name or not."""
    found = find_segment(cluster.state_dir, cluster.name)
    try:
        yield look(found.target).segment
    finally:
        if found.fd is not None:
            os.close(found.fd)


def pids(cluster: Any, role: Role) -> list[int]:
    with looked(cluster) as segment:
        return [segment.participant_word(slot, P.PID) for slot in segment.slots(role)]


def zygote(cluster: Any) -> int:
    mark = f"{cluster.state_dir / cluster.name}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "cmdline").read_bytes() and (entry / "comm").read_text() == "pdctl-zygote\n":
                    return int(entry.name)
    return 0


def causes(cluster: Any) -> list[str]:
    """What `status` says is not as it should be."""
    try:
        return list(cluster_status(cluster.state_dir, cluster.name).causes)
    except PdctlError as error:
        return [error.message]


def scale(cluster: Any, **numbers: int) -> dict[str, Any]:
    request = {"operation": "scale", "numbers": numbers}
    return control_client.ask(
        cluster.state_dir, cluster.name, request, timeout_s=DEADLINE_S, on_progress=lambda _: None
    )


class Walk:
    """One cluster, an answer that must not change, and its processes."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.supervisor = cluster.state.supervisor_pid
        self.segment = cluster.state.segment_name
        self.url = cluster.state.url
        self.directory = cluster.state_dir / cluster.name
        self.expected = self.ask()
        self.processes = {role: pids(cluster, role)[0] for role in (Role.ROUTER, Role.PREFILL, Role.DECODE)}

    def ask(self) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "return_token_ids": True}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            ids: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
            return ids

    def kill(self, role: Role) -> None:
        os.kill(self.processes[role], signal.SIGKILL)

    def settle(self, role: Role) -> None:
        """Wait for the successor of a process that was killed."""
        before = self.processes[role]

        def after() -> int:
            with contextlib.suppress(Exception):
                return next((pid for pid in pids(self.cluster, role) if pid != before), 0)
            return 0

        self.processes[role] = wait_for(after, f"another {role.label}")

    def assert_mended(self) -> None:
        """As before, but for the segment's name."""
        wait_for(lambda: [one for one in causes(self.cluster) if "name" not in one] == [], "good health")
        assert self.cluster.state.supervisor_pid == self.supervisor


@pytest.fixture(scope="module")
def walk(start_shared: Any, tiny_dir: Path) -> Walk:
    return Walk(start_shared(*options(tiny_dir)))


def _bells(walk: Walk) -> None:
    for bell in walk.directory.glob("bell-*"):
        bell.unlink()


def _truncate(name: str) -> Callable[[Walk], None]:
    return lambda walk: os.truncate(walk.directory / name, 0)


def _unlink(name: str) -> Callable[[Walk], None]:
    return lambda walk: (walk.directory / name).unlink()


def _open_to_all(walk: Walk) -> None:
    for path in (walk.directory, walk.directory / "state.json", walk.directory / "control"):
        path.chmod(0o777)


STEPS: dict[str, tuple[Callable[[Walk], object], tuple[Role | None, ...]]] = {
    "logs": (lambda walk: shutil.rmtree(walk.cluster.state_dir / "logs"), (Role.ROUTER, Role.DECODE)),
    "the segment's name": (lambda walk: walk.segment.path.unlink(), (Role.ROUTER, Role.DECODE, None, Role.PREFILL)),
    "state.json": (_unlink("state.json"), (Role.DECODE,)),
    "what state.json says": (_truncate("state.json"), ()),
    "a state.json of garbage": (lambda walk: (walk.directory / "state.json").write_text('{"schema": 2'), ()),
    "spec.json": (_unlink("spec.json"), ()),
    "the control socket": (_unlink("control"), ()),
    "all bells": (_bells, (Role.PREFILL,)),
    "the lock": (_unlink("lock"), (Role.DECODE,)),
    "what the lock says": (_truncate("lock"), ()),
    "privacy": (_open_to_all, ()),
    "the cluster's directory": (lambda walk: shutil.rmtree(walk.directory), (Role.DECODE,)),
    "the state directory": (lambda walk: shutil.rmtree(walk.cluster.state_dir), (Role.ROUTER, None, Role.DECODE)),
}


@pytest.mark.parametrize("step", STEPS)
def test_what_vanishes_is_missed_by_nobody(walk: Walk, step: str) -> None:
    """Under a stream, with kills: daemons' and the zygote's (None) while it runs, the router's after it."""
    remove, kills = STEPS[step]
    with ThreadPoolExecutor(1) as thread:
        stream = thread.submit(walk.ask)
        wait_for(lambda: stream.done() or _has_tokens(walk), "a stream under way")
        old_zygote = zygote(walk.cluster)
        remove(walk)
        for role in kills:
            if role is None:
                os.kill(old_zygote, signal.SIGKILL)
            elif role is not Role.ROUTER:
                walk.kill(role)
        assert stream.result(DEADLINE_S) == walk.expected
    if Role.ROUTER in kills:
        walk.kill(Role.ROUTER)
    for role in kills:
        if role is not None:
            walk.settle(role)
    walk.assert_mended()
    if None in kills:
        assert wait_for(lambda: zygote(walk.cluster), "another zygote") != old_zygote
    assert walk.ask() == walk.expected
    for path in (walk.directory, walk.directory / "state.json", walk.directory / "control", walk.directory / "lock"):
        assert path.lstat().st_mode & 0o077 == 0
    names = {path.name for path in walk.directory.iterdir()}
    wait_for(lambda: {path.name for path in walk.directory.iterdir()} >= {f"bell-{n}" for n in range(4)}, "bells")
    assert names >= {"lock", "state.json", "spec.json", "control"}
    assert scale(walk.cluster, decode=1)["decode"] == 1
    assert (walk.cluster.state_dir / "logs" / walk.cluster.name / "router.log").exists()


def _has_tokens(walk: Walk) -> bool:
    from pdctl.transport.layout import R
    from pdctl.transport.rows import RowState

    with looked(walk.cluster) as segment:
        rows = segment.rows
        return any(rows.get(row, R.NUM_TOKENS) > len(PROMPT) + 3 for row in rows.in_state(RowState.DECODING))


def test_viewers_say_that_the_name_is_gone(walk: Walk) -> None:
    if walk.segment.path.exists():
        walk.segment.path.unlink()
    status = walk.cluster.cli("status", "--json")
    assert status.code == 8, status
    (cause,) = json.loads(status.out)["causes"]
    assert f"the segment's name {walk.segment.path} was removed: serving and restarts go on" in cause
    assert f"pdctl down --name {walk.cluster.name}" in cause
    looked_at = walk.cluster.cli("inspect", "shm", "--verify")
    assert looked_at.code == 0, looked_at.err
    assert str(walk.segment.path) in looked_at.err
    # Who takes the name is not taken for us, and loses nothing: not to a viewer, nor at `down`.
    walk.segment.path.write_text("somebody's")
    assert len(causes(walk.cluster)) == 1
    assert scale(walk.cluster, decode=2)["started"] == ["decode-1"]
    assert scale(walk.cluster, decode=1)["stopped"] == ["decode-1"]
    walk.segment.path.unlink()


def test_scaling_beyond_the_segments_rows_is_refused_with_the_number(walk: Walk) -> None:
    result = walk.cluster.cli("scale", "decode=16", "prefill=2")
    assert result.code == 5, result.err
    assert "514 requests at once (--max-batch 32), this cluster's segment was made for 144" in result.err
    assert "at most decode=4 beside prefill=2" in result.err
    assert f"--name {walk.cluster.name}" in result.err
    assert walk.cluster.state.spec.num_prefill == 1


def test_without_descriptors_nothing_starts_and_nothing_ends(walk: Walk) -> None:
    """What the system refuses is asked for again, however often, and nobody spins or gives up meanwhile."""
    _, hard = before = resource.prlimit(walk.supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(walk.supervisor, resource.RLIMIT_NOFILE, (3, hard))
    walk.kill(Role.DECODE)
    walk.kill(Role.ROUTER)
    log = walk.cluster.state_dir / "logs" / walk.cluster.name / "supervisor.log"
    wait_for(lambda: log.read_text().count("router: cannot be started") >= 4, "tries to start a router")
    wait_for(lambda: "decode-0: cannot be started" in log.read_text(), "a try to start a daemon")
    cpu_s, began = cpu_of(walk.supervisor), time.monotonic()
    time.sleep(2)
    assert cpu_of(walk.supervisor) - cpu_s < 0.5 * (time.monotonic() - began)
    resource.prlimit(walk.supervisor, resource.RLIMIT_NOFILE, before)
    walk.settle(Role.ROUTER)
    walk.settle(Role.DECODE)
    walk.assert_mended()
    assert walk.ask() == walk.expected


def cpu_of(pid: int) -> float:
    from pdctl.core.process import ProcessStat

    found = ProcessStat.read(pid)
    assert found is not None
    return found.cpu_s


def test_a_router_that_is_stopped_is_replaced(walk: Walk) -> None:
    os.kill(walk.processes[Role.ROUTER], signal.SIGSTOP)
    walk.settle(Role.ROUTER)
    walk.assert_mended()
    assert walk.ask() == walk.expected


def test_while_no_router_runs_clients_are_refused_at_once(walk: Walk) -> None:
    host, port = walk.url.removeprefix("http://").split(":")
    idle = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    large = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000
    found = None
    for _ in range(7):
        with contextlib.suppress(ProcessLookupError):
            walk.kill(Role.ROUTER)
        # Each router is killed at its start, so the pauses grow, in which nobody starts.
        for _ in range(20):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.3) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = client.recv(65536)
                found = answer if b"router_down" in answer else None
            if found or (new := router_of(walk)) != walk.processes[Role.ROUTER]:
                break
        if found:
            break
        walk.processes[Role.ROUTER] = new
    assert found is not None
    head, body = found.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in head
    assert json.loads(body)["error"]["code"] == "router_down"
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
        client.sendall(large)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    # Either of them: by now another router may run.
    assert answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 4"))
    idle.close()
    walk.settle(Role.ROUTER)
    walk.assert_mended()
    assert walk.ask() == walk.expected


def router_of(walk: Walk) -> int:
    """The PID of a router that has begun, attached or not."""
    mark = f"{walk.directory}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if mark in words and b"pdctl.core.router" in words and (entry / "stat").read_text().find(") Z ") < 0:
                    return int(entry.name)
    return walk.processes[Role.ROUTER]


def test_down_leaves_nothing_of_a_cluster_whose_segment_has_no_name(walk: Walk) -> None:
    supervisor = walk.supervisor
    walk.cluster.down()
    assert segments_of(walk.cluster.name) == []
    assert _is_zombie(supervisor)


def test_who_takes_the_name_first_keeps_it(start: Any, tiny_dir: Path) -> None:
    """The directory is removed, and another cluster of the name starts in it before the first one looks."""
    first = start(*options(tiny_dir))
    supervisor = first.state.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    shutil.rmtree(first.state_dir / first.name)
    up = first.cli("up", "--port", "0", *options(tiny_dir))
    assert up.code == 0, up.err
    state = first.state
    assert state.supervisor_pid != supervisor
    os.kill(supervisor, signal.SIGCONT)
    wait_for(lambda: _is_zombie(supervisor), "the end of the first")
    assert "another supervisor has taken the name" in first.cli("logs", "supervisor").out
    assert first.state == state
    assert scale(first, decode=2)["decode"] == 2
    wait_for(lambda: first.cli("status").code == 0, "good health")
    assert len(segments_of(first.name)) == 1
    assert first.complete(PROMPT, 4)["usage"]["completion_tokens"] == 4
    first.down()


def _is_zombie(pid: int) -> bool:
    """Or gone."""
    with contextlib.suppress(OSError):
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


# x86-64 alone: pidfd_open and pidfd_send_signal.
@pytest.mark.parametrize(("number", "name", "errno"), [(434, "pidfd_open", 1), (424, "pidfd_send_signal", 38)])
def test_missing_pidfds_are_named_with_their_remedy(
    start: Any, tiny_dir: Path, number: int, name: str, errno: int
) -> None:
    """As under a seccomp profile that does not know them, or a kernel that is too old."""
    cluster = start("--dtype", "none", expect_up=False)
    # BPF: load the number of the call; if it is the one, fail with the error; else allow.
    script = f"""
import ctypes, struct, sys
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50000 | {errno}), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
program = struct.pack("@HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
sys.argv = ["pdctl", *sys.argv[1:]]
from pdctl.cli.__main__ import run
run()
"""
    place = ["--name", cluster.name, "--state-dir", str(cluster.state_dir)]
    done = subprocess.run(
        [sys.executable, "-c", script, "up", *options(tiny_dir), *place, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert f"{name}: " in done.stderr
    assert "seccomp" in done.stderr
    assert "Traceback" not in done.stderr
    assert clusters.is_locked(cluster.state_dir, cluster.name) is False
    cluster.assert_clean()
