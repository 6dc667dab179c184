"""What a cluster shows on disk is made again when it vanishes, and left alone when it is another's."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdctl.core import cluster as clusters
from pdctl.core.cluster import ClusterLock, ClusterState, read_state
from pdctl.core.config import ClusterSpec, check_scale
from pdctl.core.control import ControlServer
from pdctl.core.faults import Faults
from pdctl.core.private_files import write_private
from pdctl.core.upkeep import Upkeep
from pdctl.transport.errors import CapacityError
from pdctl.transport.names import control_path
from pdctl.transport.segment import process_start_time

OTHER = """
import sys, time
from pathlib import Path
from pdctl.core.cluster import ClusterLock
lock = ClusterLock(Path(sys.argv[1]), "one")
assert lock.acquire(0)
if sys.argv[2] == "signed":
    lock.sign()
print(flush=True)
time.sleep(600)
"""


class Shown:
    """The files of a cluster that runs in this process."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.directory = state_dir / "one"
        spec = ClusterSpec(
            name="one",
            state_dir=state_dir,
            model_path=state_dir,
            model_name="tiny",
            fingerprint=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=16,
            eos_token_ids=(2,),
        )
        self.state = ClusterState(
            name="one",
            phase="running",
            supervisor_pid=os.getpid(),
            supervisor_start_time=process_start_time(os.getpid()) or 0,
            segment="pdctl-0-one-0123456789ab",
            url="http://127.0.0.1:8000",
            started_unix_ns=9,
            spec=spec,
        )
        self.lock = ClusterLock(state_dir, "one")
        assert self.lock.acquire(0)
        self.lock.sign()
        self.selector = selectors.DefaultSelector()
        self.control = ControlServer(control_path(self.directory), self.selector, lambda *_: None)
        self.upkeep = Upkeep(self.state, self.lock)
        self.upkeep.begin()
        assert self.look()

    def look(self) -> bool:
        return self.upkeep.look(self.control)

    @property
    def stats(self) -> dict[str, os.stat_result]:
        return {path.name: path.lstat() for path in self.directory.iterdir()}

    def assert_whole(self) -> None:
        read = read_state(self.state_dir, "one")
        assert read is not None
        assert replace(read, warnings={}) == self.upkeep.state
        assert ClusterSpec.from_json((self.directory / "spec.json").read_text()) == self.state.spec
        assert clusters.is_locked(self.state_dir, "one")
        supervisor = clusters.find_supervisor(self.state_dir, "one")
        assert supervisor is not None
        assert supervisor.pid == os.getpid()
        supervisor.close()
        assert self.stats.keys() == {"lock", "state.json", "spec.json", "control"}
        assert all(found.st_mode & 0o077 == 0 for found in [*self.stats.values(), self.directory.stat()])
        assert (self.state_dir / "logs" / "one").is_dir()

    def close(self) -> None:
        self.control.close()
        self.selector.close()
        self.lock.release(remove=True)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path / "state")
    yield made
    made.close()


def _remove(shown: Shown, name: str) -> None:
    path = shown.directory / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


