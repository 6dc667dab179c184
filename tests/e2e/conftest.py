"""Real clusters: started by the command line, asked over HTTP, taken down, and nothing may be left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import cluster as _cluster
from pdctl.transport.names import segments_of
from pdctl.transport.segment import Role, take_snapshot

CLI = [sys.executable, "-m", "pdctl.cli"]
UP_DEADLINE_S = 240


@dataclass
class Result:
    code: int
    out: str
    err: str


def pdctl(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, stdin: str = "") -> Result:
    """Run the command line to its end."""
    done = subprocess.run(
        [*CLI, *arguments],
        capture_output=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        input=stdin.encode(),
        timeout=UP_DEADLINE_S,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class Cluster:
    """One running cluster under test."""

    name: str
    state_dir: Path
    pids: set[int] = field(default_factory=set)

    def cli(self, *arguments: str, **options: Any) -> Result:
        return pdctl(*arguments, "--name", self.name, "--state-dir", str(self.state_dir), **options)

    @property
    def state(self) -> _cluster.ClusterState:
        return _cluster.running(self.state_dir, self.name)

    def slots(self, role: Role) -> list[tuple[int, int]]:
        """(slot, pid) of the living participants of a role."""
        from pdctl.transport.layout import P

        segment = take_snapshot(self.state.segment_name).segment
        return [(slot, segment.participant_word(slot, P.PID)) for slot in segment.slots(role)]

    def pid(self, role: Role) -> int:
        return self.slots(role)[0][1]

    def kill(self, role: Role, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def post(self, path: str, body: Any, timeout_s: float = 120) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.state.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.state.url + path, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def complete(self, prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion with ids, usage and timings."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.post("/v1/completions", {**body, "return_token_ids": True, "timings": True, **more})
        assert status == 200, answer
        return answer

    def ids(self, prompt: Any, max_tokens: int, **more: Any) -> list[int]:
        ids: list[int] = self.complete(prompt, max_tokens, **more)["choices"][0]["token_ids"]
        return ids

    def down(self) -> None:
        result = self.cli("down")
        assert result.code == 0, result.err
        self.assert_clean()

    def assert_no_noise(self) -> None:
        """Nothing that a process says when it ends with something still in use (S28)."""
        for path in (self.state_dir / "logs" / self.name).glob("*.log"):
            text = path.read_text(errors="replace")
            for noise in ("Exception ignored", "BufferError", "resource_tracker", "leaked"):
                assert noise not in text, f"{path}: {noise}"

    def assert_clean(self) -> None:
        """No process, segment or state file; only logs."""
        assert not (self.state_dir / self.name).exists()
        assert segments_of(self.name) == []
        assert alive_of(self.state_dir / self.name) == []


def alive_of(directory: Path) -> list[str]:
    """Command lines of living processes that name a cluster's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if f"{directory}/" in command and "pdctl.core" in command and state != "Z":
                found.append(f"{entry.name} {command}")
    return found


Starter = Callable[..., Cluster]


def _starter(state_dir: Path) -> Iterator[Starter]:
    started: list[Cluster] = []

    def start(*arguments: str, expect_up: bool = True, **options: Any) -> Cluster:
        # Names are unique among test runs that share /dev/shm.
        one = Cluster(f"t{os.getpid()}-{len(started)}-{os.urandom(2).hex()}", state_dir)
        started.append(one)
        result = one.cli("up", "--port", "0", *arguments, **options)
        if expect_up:
            assert result.code == 0, f"{result.err}\n{one.cli('logs').out}"
        return one

    try:
        yield start
    finally:
        for one in started:
            one.cli("down")
    for one in started:
        one.assert_clean()
        one.assert_no_noise()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts clusters that the test's end takes down, and proves clean."""
    yield from _starter(tmp_path / "state")


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """The same, for a cluster that all tests of a module ask."""
    yield from _starter(tmp_path_factory.mktemp("shared") / "state")


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """The embedded model, pulled into the user's cache as `pdctl up` does."""
    from pdctl.core.pull import pull

    return pull("smollm2")
