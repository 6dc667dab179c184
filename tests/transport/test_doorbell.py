from __future__ import annotations

import select
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.transport import doorbell
from pdctl.transport.doorbell import Bell
from pdctl.transport.names import bell_path

FAR_AWAY_S = 30.0


@pytest.fixture(params=["short", "longer than a socket's address"])
def bells(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Bell, Bell]]:
    directory = tmp_path if request.param == "short" else tmp_path / ("d" * 150)
    directory.mkdir(exist_ok=True)
    made = (Bell(directory, 0), Bell(directory, 1))
    yield made
    for bell in made:
        bell.close()


def test_a_ring_is_heard_by_the_one_rung_alone(bells: tuple[Bell, Bell]) -> None:
    one, two = bells
    one.ring(1)
    assert one.drain() is False
    assert two.drain() is True
    assert two.drain() is False


def test_many_rings_are_one(bells: tuple[Bell, Bell]) -> None:
    for _ in range(5):
        bells[0].ring(1)
    assert bells[1].wait(FAR_AWAY_S) is True
    assert bells[1].wait(0) is False


def test_waiting_ends_without_a_ring(bells: tuple[Bell, Bell]) -> None:
    assert bells[0].wait(0.01) is False


def test_a_ring_during_the_scan_is_kept_for_the_next_wait(bells: tuple[Bell, Bell]) -> None:
    one, two = bells
    one.ring(1)
    assert two.wait(FAR_AWAY_S)
    one.ring(1)
    assert two.wait(FAR_AWAY_S)


def test_a_sleeper_is_woken(bells: tuple[Bell, Bell]) -> None:
    heard: list[bool] = []
    sleeper = threading.Thread(target=lambda: heard.append(bells[1].wait(FAR_AWAY_S)))
    sleeper.start()
    bells[0].ring(1)
    sleeper.join(FAR_AWAY_S)
    assert heard == [True]


def test_a_full_queue_neither_blocks_nor_raises(bells: tuple[Bell, Bell]) -> None:
    for _ in range(10_000):
        bells[0].ring(1)
    assert bells[1].drain() is True
    assert bells[1].drain() is False
    bells[0].ring(1)
    assert bells[1].drain() is True


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(data=st.one_of(st.binary(max_size=64), st.integers(0, 100_000).map(bytes)))
def test_what_is_in_a_ring_does_not_matter(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bell = Bell(Path(directory), 0)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stranger.sendto(data, str(bell_path(Path(directory), 0)))
        assert bell.wait(FAR_AWAY_S) is True
        assert bell.drain() is False
        stranger.close()
        bell.close()


def test_whoever_rings_without_end_keeps_nobody_from_scanning(
    bells: tuple[Bell, Bell], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        def recv(self, _: int) -> bytes:
            return b""

    monkeypatch.setattr(bells[0], "_socket", Endless())
    assert bells[0].drain() is True
    monkeypatch.undo()


def test_a_missing_dead_or_foreign_peer_neither_blocks_nor_raises(tmp_path: Path) -> None:
    bell = Bell(tmp_path, 0)
    bell.ring(7)
    other = Bell(tmp_path, 1)
    other._socket.close()
    bell.ring(1)
    bell_path(tmp_path, 2).write_text("a file, not a socket")
    bell.ring(2)
    bell.ring(10**200)
    bell.close()
    bell.ring(0)
    assert bell.drain() is False


def test_a_restarted_participant_takes_over_the_path_of_the_dead(tmp_path: Path) -> None:
    dead = Bell(tmp_path, 1)
    dead._socket.close()
    assert bell_path(tmp_path, 1).exists()
    new, ringer = Bell(tmp_path, 1), Bell(tmp_path, 0)
    ringer.ring(1)
    assert new.wait(FAR_AWAY_S)
    for bell in (new, ringer):
        bell.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_two_places_has_one_bell(tmp_path: Path) -> None:
    one, two = Bell(tmp_path, 0), Bell(tmp_path, 1, 2)
    for slot in (1, 2):
        one.ring(slot)
        assert two.wait(FAR_AWAY_S)
        assert not two.drain()
        assert stat.S_IMODE(bell_path(tmp_path, slot).stat().st_mode) == 0o600
    # One that was killed left both names; its successor has them, in whichever order.
    new = Bell(tmp_path, 2, 1)
    for slot in (1, 2):
        one.ring(slot)
        assert new.wait(FAR_AWAY_S)
    assert not two.drain()
    for bell in (one, two, new):
        bell.close()
    assert list(tmp_path.iterdir()) == []


def test_only_we_may_ring(bells: tuple[Bell, Bell], tmp_path: Path) -> None:
    found = [path for path in tmp_path.rglob("bell-*") if path.is_socket()]
    assert len(found) == 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)


def test_a_bell_can_be_watched_with_other_descriptors(bells: tuple[Bell, Bell]) -> None:
    poll = select.poll()
    poll.register(bells[1].fileno(), select.POLLIN)
    assert poll.poll(0) == []
    bells[0].ring(1)
    assert poll.poll(FAR_AWAY_S * 1000) == [(bells[1].fileno(), select.POLLIN)]


@pytest.mark.parametrize("gone", ["file", "other file", "directory", "link of another place"])
def test_a_bell_whose_name_is_gone_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    monkeypatch.setattr(doorbell, "_KEEP_S", 0.0)
    directory = tmp_path / "run"
    directory.mkdir()
    one, two = Bell(directory, 0), Bell(directory, 1, 2)
    before = two.fileno()
    assert not two.keep()
    if gone == "directory":
        shutil.rmtree(directory)
        assert not two.keep()
        assert two.fault is not None
        assert str(directory) in two.fault
        directory.mkdir()
    elif gone == "link of another place":
        bell_path(directory, 2).unlink()
    else:
        bell_path(directory, 1).unlink()
    if gone == "other file":
        bell_path(directory, 1).write_text("")
    one.ring(1)
    two.drain()
    assert two.keep()
    assert (two.fault, two.fileno() != before) == (None, True)
    assert not two.keep()
    for slot in (1, 2):
        one.ring(slot)
        assert two.wait(FAR_AWAY_S)
    assert stat.S_IMODE(bell_path(directory, 1).stat().st_mode) == 0o600
    one.close()
    two.close()
    assert list(directory.iterdir()) == []


def test_a_bell_without_a_directory_rings_others_and_removes_nobody_elses(tmp_path: Path) -> None:
    nowhere = Bell(tmp_path / "none", 0)
    assert nowhere.fault is not None
    nowhere.ring(1)
    assert nowhere.wait(0) is False
    nowhere.close()
    mine, theirs = Bell(tmp_path, 0), Bell(tmp_path, 0)
    mine.close()
    other = Bell(tmp_path, 1)
    other.ring(0)
    assert theirs.wait(FAR_AWAY_S)
    theirs.close()
    other.close()


def test_looking_after_a_bell_costs_nothing_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "_KEEP_S", 1e9)
    bell = Bell(tmp_path, 0)
    bell.keep()
    bell_path(tmp_path, 0).unlink()
    assert not any(bell.keep() for _ in range(1000))
    bell.close()
