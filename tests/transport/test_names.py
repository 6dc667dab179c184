from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.transport import names
from pdctl.transport.errors import UsageError
from pdctl.transport.names import (
    MAX_SOCKET_PATH_BYTES,
    SegmentName,
    bell_path,
    check_cluster,
    check_socket_room,
    cluster_dir,
    default_state_dir,
    log_dir,
    new_segment_name,
    parse_segment_name,
    segments_of,
)

GOOD = ["a", "0", "default", "a-b", "a_b", "x" * 32, "9lives", "a--b"]
BAD = ["", "A", "logs", "../x", "a/b", ".", "..", "-a", "a-", "_a", "a_", "x" * 33, "a b", "a\n", "ä", "a\0", "١"]


@pytest.mark.parametrize("name", GOOD)
def test_good_cluster_names_become_file_names_and_back(name: str) -> None:
    assert check_cluster(name) == name
    built = new_segment_name(name)
    assert built.uid == os.getuid()
    assert str(built.path.parent) == "/dev/shm"
    assert parse_segment_name(built.path.name) == built


@pytest.mark.parametrize("name", BAD)
def test_bad_cluster_names_are_refused_everywhere(name: str) -> None:
    for use in (
        check_cluster,
        new_segment_name,
        lambda n: cluster_dir(Path("/s"), n),
        lambda n: log_dir(Path("/s"), n),
    ):
        with pytest.raises(UsageError, match=re.escape(repr(name))) as caught:
            use(name)
        assert caught.value.exit_code == 2
        assert caught.value.hint


def test_two_names_of_a_cluster_differ() -> None:
    assert new_segment_name("a") != new_segment_name("a")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pdctl",
        "pdctl-0-a",
        "pdctl-0-a-0123456789a",
        "pdctl-0-a-0123456789abc",
        "pdctl-0-a-0123456789AB",
        "pdctl--a-0123456789ab",
        "pdctl-x-a-0123456789ab",
        "pdctl-0--0123456789ab",
        "pdctl-0-A-0123456789ab",
        f"pdctl-0-{'x' * 33}-0123456789ab",
        "pdctl-00-a-0123456789ab",
        "pdctl-١-a-0123456789ab",
        "pdctl-0-a-0123456789ab\n",
        "pdctl-0-../x-0123456789ab",
        "xpdctl-0-a-0123456789ab",
        "sem.mp-abc",
    ],
)
def test_foreign_file_names_are_not_ours(text: str) -> None:
    assert parse_segment_name(text) is None


@given(st.text(alphabet="pdctl0129-_ab", max_size=40).map(lambda tail: "pdctl-" + tail))
def test_what_parses_is_built_back_to_the_same_file(text: str) -> None:
    """Otherwise a clean-up would unlink another name than the one it found."""
    if (found := parse_segment_name(text)) is not None:
        assert str(found) == text


def test_segments_of_finds_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SHM_DIR", tmp_path)
    for text in (
        "pdctl-5-a-000000000001",
        "pdctl-5-a-000000000002",
        "pdctl-5-b-000000000003",
        "pdctl-6-a-000000000004",
        "pdctl-5-a-b-000000000005",
        "other",
    ):
        (tmp_path / text).touch()
    assert sorted(str(found) for found in segments_of("a", uid=5)) == [
        "pdctl-5-a-000000000001",
        "pdctl-5-a-000000000002",
    ]
    assert segments_of("a-b", uid=5) == [SegmentName(uid=5, cluster="a-b", nonce="000000000005")]
    assert segments_of("none", uid=5) == []


def test_state_dir_flag_then_runtime_dir_then_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCTL_STATE_DIR", "/given")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    assert default_state_dir() == Path("/given")
    monkeypatch.setenv("PDCTL_STATE_DIR", "")
    assert default_state_dir() == Path("/run/user/5/pdctl")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_state_dir() == Path(f"/tmp/pdctl-{os.getuid()}")


def test_sockets_that_do_not_fit_are_refused_with_the_numbers() -> None:
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(bell_path(cluster_dir(Path("/"), "a"), 999)))
    check_socket_room(Path("/" + "d" * (room - 1)), "a")
    with pytest.raises(UsageError) as caught:
        check_socket_room(Path("/" + "d" * room), "a")
    assert "108 bytes" in caught.value.message
    assert "107" in caught.value.message
    assert "--state-dir" in (caught.value.hint or "")


def test_socket_room_counts_bytes_not_characters() -> None:
    with pytest.raises(UsageError):
        check_socket_room(Path("/" + "é" * 50), "a")
