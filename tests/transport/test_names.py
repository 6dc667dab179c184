from __future__ import annotations

import os
import pwd
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.transport import names
from pdctl.transport.errors import UsageError
from pdctl.transport.names import (
    MAX_SOCKET_PATH_BYTES,
    SegmentName,
    all_segments,
    check_cluster,
    cluster_dir,
    default_state_dir,
    log_dir,
    new_segment_name,
    parse_segment_name,
    segments_of,
    socket_address,
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
    me = os.getuid()
    for text in (
        f"pdctl-{me}-a-000000000001",
        f"pdctl-{me}-a-000000000002",
        f"pdctl-{me}-b-000000000003",
        f"pdctl-{me + 1}-a-000000000004",
        f"pdctl-{me}-a-b-000000000005",
        "other",
    ):
        (tmp_path / text).touch()
    assert sorted(str(found) for found in segments_of("a")) == [
        f"pdctl-{me}-a-000000000001",
        f"pdctl-{me}-a-000000000002",
    ]
    assert segments_of("a-b") == [SegmentName(uid=me, cluster="a-b", nonce="000000000005")]
    assert segments_of("none") == []


def test_a_segments_name_does_not_make_it_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm is open to all: anybody may make a file that is named after another user, and only its owner tells."""
    monkeypatch.setattr(names, "SHM_DIR", tmp_path)
    (tmp_path / f"pdctl-{os.getuid()}-a-000000000001").touch()
    (tmp_path / f"pdctl-{os.getuid() + 1}-a-000000000002").touch()
    assert [str(one) for one in all_segments()] == [f"pdctl-{os.getuid()}-a-000000000001"]
    assert all_segments(os.getuid() + 1) == []


def test_where_there_is_no_shared_memory_there_are_no_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SHM_DIR", tmp_path / "none")
    assert all_segments() == segments_of("a") == []


def test_the_state_directory_is_the_same_from_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login shell, cron and sudo differ in all of these; a runtime directory is gone after log-out."""
    monkeypatch.setenv("PDCTL_STATE_DIR", "/given")
    assert default_state_dir() == Path("/given")
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    for own in ("", None):
        for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME", "TMPDIR", "USER", "LOGNAME", "SUDO_UID"):
            for value in ("/run/user/5", None):
                with monkeypatch.context() as shell:
                    shell.setenv("PDCTL_STATE_DIR", "")
                    if own is None:
                        shell.delenv("PDCTL_STATE_DIR")
                    if value is None:
                        shell.delenv(name, raising=False)
                    else:
                        shell.setenv(name, value)
                    assert default_state_dir() == home / ".local/state/pdctl"


def test_a_user_without_an_entry_has_the_home_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(names.pwd, "getpwuid", unknown)
    monkeypatch.delenv("PDCTL_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/five")
    assert default_state_dir() == Path("/home/five/.local/state/pdctl")
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(UsageError, match="no home directory") as caught:
            default_state_dir()
        assert "PDCTL_STATE_DIR" in (caught.value.hint or "")


@pytest.mark.parametrize("length", [1, MAX_SOCKET_PATH_BYTES, MAX_SOCKET_PATH_BYTES + 1, 2000])
@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_a_socket_may_have_any_path(tmp_path: Path, length: int, kind: socket.SocketKind) -> None:
    """Long home directories, long names: an address has 107 bytes, a path 4,095. The socket lies at its path."""
    directory = tmp_path
    while (room := length - len(os.fsencode(directory / "x" / "control"))) > 200:
        directory = directory / ("é" * 50)
    directory = directory / ("d" * max(1, room + 1))
    directory.mkdir(parents=True)
    path = directory / "control"
    before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX, kind) as server, socket.socket(socket.AF_UNIX, kind) as client:
        with socket_address(path) as address:
            server.bind(address)
        assert path.is_socket()
        if kind is socket.SOCK_STREAM:
            server.listen()
        with socket_address(path) as address:
            client.connect(address)
        client.send(b"x")
        receiver = server if kind is socket.SOCK_DGRAM else server.accept()[0]
        assert receiver.recv(1) == b"x"
        receiver.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
