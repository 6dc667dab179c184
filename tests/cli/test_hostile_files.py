"""Whatever stands in a cluster's files and the environment: an error that has a name, never a traceback or a hang."""

from __future__ import annotations

import copy
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdctl.cli import down, up
from pdctl.cli.main import app
from pdctl.core.cluster import ClusterLock, ClusterState, read_state, write_state
from pdctl.core.config import ClusterSpec
from pdctl.transport.errors import IncompatibleError, PdctlError, UsageError
from pdctl.transport.names import new_segment_name, parse_segment_name
from pdctl.transport.segment import Role, Segment

NAME = f"h{os.getpid()}-{secrets.token_hex(2)}"
WATCHDOG_S = 60

bounded = settings(
    max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)

HOSTILE_NUMBERS = [0, -1, 1, 1.5, 1e308, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, True]
HOSTILE_TEXTS = ["", "\0", "a\0b", "../../etc", "/", "x" * 5000, "\ud800", "\x1b[31m", "1 2", "[::1", "http://"]
hostile = st.one_of(
    st.sampled_from([None, [], {}, [[]], float("inf"), float("nan"), *HOSTILE_NUMBERS, *HOSTILE_TEXTS]),
    st.integers(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
)
garbage = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"", b"{", b"[" * 100_000, b'{"schema":' * 50_000, b"1" * 10_000, b"\xff\xfe", b"null", b"{}"]),
)


def valid_state(state_dir: Path) -> ClusterState:
    return ClusterState(
        name=NAME,
        phase="running",
        supervisor_pid=os.getpid(),
        supervisor_start_time=1,
        segment=str(new_segment_name(NAME)),
        url="http://127.0.0.1:1",
        started_unix_ns=1,
        spec=ClusterSpec(
            name=NAME,
            state_dir=state_dir,
            model_path=Path("/models/tiny"),
            model_name="tiny",
            fingerprint=1,
            num_layers=2,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=100,
            eos_token_ids=(2,),
            num_blocks=16,
            max_context=64,
        ),
    )


