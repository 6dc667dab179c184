"""Another user made the state directory first, or planted files in it: nobody believes what is read there.

As root the other user is real; else this user's number is changed as far as the check can see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli import down as down_command
from pdctl.cli.main import app
from pdctl.core import cluster as clusters
from pdctl.core import private_files
from pdctl.core.cluster import ClusterLock, ClusterState, write_state
from pdctl.core.control_client import ask
from pdctl.core.private_files import UntrustedError, open_file, read_private, write_private
from pdctl.transport.errors import NotFoundError, PdctlError, UsageError
from pdctl.transport.names import all_segments, control_path, log_dir
from pdctl.transport.segment import Segment, process_start_time, take_snapshot

Cluster = Any

STRANGER = 12345
WATCHDOG_S = 60
COMMANDS = (
    ["status"],
    ["down"],
    ["generate", "hello"],
    ["inspect", "shm"],
    ["logs"],
    ["scale", "decode=2"],
    ["drain", "decode-0"],
    ["restart"],
    ["bench", "-n", "1"],
    ["up", "--model", "/nowhere"],
)


class Victim:
    """A process of ours, and a server that counts who connects: what the forger is after."""

    def __init__(self, cluster: Cluster) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        state = cluster.state(supervisor_pid=self.process.pid)
        self.state = ClusterState(**{**vars(state), "url": f"http://127.0.0.1:{self.listener.getsockname()[1]}"})

    def is_unharmed(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return False
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WATCHDOG_S)
        self.listener.close()


@pytest.fixture
def forged(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Victim]]:
    """A cluster's files that name the victim, and a lock that is held: all that `down` and `generate` go by."""
    monkeypatch.setattr(down_command, "_GRACE_S", 0.0)
    victim = Victim(cluster)
    directory = cluster.state_dir / cluster.name
    cluster.run(victim.state)
    (directory / "lock").write_text(f"{victim.process.pid} {process_start_time(victim.process.pid)}\n")
    log_dir(cluster.state_dir, cluster.name).mkdir(parents=True)
    (log_dir(cluster.state_dir, cluster.name) / "router.log").write_text("forged\n")
    try:
        yield cluster, victim
    finally:
        monkeypatch.undo()
        for path in [cluster.state_dir, *cluster.state_dir.rglob("*")]:
            if os.geteuid() == 0:
                os.lchown(path, 0, 0)
        directory.chmod(0o700)
        victim.close()


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a file another user's; returns that user, or whom it says to belong to."""
    if os.geteuid() == 0:
        os.lchown(path, STRANGER, STRANGER)
        return STRANGER
    me = os.geteuid()
    monkeypatch.setattr(private_files.os, "geteuid", lambda: me + 1)
    return me


FORGERIES: dict[str, Callable[[Cluster], Path]] = {
    "state directory": lambda one: one.state_dir,
    "cluster's directory": lambda one: one.state_dir / one.name,
    "lock": lambda one: one.state_dir / one.name / "lock",
    "state file": lambda one: one.state_dir / one.name / "state.json",
}


