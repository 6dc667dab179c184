from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport.errors import CorruptSegmentError, NotFoundError
from pdctl.transport.layout import H, R
from pdctl.transport.lock import Op
from pdctl.transport.names import SegmentName
from pdctl.transport.recovery import verify
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, Segment, take_snapshot

Fork = Callable[[Callable[[Callable[[object], None]], None]], Any]


@pytest.fixture
def busy(shared: Segment, name: SegmentName, kit: ModuleType, fork: Fork) -> Any:
    """A process that keeps changing the segment, with short pauses."""

    def body(say: Callable[[object], None]) -> None:
        segment = Segment.open(name)
        router = kit.Member(segment, segment.attach(Role.ROUTER))
        segment = Segment.open(name)
        decode = kit.Member(segment, segment.attach(Role.DECODE))
        say((router.me.slot, decode.me.slot))
        for turn in range(1 << 30):
            prompt = [turn % 3, turn // 3 % 3] * (1 + turn % 4)
            claim = router.submit(prompt, len(prompt) + 5, local=30)
            decode.claim(claim.row)
            while decode.rows.state(claim.row) is RowState.DECODING:
                decode.decode(claim.row)
                if turn % 8 == 0:
                    time.sleep(0.0005)
            router.rows.recycle(claim.row, claim.generation)

    child = fork(body)
    child.slots = {int(slot) for slot in child.line()[1:-1].split(",")}
    return child


def test_an_untorn_snapshot_of_a_busy_segment_adds_up(busy: Any, name: SegmentName) -> None:
    sequences, untorn, deadline = set(), 0, time.monotonic() + 20
    while untorn < 200:
        assert time.monotonic() < deadline, "all snapshots are torn"
        snapshot = take_snapshot(name)
        assert snapshot.held == busy.slots
        if snapshot.torn:
            continue
        untorn += 1
        segment = snapshot.segment
        assert segment.words[H.SEQUENCE] % 2 == 0
        assert verify(segment) == []
        sequences.add(segment.words[H.SEQUENCE])
        for row in segment.rows.in_state(RowState.DECODING):
            assert segment.rows.count_tokens(row) >= segment.rows.get(row, R.NUM_TOKENS)
    assert len(sequences) > 20, "nothing happened meanwhile"


def test_a_snapshot_stands_still(shared: Segment, name: SegmentName, kit: ModuleType) -> None:
    router = kit.Member(shared, shared.attach(Role.ROUTER))
    snapshot = take_snapshot(name)
    claim = router.submit([1, 2, 0], 9)
    assert snapshot.segment.rows.state(claim.row) is RowState.FREE
    with pytest.raises(TypeError):
        snapshot.segment.rows.put(claim.row, R.CANCEL, 1)
    with pytest.raises((TypeError, ValueError, OSError)), snapshot.segment.lock.section(Op.CLOSE):
        pass
    assert take_snapshot(name).segment.rows.state(claim.row) is RowState.QUEUED


def test_a_section_under_way_is_called_torn(shared: Segment, name: SegmentName) -> None:
    with shared.lock.section(Op.GROW) as section:
        section.set(H.FREE_COUNT, 3)
        snapshot = take_snapshot(name)
        assert snapshot.torn
        assert "under way" in verify(snapshot.segment)[0]
    assert not (again := take_snapshot(name)).torn
    assert verify(again.segment) != []


def test_sections_that_run_during_every_copy_are_called_torn(
    shared: Segment, name: SegmentName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the sequence is even whenever the viewer looks."""
    from pdctl.transport import segment as segment_module

    real = segment_module._mapping.open_segment

    class Restless:
        def __init__(self, words: memoryview) -> None:
            self.words = words

        def __getitem__(self, key: int | slice) -> Any:
            found = self.words[key]
            if isinstance(key, slice):
                with shared.lock.section(Op.GROW):
                    pass
            return found

    def open_restless(*args: Any, **more: Any) -> Any:
        mapping, geometry = real(*args, **more)
        mapping.words = Restless(mapping.words)
        return mapping, geometry

    monkeypatch.setattr(segment_module._mapping, "open_segment", open_restless)
    monkeypatch.setattr(segment_module, "_SNAPSHOT_TRIES", 5)
    assert take_snapshot(name).torn
    assert shared.words[H.LOCK_SECTIONS] == 5


def test_a_viewer_takes_nothing(shared: Segment, name: SegmentName) -> None:
    """Neither the lock nor a guard byte, nor a single store."""
    me = shared.attach(Role.DECODE)
    with shared.lock.section(Op.GROW):
        before = bytes(shared.words)
        snapshot = take_snapshot(name)
        assert bytes(shared.words) == before
    assert snapshot.held == {me.slot}
    with shared.lock.section(Op.GROW, deadline_s=0):
        pass


def test_a_snapshot_does_not_keep_the_segment_mapped(shared: Segment, name: SegmentName) -> None:
    before = Path("/proc/self/maps").read_text().count(str(name))
    snapshots = [take_snapshot(name) for _ in range(3)]
    assert Path("/proc/self/maps").read_text().count(str(name)) == before
    assert len(snapshots) == 3


def test_a_copied_file_can_be_read_after_the_fact(
    shared: Segment, name: SegmentName, kit: ModuleType, tmp_path: Path
) -> None:
    router = kit.Member(shared, shared.attach(Role.ROUTER))
    claim = router.submit([1, 2, 0], 9)
    path = tmp_path / "post mortem"
    shutil.copy(name.path, path)
    path.chmod(0o400)
    name.path.unlink()
    snapshot = take_snapshot(path)
    assert snapshot.held == frozenset()
    assert not snapshot.torn
    assert verify(snapshot.segment) == []
    assert snapshot.segment.rows.tokens(claim.row, 0, 3) == [1, 2, 0]
    assert snapshot.segment.slots(Role.ROUTER) == [router.me.slot]
    with pytest.raises(NotFoundError):
        take_snapshot(name)


def test_a_copy_of_a_segment_whose_process_died_in_a_section_says_so(
    shared: Segment, name: SegmentName, tmp_path: Path
) -> None:
    with pytest.raises(ValueError), shared.lock.section(Op.PUBLISH) as section:
        section.add(H.FREE_COUNT, -1)
        raise ValueError
    path = tmp_path / "copy"
    shutil.copy(name.path, path)
    snapshot = take_snapshot(path)
    assert snapshot.torn
    assert f"operation {Op.PUBLISH.value}" in verify(snapshot.segment)[0]


def test_another_pid_namespace_and_a_closed_segment_may_be_looked_at(shared: Segment, name: SegmentName) -> None:
    shared.words[H.PID_NAMESPACE] += 1
    shared.mark_closed()
    assert take_snapshot(name).segment.is_closed()


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(bytes(10_000))
    with pytest.raises(CorruptSegmentError, match="not a pdctl segment"):
        take_snapshot(path)