class Files:
    """A cluster's directory with a lock that somebody holds, so that all files count."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.directory = state_dir / NAME
        self._lock = ClusterLock(state_dir, NAME)
        assert self._lock.acquire(0)
        write_state(valid_state(state_dir))
        self.state = json.loads((self.directory / "state.json").read_text())
        # Somebody has a place in it, so that `down` leaves it alone and `status` has something to look at.
        name = parse_segment_name(self.state["segment"])
        assert name is not None
        self.segment = Segment.create(name, valid_state(state_dir).spec.geometry, fingerprint=1, numerics_id=1)
        self.segment.attach(Role.SUPERVISOR)
        self.path = name.path

    def run_all(self) -> None:
        for arguments in (
            ["status"],
            ["status", "--json"],
            ["inspect", "shm"],
            ["generate", "x"],
            ["logs"],
            ["down"],
            ["up", "--model", "/nowhere"],
        ):
            run(*arguments, "--name", NAME, "--state-dir", str(self.state_dir))

    def close(self) -> None:
        self._lock.release(remove=True)
        self.segment.close()
        self.path.unlink()


def run(*arguments: str) -> None:
    """A command in this process: it may refuse, but it must know why."""
    ended = CliRunner().invoke(app, list(arguments))
    if ended.exception is not None and not isinstance(ended.exception, PdctlError | SystemExit):
        raise AssertionError(f"{arguments}: {ended.exception!r}") from ended.exception


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setattr(down, "_GRACE_S", 0.0)
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "cache"))
    made = Files(tmp_path / "s")
    yield made
    made.close()


@pytest.mark.parametrize("name", ["state.json", "lock"])
@bounded
@given(content=garbage)
def test_garbage(files: Files, name: str, content: bytes) -> None:
    (files.directory / name).write_bytes(content)
    files.run_all()


@bounded
@given(data=st.data())
def test_state_with_one_wrong_value(files: Files, data: st.DataObject) -> None:
    state: dict[str, Any] = copy.deepcopy(files.state)
    place = data.draw(st.sampled_from([state, state["spec"], state["spec"]]))
    key = data.draw(st.sampled_from([*sorted(place), "unknown"]))
    if data.draw(st.booleans()):
        place[key] = data.draw(hostile)
    else:
        place.pop(key, None)
    (files.directory / "state.json").write_text(json.dumps(state))
    files.run_all()


@pytest.mark.parametrize(
    "url", ["", "x", "http://", "http://[::1", "http://h:99999", "http://h:b", "http://h", "ftp://h:1", "file:///etc"]
)
def test_a_url_that_is_none(files: Files, url: str) -> None:
    (files.directory / "state.json").write_text(json.dumps({**files.state, "url": url}))
    assert read_state(files.state_dir, NAME) is None
    files.run_all()


@settings(bounded, max_examples=500)
@given(data=st.data())
def test_a_specification(data: st.DataObject) -> None:
    """As the router and the zygote read it."""
    spec: dict[str, Any] = json.loads(valid_state(Path("/tmp/s")).spec.to_json())
    key = data.draw(st.sampled_from([*sorted(spec), "unknown"]))
    spec[key] = data.draw(hostile)
    try:
        found = ClusterSpec.from_json(json.dumps(spec))
    except (IncompatibleError, UsageError):
        return
    assert json.loads(found.to_json()).keys() == valid_keys()
    hash(found)


@settings(bounded, max_examples=300)
@given(content=garbage)
def test_a_specification_of_garbage(content: bytes) -> None:
    with pytest.raises(IncompatibleError):
        ClusterSpec.from_json(content.decode("latin-1"))


def valid_keys() -> set[str]:
    return set(json.loads(valid_state(Path("/tmp/s")).spec.to_json()))


@bounded
@given(pid=st.one_of(st.integers(), st.sampled_from(HOSTILE_NUMBERS)), start=st.integers(), more=st.text(max_size=3))
def test_lock_that_names_any_process(files: Files, pid: object, start: int, more: str) -> None:
    (files.directory / "lock").write_bytes(f"{pid} {start}{more}\n".encode("utf-8", "surrogatepass"))
    files.run_all()


@pytest.mark.parametrize("name", ["state.json", "lock"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "loop", "socket", "device", "unreadable", "huge"])
def test_files_that_are_none(files: Files, name: str, kind: str) -> None:
    path = files.directory / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.relpath(path))
        listener.close()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "unreadable":
        path.touch(mode=0o000)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    try:
        files.run_all()
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def test_a_state_that_is_right_is_read(files: Files) -> None:
    assert read_state(files.state_dir, NAME) == valid_state(files.state_dir).__class__(
        **{**vars(valid_state(files.state_dir)), "segment": files.state["segment"]}
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"PDCTL_NAME": "../../x"},
        {"PDCTL_NAME": "x" * 100_000},
        {"PDCTL_NAME": "\udcff"},
        {"PDCTL_STATE_DIR": "/proc/self/mem"},
        {"PDCTL_STATE_DIR": "x" * 100_000},
        {"PDCTL_STATE_DIR": "/tmp/\udcff\udcfe"},
        {"PDCTL_PORT": "1e3"},
        {"PDCTL_PORT": "-1"},
        {"PDCTL_PORT": "9" * 400},
        {"PDCTL_HOST": "a\nb"},
        {"PDCTL_HOST": "\udcff"},
        {"PDCTL_HOST": "x" * 10_000},
        {"PDCTL_MODEL": "\x1b[31m/../"},
        {"PDCTL_MODEL": "/\udcff"},
        {"PDCTL_THREADS": "nan"},
        {"PDCTL_THREADS": "-5"},
        {"OMP_NUM_THREADS": "9" * 400},
        {"PDCTL_API_KEY": ""},
        {"PDCTL_API_KEY": "\udcff"},
        {"PDCTL_CACHE_DIR": "/proc/self/mem"},
        {"PDCTL_CACHE_DIR": "/\udcff/x"},
    ],
    ids=lambda variables: ascii(variables)[:40],
)
@pytest.mark.parametrize("command", ["status --json", "down", "generate x", "up"])
def test_the_environment(
    tmp_path: Path, variables: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[object] = []
    monkeypatch.setattr(up, "_supervise", lambda spec, **_: started.append(spec))
    given = {"PDCTL_STATE_DIR": str(tmp_path / "s"), "PDCTL_MODEL": "/nowhere", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    run(*command.split())
    assert not started


def test_errors_with_any_bytes_can_be_printed(tmp_path: Path) -> None:
    """The real streams: what names a file need not be text."""
    environment = {**os.environb, b"PDCTL_STATE_DIR": os.fsencode(tmp_path) + b"/\xff", b"PDCTL_MODEL": b"/\xff\xfe"}
    for command in ("status", "up"):
        ended = subprocess.run(
            [sys.executable, "-m", "pdctl.cli.main", command],
            env=environment,
            capture_output=True,
            timeout=WATCHDOG_S,
            check=False,
        )
        assert ended.returncode in (2, 3, 4), ended
        assert b"Traceback" not in ended.stderr + ended.stdout


def test_a_log_level_that_is_none(tmp_path: Path) -> None:
    """A daemon cannot ask what was meant: it says so in its log, and logs as usual."""
    code = "from pathlib import Path; from pdctl.core import logs; import logging, sys\n"
    code += "logs.setup(Path(sys.argv[1]), 'router'); logging.info('working')"
    for level in ("LOUD", "", "99999999999999999999", "debug"):
        ended = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PDCTL_LOG_LEVEL": level},
            capture_output=True,
            timeout=WATCHDOG_S,
            check=False,
        )
        assert ended.returncode == 0
        log = (tmp_path / "router.log").read_text()
        assert "working" in log and "Traceback" not in log
        assert ("expected DEBUG" in log) is (level not in ("", "debug"))
        (tmp_path / "router.log").unlink()