@pytest.mark.parametrize("what", FORGERIES)
def test_files_of_another_user_are_refused_by_every_command(
    forged: tuple[Cluster, Victim], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cluster, victim = forged
    path = FORGERIES[what](cluster)
    owner = give_away(path, monkeypatch)
    for command in COMMANDS:
        arguments = [*command, "--name", cluster.name, "--state-dir", str(cluster.state_dir)]
        ended = CliRunner().invoke(app, arguments)
        assert isinstance(ended.exception, UsageError), (command, ended.output, ended.exception)
        assert str(path if os.geteuid() == 0 else cluster.state_dir) in ended.exception.message
        assert f"user {owner}" in ended.exception.message
        assert ended.exception.hint
        assert "forged" not in ended.output
    assert victim.is_unharmed()


@pytest.mark.parametrize("command", [["ls"], ["gc", "--dry-run"]], ids=lambda command: command[0])
def test_a_directory_of_another_user_is_not_listed(
    forged: tuple[Cluster, Victim], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    cluster, victim = forged
    give_away(cluster.state_dir, monkeypatch)
    ended = CliRunner().invoke(app, [*command, "--state-dir", str(cluster.state_dir)])
    assert isinstance(ended.exception, UsageError)
    assert victim.is_unharmed()


@pytest.mark.parametrize("what", FORGERIES)
def test_files_that_others_may_write_are_refused(forged: tuple[Cluster, Victim], what: str) -> None:
    """Whoever may write them need not own them; `up` closes the state directory, but what it holds is there."""
    cluster, victim = forged
    path = FORGERIES[what](cluster)
    path.chmod(0o777 if path.is_dir() else 0o666)
    # `up` closes it: from then on nobody else puts anything there, and what is there belongs to whom it belongs.
    for command in COMMANDS if path != cluster.state_dir else COMMANDS[:-1]:
        arguments = [*command, "--name", cluster.name, "--state-dir", str(cluster.state_dir)]
        ended = CliRunner().invoke(app, arguments)
        assert isinstance(ended.exception, UsageError), (command, ended.output)
        assert "others may write" in ended.exception.message or "other users may write" in ended.exception.message
        assert f"chmod go-w {path}" == ended.exception.hint
    assert victim.is_unharmed()
    path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("what", FORGERIES)
def test_the_open_itself_checks(forged: tuple[Cluster, Victim], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whoever swaps the directory after it was looked at: what is read is the file that was opened and checked."""
    cluster, victim = forged
    path = FORGERIES[what](cluster)
    if path == cluster.state_dir:
        path = path / cluster.name
    give_away(path, monkeypatch)
    assert clusters.read_state(cluster.state_dir, cluster.name) is None or path.name == "lock"
    if path.name != "state.json":
        assert not clusters.is_locked(cluster.state_dir, cluster.name)
        assert clusters.find_supervisor(cluster.state_dir, cluster.name) is None
    if path.is_dir():
        monkeypatch.setattr("pdctl.core.control_client.running", lambda *_: victim.state)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(control_path(path)))
        listener.listen()
        with listener, pytest.raises(NotFoundError, match="belongs to user"):
            ask(cluster.state_dir, cluster.name, {}, timeout_s=1, on_progress=lambda _: None)
        control_path(path).unlink()
    assert victim.is_unharmed()


def test_the_forgery_would_work_otherwise(forged: tuple[Cluster, Victim]) -> None:
    """As our own files they are believed: the tests above refuse for the owner's sake alone."""
    cluster, victim = forged
    supervisor = clusters.find_supervisor(cluster.state_dir, cluster.name)
    assert supervisor is not None and supervisor.pid == victim.process.pid
    supervisor.close()
    place = ["--name", cluster.name, "--state-dir", str(cluster.state_dir)]
    CliRunner().invoke(app, ["down", *place])
    assert victim.process.wait(WATCHDOG_S) == -signal.SIGTERM


def test_a_lock_of_another_user_is_not_taken(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "mine" / "one"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "lock").touch(mode=0o600)
    if os.geteuid() == 0:
        give_away(directory / "lock", monkeypatch)
        with pytest.raises(UsageError, match=f"user {STRANGER}") as caught:
            ClusterLock(tmp_path / "mine", "one").acquire(0)
        assert f"remove {directory / 'lock'}" == caught.value.hint
    (directory / "lock").unlink()
    lock = ClusterLock(tmp_path / "mine", "one")
    assert lock.acquire(0)
    lock.release(remove=True)


def test_a_segment_of_another_user_is_nobodys_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may say that it is ours; what is in it is not believed, and it is not there to be removed."""
    if os.geteuid() != 0:
        assert take_snapshot(cluster.segment_name).held
        monkeypatch.setattr("pdctl.transport.mapping.os.geteuid", lambda: os.getuid() + 1)
    else:
        os.chown(cluster.path, STRANGER, STRANGER)
        assert cluster.segment_name not in all_segments()
    for use in (take_snapshot, Segment.open):
        with pytest.raises(NotFoundError, match="belongs to user"):
            use(cluster.segment_name)
    if os.geteuid() == 0:
        os.chown(cluster.path, 0, 0)
    cluster.path.chmod(0o666)
    if os.geteuid() == 0:
        with pytest.raises(NotFoundError, match="0666"):
            take_snapshot(cluster.segment_name)
    cluster.path.chmod(0o600)


# --- the files themselves ----------------------------------------------------------------------------------


def test_a_private_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    write_private(file, "one")
    assert read_private(file) == "one" and file.stat().st_mode & 0o777 == 0o600

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_private(file, "two")
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]
    assert read_private(file) == "one"


def test_no_link_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "real" / "link").symlink_to("file")
    (tmp_path / "way").symlink_to("real")
    assert read_private(tmp_path / "real" / "file") == "x"
    for path in (tmp_path / "real" / "link", tmp_path / "way" / "file"):
        with pytest.raises(OSError):
            read_private(path)


def test_a_state_directory_that_is_a_link_is_called_one(tmp_path: Path) -> None:
    """Its own mode says that all may write it, which is true of every link."""
    (tmp_path / "link").symlink_to(tmp_path)
    ended = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path / "link")])
    assert isinstance(ended.exception, UsageError) and "is a symbolic link" in ended.exception.message


def test_untrusted_is_an_os_error_with_words(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    file.chmod(0o622)
    with pytest.raises(UntrustedError, match="0622"):
        os.close(open_file(file))


@pytest.mark.parametrize(("kind", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0xFE534D42, "SMB")])
def test_a_state_directory_that_other_machines_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, name: str
) -> None:
    """Before anything is read from it or starts; a local one is not."""
    private_files.check_local(tmp_path)
    monkeypatch.setattr(private_files, "file_system", lambda path: kind)
    ended = CliRunner().invoke(app, ["up", "--model", "/nowhere", "--state-dir", str(tmp_path / "s")])
    assert isinstance(ended.exception, UsageError)
    assert f"network file system ({name})" in ended.exception.message
    assert "PDCTL_STATE_DIR" in (ended.exception.hint or "")


def test_a_home_that_cannot_be_written_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDCTL_STATE_DIR", raising=False)
    home = tmp_path / "home"
    home.touch()  # nobody, not even root, can make a directory in it
    monkeypatch.setattr("pdctl.transport.names.home_dir", lambda: home)
    name = f"nobodys-{os.getpid()}"
    ended = CliRunner().invoke(app, ["up", "--model", "/nowhere", "--name", name])
    assert isinstance(ended.exception, UsageError) and str(home) in ended.exception.message
    assert "PDCTL_STATE_DIR" in (ended.exception.hint or "")
    for command in (["status"], ["generate", "x"]):
        assert isinstance(CliRunner().invoke(app, [*command, "--name", name]).exception, NotFoundError)
    assert CliRunner().invoke(app, ["down", "--name", name]).exit_code == 0


def test_locks_that_a_file_system_does_not_have_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> int:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(clusters, "_lock", without)
    with pytest.raises(UsageError, match="No locks available") as caught:
        ClusterLock(tmp_path, "one").acquire(0)
    assert "PDCTL_STATE_DIR" in (caught.value.hint or "")


def test_states_are_still_read(cluster: Cluster) -> None:
    cluster.run()
    assert json.loads((cluster.state_dir / cluster.name / "state.json").read_text())["name"] == cluster.name
    write_state(cluster.state())
    assert clusters.running(cluster.state_dir, cluster.name).name == cluster.name
    with pytest.raises(PdctlError):
        clusters.running(cluster.state_dir, "other")
