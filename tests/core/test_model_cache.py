"""Where the cache lies, how its entries are named, and what tells of a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pdctl.core import model_cache
from pdctl.transport.errors import PdctlError


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("~/c", None, "/home/me/c"),
        ("", "/x", "/x/pdctl"),
        (None, "/x", "/x/pdctl"),
        (None, "relative", "/home/me/.cache/pdctl"),
        (None, None, "/home/me/.cache/pdctl"),
    ],
)
def test_cache_dir(own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("PDCTL_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert model_cache.cache_dir() == Path(expected)


def test_relative_cache_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDCTL_CACHE_DIR", "here")
    assert model_cache.cache_dir() == tmp_path / "here"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EIO, "x"), False),
        (ValueError("x"), False),
    ],
)
def test_disk_full_is_recognised(error: Exception, expected: bool) -> None:
    assert model_cache.is_disk_full(error) is expected


def test_a_pull_that_gets_no_further_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, or hangs: nothing grows. While something does, it is waited for."""
    path, waited = tmp_path / "smollm2", []
    monkeypatch.setattr(model_cache, "_STALL_S", 0.2)
    monkeypatch.setattr(model_cache, "_POLL_S", 0.01)
    growing = iter(range(60))
    monkeypatch.setattr(model_cache, "tree_bytes", lambda path: next(growing, 60))
    with model_cache.name_lock(path):
        (tmp_path / ".smollm2.tmp-abcd").mkdir()
        with (
            pytest.raises(PdctlError, match=r"model smollm2 is being pulled by another process.*nothing for 0\.2 s"),
            model_cache.name_lock(path, lambda: waited.append(True)),
        ):
            pass
    assert (waited, next(growing, None)) == ([True], None)
    with model_cache.name_lock(path):
        pass
