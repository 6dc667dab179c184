"""A segment whose name is gone, or stands for another file: reached by descriptor, and nobody's file is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport.errors import IncompatibleError, NotFoundError
from pdctl.transport.layout import DType, H
from pdctl.transport.mapping import descriptor_of, is_somebody_elses, leads_to, unlink_if_orphaned
from pdctl.transport.names import SegmentName
from pdctl.transport.rows import RowParams, RowState
from pdctl.transport.segment import Expected, Role, Segment, open_to_look, take_snapshot

Fork = Callable[[Callable[[Callable[[object], None]], None]], Any]
HOLDERS = {
    "open": "fd = os.open(path, os.O_RDWR)",
    "mapped": "memory = mmap.mmap(os.open(path, os.O_RDWR), 0); os.closerange(3, 64)",
    "locked": "file = open(path, 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX)",
}


@pytest.fixture
def door(shared: Segment) -> Iterator[int]:
    fd = shared.mapping.door()
    yield fd
    os.close(fd)


def test_a_segment_without_a_name_is_attached_by_descriptor(
    shared: Segment, name: SegmentName, door: int, fork: Fork
) -> None:
    router = shared.attach(Role.ROUTER)
    name.path.unlink()
    with pytest.raises(NotFoundError):
        Segment.open(name)

    def body(say: Callable[[object], None]) -> None:
        os.set_inheritable(door, True)
        segment = Segment.open(door)
        me = segment.attach(Role.PREFILL)
        say(me.slot)
        [row] = segment.rows.in_state(RowState.QUEUED)
        claim = segment.rows.claim(me, row, alone=True)
        say(claim is not None)
        while True:
            os.read(stay[0], 1)

    stay = os.pipe()
    submitted = shared.rows.submit(
        router, request_id="a", tokens=[1, 2, 0], limit_tokens=8, params=RowParams(), local_prefill_tokens=0
    )
    assert submitted is not None
    child = fork(body)
    assert child.line() == "1"
    assert child.line() == "True"
    assert shared.rows.state(submitted.row) is RowState.PREFILLING
    # Its locks are its own: they say that it lives, and end with it.
    assert shared.mapping.byte_is_held(2)
    snapshot = take_snapshot(door)
    assert snapshot.held == {0, 1}
    child.kill()
    assert not shared.mapping.byte_is_held(2)


def test_a_descriptor_keeps_no_lock_of_its_maker(shared: Segment, name: SegmentName) -> None:
    """Whoever inherits it must not look like the supervisor, once that is dead."""
    me = shared.attach(Role.SUPERVISOR)
    door = shared.mapping.door()
    try:
        assert take_snapshot(door).held == {me.slot}
        shared.close()
        assert take_snapshot(door).held == set()
        with pytest.raises(OSError):
            os.read(door, 1)
    finally:
        os.close(door)


def test_by_descriptor_the_same_is_checked(shared: Segment, name: SegmentName, door: int) -> None:
    name.path.unlink()
    g = shared.geometry
    expected = Expected(
        fingerprint=8,
        numerics_id=9,
        dtype=DType.FLOAT32,
        block_tokens=g.block_tokens,
        num_layers=g.num_layers,
        num_kv_heads=g.num_kv_heads,
        head_dim=g.head_dim,
    )
    with pytest.raises(IncompatibleError, match="fingerprint is 0000000000000007"):
        Segment.open(door, expected=expected)
    shared.mark_closed()
    with pytest.raises(NotFoundError, match="closed"):
        Segment.open(door)


def test_a_viewer_finds_it_at_a_process_that_has_it(shared: Segment, name: SegmentName, tmp_path: Path) -> None:
    for gone in (False, True):
        if gone:
            name.path.unlink()
        found = descriptor_of(os.getpid(), name)
        assert found is not None
        try:
            assert leads_to(name, found) is not gone
            looked = open_to_look(found)
            assert looked.words[H.FINGERPRINT] == 7
            looked.close()
        finally:
            os.close(found)
    name.path.write_text("another")
    assert not leads_to(name, shared.mapping.fd)
    name.path.unlink()
    assert descriptor_of(1 << 22, name) is None
    assert descriptor_of(os.getpid(), SegmentName(uid=name.uid, cluster=name.cluster, nonce="0" * 12)) is None


def test_its_maker_removes_only_what_it_made(shared: Segment, name: SegmentName, kit: ModuleType) -> None:
    made = os.fstat(shared.mapping.fd)
    name.path.unlink()
    assert unlink_if_orphaned(name, made=made) is True
    other = Segment.create(name, kit.geometry(), fingerprint=1234, numerics_id=0)
    other.close()
    assert unlink_if_orphaned(name, made=made) is True
    assert name.path.exists()
    name.path.unlink()
    for make in (lambda: name.path.mkdir(), lambda: name.path.symlink_to("/dev/shm/none")):
        make()
        assert unlink_if_orphaned(name, made=made) is True
        assert unlink_if_orphaned(name) is False
        assert is_somebody_elses(name)
        name.path.rmdir() if name.path.is_dir() else name.path.unlink()


@pytest.mark.parametrize("how", HOLDERS)
def test_a_file_that_only_has_the_name_is_left_to_who_has_it(name: SegmentName, how: str) -> None:
    name.path.write_bytes(b"somebody's work" * 1000)
    script = f"import fcntl, mmap, os\npath = '{name.path}'\n{HOLDERS[how]}\nprint(flush=True)\ninput()"
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        assert is_somebody_elses(name)
        assert unlink_if_orphaned(name) is False
        assert name.path.exists()
    finally:
        holder.kill()
        holder.communicate()
    # Without a living process it is what a start that was killed left behind.
    assert not is_somebody_elses(name)
    assert unlink_if_orphaned(name) is True
    assert not name.path.exists()