FILES = ("lock", "state.json", "spec.json", "control")
DAMAGES: dict[str, Callable[[Shown], object]] = {
    **{name: lambda shown, name=name: _remove(shown, name) for name in FILES},  # type: ignore[misc]
    "all of them": lambda shown: [_remove(shown, name) for name in FILES],
    "directory": lambda shown: shutil.rmtree(shown.directory),
    "state directory": lambda shown: shutil.rmtree(shown.state_dir),
    "logs": lambda shown: shutil.rmtree(shown.state_dir / "logs"),
    "emptied": lambda shown: [os.truncate(shown.directory / name, 0) for name in FILES[:3]],
    "other files": lambda shown: [(_remove(shown, name), (shown.directory / name).write_text("x")) for name in FILES],
    "links": lambda shown: [
        (_remove(shown, name), (shown.directory / name).symlink_to("/dev/null")) for name in FILES[1:]
    ],
    "open to all": lambda shown: [path.chmod(0o666) for path in shown.directory.iterdir()],
    "directory open to all": lambda shown: shown.directory.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_vanished_is_made_again(shown: Shown, damage: str) -> None:
    shown.assert_whole()
    DAMAGES[damage](shown)
    assert shown.look()
    shown.assert_whole()


def test_looking_writes_nothing_while_all_is_well(shown: Shown) -> None:
    before = shown.stats
    for _ in range(3):
        assert shown.look()
    assert {name: found.st_mtime_ns for name, found in shown.stats.items()} == {
        name: found.st_mtime_ns for name, found in before.items()
    }
    assert {name: found.st_ino for name, found in shown.stats.items()} == {
        name: found.st_ino for name, found in before.items()
    }


def test_what_cannot_be_made_again_is_a_warning_and_is_tried_again(shown: Shown) -> None:
    """Each of them in the way of the next: nothing raises, and as soon as it can be, all is there."""
    for name in ("state.json", "control"):
        _remove(shown, name)
        (shown.directory / name).mkdir()
        (shown.directory / name / "x").write_text("")
    assert shown.look()
    _remove(shown, "state.json")
    assert shown.look()
    read = read_state(shown.state_dir, "one")
    assert read is not None
    assert list(read.warnings) == ["control socket"]
    assert "tried again every second" in read.warnings["control socket"]
    _remove(shown, "control")
    assert shown.look()
    shown.assert_whole()
    read = read_state(shown.state_dir, "one")
    assert read is not None
    assert read.warnings == {}
    shutil.rmtree(shown.state_dir)
    shown.state_dir.write_text("in the way")
    for _ in range(2):
        assert shown.look()
        shown.upkeep.show(replace(shown.state, phase="stopping"))
    shown.state_dir.unlink()
    assert shown.look()
    shown.assert_whole()


@pytest.mark.parametrize(("signed", "ours"), [("signed", False), ("unsigned", True)])
def test_whoever_has_been_faster_keeps_the_name(shown: Shown, signed: str, ours: bool) -> None:
    """A supervisor signs its lock; a command that tidies does not, and lets go soon."""
    shutil.rmtree(shown.directory)
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(shown.state_dir), signed], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        (shown.directory / "control").write_text("theirs")
        before = shown.stats
        assert shown.look() is ours
        shown.upkeep.show(replace(shown.state, phase="stopping"))
        shown.control.close()
        shown.lock.release(remove=True) if not ours else None
        assert {name: found.st_ino for name, found in shown.stats.items()} == {
            name: found.st_ino for name, found in before.items()
        }
        assert (shown.directory / "control").read_text() == "theirs"
    finally:
        other.kill()
        other.communicate()
    if ours:
        shown.control = ControlServer(control_path(shown.directory), shown.selector, lambda *_: None)
        assert shown.look()


def test_a_private_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    target.mkdir()
    with pytest.raises(OSError):
        write_private(target, "x")
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "spec.json", "\udc80")
    assert list(tmp_path.iterdir()) == [target]


def test_daemons_beyond_the_rows_are_refused_with_the_numbers(shown: Shown) -> None:
    spec = replace(shown.state.spec, num_decode=2, max_batch=32, max_rows=144)
    check_scale(spec, 16, 4, hint="up")
    check_scale(replace(spec, num_decode=9), 1, 8, hint="up")  # fewer than there are
    with pytest.raises(CapacityError, match=r"161 requests .* made for 144: at most decode=4 beside prefill=1"):
        check_scale(spec, 1, 5, hint="up")


def test_an_error_that_persists_slows_the_loop_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    assert (faults.pause_s(), faults.warning()) == (0.0, None)
    pauses = []
    for _ in range(20):
        faults.note("an event", ValueError("odd"))
        pauses.append(faults.pause_s())
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.1 < pauses[-1] == 1.0
    assert faults.pause_s() == 0.0
    assert len(caplog.records) == 1
    assert "an event: ValueError: odd" in caplog.text
    assert "the supervisor had 20 unexpected errors, the last: an event: ValueError: odd" in (faults.warning() or "")
