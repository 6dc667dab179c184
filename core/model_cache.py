"""pdctl's cache directory and the rules of its models/ folder: how entries are named, and who may change one.

Does not know what makes a model complete, nor how one is fetched. Called by pull, models and `pdctl models`.

    <cache>/models/                  models_dir(), 0700
        smollm2/                     complete: it got this name by one rename
        .smollm2.lock                flock: held by the one process that pulls or removes smollm2
        .smollm2.tmp-XXXXXXXX/       a pull in progress, or what a killed one left behind
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pdctl.transport.errors import PdctlError, UsageError

# Longer than the conversion of a model, during which nothing grows on disk.
_STALL_S = 300.0
_POLL_S = 0.2


def cache_dir() -> Path:
    """Returns pdctl's cache directory, absolute, not created.

    `$PDCTL_CACHE_DIR`, else `$XDG_CACHE_HOME/pdctl`, else `~/.cache/pdctl`. A relative XDG_CACHE_HOME is
    ignored, as the XDG base directory specification demands.

    Raises:
        UsageError: the home directory cannot be found.
    """
    try:
        if own := os.environ.get("PDCTL_CACHE_DIR"):
            return Path(own).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME")
        if xdg and Path(xdg).is_absolute():
            return Path(xdg) / "pdctl"
        return Path.home() / ".cache" / "pdctl"
    except RuntimeError as error:
        raise UsageError(f"cache directory: {error}", hint="set PDCTL_CACHE_DIR to a directory") from error


def models_dir() -> Path:
    """Returns the folder of stored models, absolute, not created."""
    return cache_dir() / "models"


def make_temporary(path: Path) -> Path:
    """Makes a directory beside the model `path`, to work in; the name's lock must be held."""
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))


def temporaries(path: Path) -> list[Path]:
    """Returns the temporary directories of the model `path`.

    With the name's lock held, those that the holder did not make are leftovers of killed pulls.
    """
    return list(path.parent.glob(f".{path.name}.tmp-*"))


def parse_entry(entry: str) -> tuple[str, bool]:
    """Returns the name of the model that an entry belongs to, and whether the entry is a temporary directory."""
    temporary = re.fullmatch(r"\.(.+)\.tmp-[^.]+", entry)
    return (temporary.group(1), True) if temporary else (entry, False)


@contextlib.contextmanager
def name_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock of the model `path`; a killed holder's is released by the kernel.

    Args:
        on_wait: called once if another process holds it, which is then waited for while what it makes grows; None
            raises PdctlError.

    Raises:
        PdctlError: another process holds it, and gets no further (it is stopped, or what it waits for hangs).
    """
    fd = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if on_wait is None:
                raise PdctlError(
                    f"model {path.name} is being pulled by another process", hint="wait for it to end"
                ) from error
            on_wait()
            _wait_while_it_grows(fd, path)
        yield
    finally:
        os.close(fd)


def _wait_while_it_grows(fd: int, path: Path) -> None:
    known, deadline = -1, 0.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            found = sum(map(tree_bytes, temporaries(path)))
            if found != known:
                known, deadline = found, time.monotonic() + _STALL_S
            if time.monotonic() > deadline:
                lock = path.parent / f".{path.name}.lock"
                raise PdctlError(
                    f"model {path.name} is being pulled by another process, which made nothing for {_STALL_S:g} s",
                    hint=f"fuser -v {lock} shows which; end it, then try again",
                ) from None
        time.sleep(_POLL_S)


def tree_bytes(path: Path) -> int:
    """Returns the size of all files below a directory, in bytes; 0 if it is absent."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a pull goes on meanwhile
                total += (Path(root) / name).lstat().st_size
    return total


def is_disk_full(error: object) -> bool:
    """Whether an exception, or a log, tells of a full disk or quota."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)  # pip's log, and safetensors, which wraps the number in a text
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))
