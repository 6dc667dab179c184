"""Whatever stands in a segment's file: an error that has a name or problems that are listed; never more."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.transport import mapping
from pdctl.transport.errors import CapacityError, CorruptSegmentError, IncompatibleError, NotFoundError, PdctlError
from pdctl.transport.layout import HEADER_WORDS, LAYOUT_VERSION, NUM_GEOMETRY_WORDS, WORD, B, H, Layout, R
from pdctl.transport.lock import Op
from pdctl.transport.recovery import verify
from pdctl.transport.segment import Segment, take_snapshot

Cluster = Any
bounded = settings(
    max_examples=35, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
words = st.one_of(
    st.sampled_from(
        [0, 1, 2, 3, 31, 32, 33, 64, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, (1 << 64) - 1]
    ),
    st.integers(0, (1 << 64) - 1),
)


class Copy:
    """A copy of a segment with something of everything in it, to be spoilt over and over."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        shutil.copy(cluster.path, path)
        self.path = path
        self.layout = Layout(cluster.geometry)
        self._whole = path.read_bytes()

    def spoil(self, changes: dict[int, int]) -> None:
        """Write words over a fresh copy."""
        with self.path.open("r+b") as file:
            file.truncate(len(self._whole))
            file.write(self._whole[: self.layout.meta_words * WORD])
            for address, value in changes.items():
                os.pwrite(file.fileno(), value.to_bytes(WORD, "little"), address * WORD)

    def inspect(self, *arguments: str) -> Any:
        ended = CliRunner().invoke(app, ["inspect", "shm", "--file", str(self.path), *arguments])
        if ended.exception is not None and not isinstance(ended.exception, PdctlError | SystemExit):
            raise AssertionError(repr(ended.exception)) from ended.exception
        return ended

    def use(self) -> None:
        """All that anybody does with a segment that was found."""
        json_view = self.inspect("--verify", "--json")
        if json_view.exit_code in (0, CorruptSegmentError.exit_code) and json_view.stdout:
            json.loads(json_view.stdout)
        self.inspect("--verify")
        self.inspect()
        try:
            segment = Segment.open(self.path)
        except PdctlError:
            return
        try:
            with segment.lock.section(Op.CLOSE):
                pass
        except CorruptSegmentError:
            pass
        finally:
            segment.close()


@pytest.fixture
def spoilt(cluster: Cluster, tmp_path: Path) -> Iterator[Copy]:
    yield Copy(cluster, tmp_path / "copy")


@bounded
@given(data=st.data())
def test_any_words_anywhere(spoilt: Copy, data: st.DataObject) -> None:
    layout, last = spoilt.layout, spoilt.layout.meta_words - 1
    near = st.one_of(
        st.integers(0, HEADER_WORDS - 1),
        st.sampled_from([int(name) for name in H]),
        st.builds(lambda row, name: layout.row(row) + int(name), st.integers(0, 11), st.sampled_from(R)),
        st.builds(lambda block, name: layout.block(block) + int(name), st.integers(0, 31), st.sampled_from(B)),
        st.integers(layout.participants, layout.rows - 1),
        st.integers(layout.buckets, layout.journal + 40),
        st.integers(0, last),
    )
    spoilt.spoil(data.draw(st.dictionaries(near, words, min_size=1, max_size=8)))
    spoilt.use()


@bounded
@given(size=st.one_of(st.integers(0, 5000), st.integers(0, 1 << 22)))
def test_any_length(spoilt: Copy, size: int) -> None:
    spoilt.spoil({})
    os.truncate(spoilt.path, min(size, spoilt.path.stat().st_size - 1))
    with pytest.raises(CorruptSegmentError):
        take_snapshot(spoilt.path)
    spoilt.use()


@bounded
@given(field=st.integers(0, NUM_GEOMETRY_WORDS - 1), value=words, version=st.sampled_from([0, 1, LAYOUT_VERSION, 99]))
def test_any_geometry(spoilt: Copy, field: int, value: int, version: int) -> None:
    spoilt.spoil({H.GEOMETRY + field: value, H.VERSION: version})
    if version != LAYOUT_VERSION:
        with pytest.raises(IncompatibleError, match=f"layout version {version} found, {LAYOUT_VERSION} expected"):
            take_snapshot(spoilt.path)
    spoilt.use()


@bounded
@given(content=st.binary(max_size=300), size=st.sampled_from([0, 4096, 1 << 20]))
def test_any_file(spoilt: Copy, content: bytes, size: int) -> None:
    spoilt.path.write_bytes(content.ljust(size, b"\0"))
    with pytest.raises((CorruptSegmentError, IncompatibleError)):
        take_snapshot(spoilt.path)
    spoilt.use()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_rows", 1 << 60), ("max_participants", 1 << 20), ("ring_events", 1 << 40), ("num_blocks", 0)],
)
def test_a_header_that_claims_too_much_is_refused_by_field(spoilt: Copy, field: str, value: int) -> None:
    names = list(spoilt.layout.geometry.__dataclass_fields__)
    spoilt.spoil({H.GEOMETRY + names.index(field): value})
    with pytest.raises(CorruptSegmentError, match=f"{field} {value}, expected 1 to"):
        take_snapshot(spoilt.path)


def test_a_hole_as_large_as_its_header_says_is_not_copied(
    spoilt: Copy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may claim any size without having it."""
    monkeypatch.setattr(mapping, "memory_available", lambda: 3 * spoilt.layout.meta_words * WORD - 1)
    with pytest.raises(CapacityError, match=str(spoilt.path)):
        take_snapshot(spoilt.path)
    monkeypatch.setattr(mapping, "memory_available", lambda: 3 * spoilt.layout.meta_words * WORD)
    assert verify(take_snapshot(spoilt.path).segment) == []


def test_an_index_that_names_the_same_blocks_over_and_over_is_not_walked_for_ever(spoilt: Copy) -> None:
    g = spoilt.layout.geometry
    buckets = range(spoilt.layout.buckets, spoilt.layout.buckets + g.num_buckets)
    links = {spoilt.layout.block(block) + B.BUCKET_NEXT: block + 2 for block in range(g.num_blocks - 1)}
    spoilt.spoil({**dict.fromkeys(buckets, 1), **links})
    assert verify(take_snapshot(spoilt.path).segment) == [
        f"unreadable: the prefix index links more than {g.num_blocks} blocks"
    ]


def test_a_row_that_claims_all_blocks_there_are(spoilt: Copy, cluster: Cluster) -> None:
    row = cluster.rows["ready"]
    spoilt.spoil({spoilt.layout.row(row) + R.NUM_BLOCKS: 1 << 60})
    problems = verify(take_snapshot(spoilt.path).segment)
    assert f"row {row}: {1 << 60} blocks, at most {spoilt.layout.geometry.blocks_per_row} are possible" in problems
    assert len(problems) < 100


@pytest.mark.parametrize("kind", ["directory", "fifo", "missing", "link", "empty"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(path)
    elif kind == "empty":
        path.touch()
    with pytest.raises((NotFoundError, CorruptSegmentError), match=str(path)):
        take_snapshot(path)
