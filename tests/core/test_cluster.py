"""The state file is read as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.core import cluster as clusters
from pdctl.core.cluster import ClusterLock, ClusterState, read_state, write_state
from pdctl.core.config import ClusterSpec
from pdctl.core.private_files import private_directory
from pdctl.transport.errors import UsageError
from pdctl.transport.names import new_segment_name


@pytest.fixture
def state(tmp_path: Path) -> ClusterState:
    spec = ClusterSpec(
        name="one",
        state_dir=tmp_path,
        model_path=tmp_path,
        model_name="tiny",
        fingerprint=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=16,
        eos_token_ids=(2,),
    )
    private_directory(tmp_path / "one")
    made = ClusterState(
        name="one",
        phase="running",
        supervisor_pid=7,
        supervisor_start_time=8,
        segment="pdctl-0-one-0123456789ab",
        url="http://127.0.0.1:8000",
        started_unix_ns=9,
        spec=spec,
    )
    write_state(made)
    return made


def test_what_was_written_is_read(state: ClusterState) -> None:
    assert read_state(state.spec.state_dir, "one") == state
    assert (state.spec.state_dir / "one" / "state.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", 5),
        ("phase", None),
        ("started_unix_ns", "x"),
        ("supervisor_pid", 1.5),
        ("supervisor_pid", True),
        ("segment", "../x"),
        ("name", "other"),
        ("schema", 1),
        ("gave_up", []),
        ("gave_up", {"decode-0": "8"}),
        ("spec", {}),
        ("more", 1),
    ],
)
def test_a_field_of_another_kind_is_no_state(state: ClusterState, field: str, value: object) -> None:
    path = state.spec.state_dir / "one" / "state.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, field: value}))
    assert read_state(state.spec.state_dir, "one") is None


def test_a_hint_names_what_the_shell_would_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state directory only if it is not the default one, in a form that a shell reads back."""
    odd = tmp_path / "a b"
    assert clusters.command("status", "default", odd) == f"pdctl status --state-dir '{odd}'"
    assert clusters.command("drain --undo decode-0", "two", odd) == (
        f"pdctl drain --undo decode-0 --name two --state-dir '{odd}'"
    )
    monkeypatch.setenv("PDCTL_STATE_DIR", str(odd))
    assert clusters.command("status", "default", odd) == "pdctl status"
    assert clusters.command("status", "two", odd) == "pdctl status --name two"


def test_a_directory_that_all_share_is_not_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UsageError, match="shared by all users"):
        private_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    tmp_path.chmod(0o700)


def test_only_what_a_dead_supervisor_left_is_ended(tmp_path: Path) -> None:
    """A process not yet bound to its supervisor outlives it; one whose supervisor lives is none of ours to end."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "pdctl.core.router", "--spec"]
    leader = (
        "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, flush=True)"
    )

    def started(directory: str, ends: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", f"{leader}; {ends}", *sleeper, str(tmp_path / directory / "spec.json")]
        supervisor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert supervisor.stdout is not None
        return supervisor, int(supervisor.stdout.readline())

    dead, stray = started("one", "sys.exit()")
    alive, child = started("one", "sys.stdin.read()")
    dead_too, other = started("two", "sys.exit()")
    dead.wait(60)
    dead_too.wait(60)
    handles = {pid: os.pidfd_open(pid) for pid in (stray, child, other)}
    try:
        assert clusters.remove_stale(tmp_path, "one") == []
        ended = [pid for pid, fd in handles.items() if select.select([fd], [], [], 0)[0]]
        assert ended == [stray]
    finally:
        for fd in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        for supervisor in (dead, alive, dead_too):
            supervisor.kill()
            supervisor.communicate(timeout=60)


def test_a_file_that_only_has_a_segments_name_is_in_nobodys_way(tmp_path: Path) -> None:
    """Held by a living process it is not removed, and stands neither for a crash nor in the way of a start."""
    name = new_segment_name(f"t-{os.urandom(4).hex()}")
    name.path.write_bytes(b"somebody's work" * 1000)
    script = f"file = open('{name.path}', 'r+b'); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        assert not clusters.was_left(tmp_path, name.cluster)
        assert clusters.remove_stale(tmp_path, name.cluster, wait_s=0) == []
        assert clusters.tidy(tmp_path, name.cluster) is None
        assert name.path.exists()
        holder.kill()
        holder.wait()
        assert clusters.was_left(tmp_path, name.cluster)
        assert clusters.remove_stale(tmp_path, name.cluster) == [name]
    finally:
        holder.kill()
        holder.communicate()
        name.path.unlink(missing_ok=True)


def test_files_of_people_are_not_ours_to_remove(tmp_path: Path) -> None:
    """A state directory that somebody works in, and a cluster called as a folder there."""
    tmp_path.chmod(0o700)
    folder = tmp_path / "core"
    folder.mkdir(mode=0o700)
    (folder / "thesis.tex").write_text("years of work")
    (folder / "bell-3").touch()
    lock = ClusterLock(tmp_path, "core")
    assert lock.acquire(0)
    lock.forget_state()
    lock.release(remove=True)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_process_of_another_user_is_no_stray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "spec.json"
    code = ["-c", "print(flush=True); input()", "pdctl.core.daemon", str(spec)]
    process = subprocess.Popen([sys.executable, *code], stdin=-1, stdout=-1)
    try:
        assert process.stdout is not None and process.stdout.readline()
        monkeypatch.setattr(clusters.ProcessStat, "read", lambda pid: None)  # its session's leader has ended
        assert clusters._is_stray(process.pid, spec)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not clusters._is_stray(process.pid, spec)
    finally:
        process.kill()
        process.communicate()
