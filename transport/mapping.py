"""Bytes that several processes see: create, open, check and remove a segment's file.

Knows the header's words but nothing of rows or blocks. A segment's one open file carries three things: the
mapping, the flock of the mutation lock, and a byte of OFD lock for every participant (byte `slot + 1`; byte 0
belongs to whoever unlinks). Liveness is read from these locks, which the kernel lets go when a process dies.

`multiprocessing.shared_memory` is not used: its resource tracker unlinks what others still use.

A file's length is checked when it is mapped. Whoever cuts it off later ends those who have it mapped by SIGBUS; only
the same user can, and pdctl never does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from dataclasses import fields, replace
from pathlib import Path

from pdctl.transport.errors import (
    CapacityError,
    CorruptSegmentError,
    NoRoomError,
    NotFoundError,
    OtherSegmentError,
)
from pdctl.transport.layout import (
    HEADER_WORDS,
    LAYOUT_VERSION,
    MAGIC,
    MOST,
    NUM_GEOMETRY_WORDS,
    WORD,
    B,
    Geometry,
    H,
    Layout,
    SegmentState,
)
from pdctl.transport.lock import FileLock, NoFileLock, OwnedFd
from pdctl.transport.machine import memory_available, memory_limits, no_shm, shm_available
from pdctl.transport.names import SHM_DIR, SegmentName

_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")
_MADV_DONTDUMP = 16
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_ALLOCATE_STEP_BYTES = 64 << 20
# Left for everybody else when a pool is sized or allocated.
MEMORY_RESERVE_BYTES = 256 << 20
# A snapshot is one copy of the tables; lists and a recount of them take about as much twice over.
_COPY_FACTOR = 3


def _lock_byte(fd: int, command: int, kind: int, byte: int) -> tuple[int, int]:
    """One fcntl lock call on one byte; (type, pid) as the kernel answers."""
    answer = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    found = _FLOCK.unpack(answer)
    return found[0], found[4]


def _map(fd: int, size: int, access: int) -> mmap.mmap:
    """Map a file through an open file of its own.

    mmap keeps a duplicate of its descriptor until the end, in forked children too. A duplicate of `fd` would keep
    the dead parent's flock and OFD locks there.
    """
    own = os.open(f"/proc/self/fd/{fd}", (os.O_RDONLY if access == mmap.ACCESS_READ else os.O_RDWR) | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size, access=access)
    finally:
        os.close(own)


class Mapping:
    """A segment's memory as 64-bit words, and the locks on its file.

    Attributes:
        words: the whole segment up to the KV pages, as unsigned 64-bit words.
        path: the file; None for an anonymous mapping.
    """

    def __init__(self, memory: mmap.mmap, fd: int, path: Path | None, *, writable: bool) -> None:
        self.memory = memory
        self.path = path
        self.writable = writable
        self._owned = OwnedFd(fd) if fd >= 0 else None
        self._bytes = memoryview(memory)
        self.words = self._bytes[: len(memory) // WORD * WORD].cast("Q")
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_MADV_DONTDUMP)

    @property
    def fd(self) -> int:
        return -1 if self._owned is None else self._owned.fd

    def door(self) -> int:
        """A descriptor that only leads to the file: `open_segment` takes it, here and in children that inherit it.

        It outlives the file's name, holds no lock and can be neither read nor written. The caller closes it.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_PATH | os.O_CLOEXEC)

    def kv(self, layout: Layout) -> memoryview | None:
        """The KV pages' bytes; None once this is closed."""
        data: memoryview | None = self.__dict__.get("_bytes")
        return None if data is None else data[layout.kv_offset : layout.total_bytes]

    def file_lock(self) -> FileLock | NoFileLock:
        return NoFileLock() if self._owned is None else FileLock(self._owned)

    def hold_byte(self, byte: int) -> bool:
        """Take the OFD lock of one guard byte until the process ends; False if another has it."""
        if self._owned is None:
            return True
        try:
            _lock_byte(self.fd, _F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def drop_byte(self, byte: int) -> None:
        if self._owned is not None:
            _lock_byte(self.fd, _F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def byte_is_held(self, byte: int) -> bool:
        """Whether another open of this file holds the byte. Takes nothing."""
        if self._owned is None:
            return False
        return _lock_byte(self.fd, _F_OFD_GETLK, fcntl.F_WRLCK, byte)[0] != fcntl.F_UNLCK

    def populate(self, start: int, length: int, *, write: bool) -> bool:
        """Map the pages of a byte range now, so that no request pays for their first touch.

        Returns:
            False where the kernel does not know how (before Linux 5.14).
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) if self.writable else 0
        if not address:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        result = libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), advice)
        return bool(result == 0)

    def close(self) -> None:
        """Let go of the memory and the file.

        The last view unmaps it. Nothing is unmapped by force: tensors made of `memory` or `words` keep these
        objects but export no buffer, so nobody could tell that they still look.
        """
        for name in ("words", "_bytes", "memory"):
            self.__dict__.pop(name, None)
        if self._owned is not None:
            self._owned.close()


def anonymous(geometry: Geometry) -> Mapping:
    """A segment that only this process has, for tests: the same code over private memory."""
    mapping = Mapping(mmap.mmap(-1, Layout(geometry).total_bytes), -1, None, writable=True)
    format_header(mapping.words, geometry, fingerprint=0, numerics_id=0)
    return mapping


def available_bytes() -> tuple[int, str]:
    """Bytes that a new segment may take, and what limits them: /dev/shm, memory or the cgroup.

    Raises:
        CapacityError: there is no /dev/shm.
    """
    shm = shm_available()
    limits = [] if shm is None else [(shm, str(SHM_DIR))]
    limits.append((memory_available() - MEMORY_RESERVE_BYTES, "available memory"))
    limits.extend((left - MEMORY_RESERVE_BYTES, what) for left, what in memory_limits())
    return min(limits)


def check_room(geometry: Geometry) -> None:
    """Raise NoRoomError, naming wanted and available bytes, if the segment would not fit now.

    Raises:
        CapacityError: there is no /dev/shm.
    """
    wanted = Layout(geometry).total_bytes
    available, limit = available_bytes()
    if wanted <= available:
        return
    raise NoRoomError(
        f"segment of {geometry.num_blocks} blocks: wants {wanted} bytes, {limit} has {max(0, available)} bytes",
        fitting_blocks=_fitting_blocks(geometry, int(available * 0.9)),
    )


def _fitting_blocks(geometry: Geometry, room_bytes: int) -> int:
    """The largest pool whose segment, tables included, takes no more than `room_bytes`; 0: none."""
    low, high = 0, geometry.num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if Layout(replace(geometry, num_blocks=middle)).total_bytes <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def create(name: SegmentName, geometry: Geometry, *, fingerprint: int, numerics_id: int) -> Mapping:
    """Make and fill a new segment; nobody can attach before its last store.

    Holds the guard's byte 0, so that nobody takes it for an orphan before its maker has a place in it:
    `Segment.attach` lets go of it.

    Raises:
        CapacityError: it does not fit, or there is no /dev/shm to make it in; nothing is left behind.
        FileExistsError: there is a file of that name.
    """
    check_room(geometry)
    total = Layout(geometry).total_bytes
    try:
        fd = os.open(name.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise no_shm(f"no file can be made there ({error.strerror})") from error
    mapping = None
    try:
        _lock_byte(fd, _F_OFD_SETLK, fcntl.F_WRLCK, 0)
        os.fchmod(fd, 0o600)
        try:
            for start in range(0, total, _ALLOCATE_STEP_BYTES):
                os.posix_fallocate(fd, start, min(_ALLOCATE_STEP_BYTES, total - start))
        except OSError as error:
            available, limit = available_bytes()
            raise NoRoomError(
                f"segment {name}: wants {total} bytes: {error.strerror}; {limit} has {available} bytes now",
                fitting_blocks=_fitting_blocks(geometry, int(available * 0.9)),
            ) from error
        mapping = Mapping(_map(fd, total, mmap.ACCESS_WRITE), fd, name.path, writable=True)
        format_header(mapping.words, geometry, fingerprint=fingerprint, numerics_id=numerics_id)
    except BaseException:
        name.path.unlink(missing_ok=True)
        if mapping is None:
            os.close(fd)
        else:
            mapping.close()
        raise
    return mapping


def format_header(words: memoryview, geometry: Geometry, *, fingerprint: int, numerics_id: int) -> None:
    """Write a fresh segment's header and free list; magic and version come last."""
    layout = Layout(geometry)
    words[H.STATE] = SegmentState.FORMATTING
    words[H.TOTAL_BYTES] = layout.total_bytes
    words[H.KV_OFFSET] = layout.kv_offset
    for index, value in enumerate(geometry.to_words()):
        words[H.GEOMETRY + index] = value
    words[H.FINGERPRINT] = fingerprint
    words[H.NUMERICS_ID] = numerics_id
    words[H.CREATED_UNIX_NS] = time.time_ns()
    words[H.PID_NAMESPACE] = Path("/proc/self/ns/pid").stat().st_ino
    with contextlib.suppress(OSError):
        words[H.TIME_NAMESPACE] = Path("/proc/self/ns/time").stat().st_ino
    words[H.BOOT_ID] = boot_id()
    words[H.OWNER_PID] = os.getpid()
    words[H.NEXT_INCARNATION] = 1
    words[H.NEXT_ORDER] = 1
    for block in range(geometry.num_blocks):
        words[layout.block(block) + B.FREE_NEXT] = block + 2 if block + 1 < geometry.num_blocks else 0
    words[H.FREE_HEAD] = 1
    words[H.FREE_COUNT] = geometry.num_blocks
    words[H.STATE] = SegmentState.OPEN
    words[H.MAGIC] = MAGIC
    words[H.VERSION] = LAYOUT_VERSION  # SYNC: segment-ready


def boot_id() -> int:
    """64 bits of this boot's id: PIDs and monotonic times of another boot mean nothing."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text[:16], 16)


def check_header(words: memoryview, size_bytes: int, what: str) -> Geometry:
    """The geometry of a segment found somewhere, or the reason why it is none.

    Raises:
        CorruptSegmentError: too short, not ours, cut off, or numbers that cannot be.
        IncompatibleError: another layout version.
    """
    if len(words) < HEADER_WORDS:
        raise CorruptSegmentError(f"{what}: {size_bytes} bytes found, a segment's header has 4096")
    if words[H.MAGIC] != MAGIC:
        raise CorruptSegmentError(f"{what}: not a pdctl segment (magic {words[H.MAGIC]:#x}, expected {MAGIC:#x})")
    if words[H.VERSION] != LAYOUT_VERSION:
        raise OtherSegmentError(f"{what}: layout version {words[H.VERSION]} found, {LAYOUT_VERSION} expected")
    try:
        geometry = Geometry.from_words(words[H.GEOMETRY : H.GEOMETRY + NUM_GEOMETRY_WORDS].tolist())
        for field, number, most in zip(fields(Geometry), geometry.to_words(), MOST.to_words(), strict=True):
            if not 1 <= number <= most:
                raise ValueError(f"{field.name} {number}, expected 1 to {most}")
        layout = Layout(geometry)
    except ValueError as error:
        raise CorruptSegmentError(f"{what}: geometry in the header is impossible ({error})") from error
    if words[H.TOTAL_BYTES] != layout.total_bytes or words[H.KV_OFFSET] != layout.kv_offset:
        raise CorruptSegmentError(
            f"{what}: header says {words[H.TOTAL_BYTES]} bytes, its geometry gives {layout.total_bytes}"
        )
    if size_bytes < layout.total_bytes:
        raise CorruptSegmentError(f"{what}: {size_bytes} bytes found, {layout.total_bytes} expected (cut off)")
    return geometry


def open_segment(name: SegmentName | Path | int, *, writable: bool) -> tuple[Mapping, Geometry]:
    """Map an existing segment. An attacher never unlinks.

    Args:
        name: or a descriptor that leads to it (see `Mapping.door`), which stays the caller's: the segment is opened
            once more, so that its locks are this process's own.

    Raises:
        NotFoundError: no such file.
        CorruptSegmentError, IncompatibleError: see check_header.
    """
    # O_NONBLOCK: opening a FIFO must not wait for its other end.
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if isinstance(name, int):
        path, flags = Path(f"/proc/self/fd/{name}"), flags & ~os.O_NOFOLLOW
    else:
        path = name.path if isinstance(name, SegmentName) else name
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        raise NotFoundError(f"segment {path}: not found") from error
    except OSError as error:
        raise NotFoundError(f"segment {path}: {error.strerror}") from error
    status = os.fstat(fd)
    size = status.st_size
    if isinstance(name, SegmentName) and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        os.close(fd)
        raise NotFoundError(
            f"segment {path}: belongs to user {status.st_uid} with mode {status.st_mode & 0o777:04o}, "
            f"expected {os.geteuid()} and 0600"
        )
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CorruptSegmentError(f"segment {path}: not a regular file")
    if size < HEADER_WORDS * WORD:
        os.close(fd)
        raise CorruptSegmentError(f"segment {path}: {size} bytes found, a segment's header has 4096")
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    mapping = Mapping(_map(fd, size, access), fd, path, writable=writable)
    try:
        return mapping, check_header(mapping.words, size, f"segment {path}")
    except Exception:
        mapping.close()
        raise


def check_copy_room(layout: Layout, what: str) -> None:
    """Raise CapacityError if there is no memory for a copy of the tables, and to look at it: a file may be a hole."""
    wanted, available = _COPY_FACTOR * layout.meta_words * WORD, memory_available()
    if wanted > available:
        raise CapacityError(
            f"{what}: to look at a copy of its tables ({layout.meta_words * WORD} bytes) takes {wanted} bytes of "
            f"memory, {available} are available",
            hint="free memory",
        )


def descriptor_of(pid: int, name: SegmentName) -> int | None:
    """A door (see `Mapping.door`) to the segment that a process has open, whatever became of its name.

    Returns:
        A descriptor that the caller closes; None if the process is gone or another user's, or has no such file.
    """
    known = (str(name.path), f"{name.path} (deleted)")
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()) not in known:
                    continue
                fd = os.open(entry, os.O_PATH | os.O_CLOEXEC)
                # The number may lead to another file by now.
                if _is_own_file(os.fstat(fd)):
                    return fd
                os.close(fd)
    return None


def leads_to(name: SegmentName, fd: int) -> bool:
    """Whether a segment's name still stands for this open file."""
    try:
        return os.path.samestat(name.path.lstat(), os.fstat(fd))
    except OSError:
        return False


def _is_own_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def is_somebody_elses(name: SegmentName) -> bool:
    """Whether what lies under a segment's name is none of ours: another user's, no file, or no segment and in use.

    A file without a segment's content that no process has open was left by a start that was killed.
    """
    try:
        fd = os.open(name.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if not _is_own_file(os.fstat(fd)):
            return True
        return not _has_magic(fd) and _is_in_use(name, fd)
    finally:
        os.close(fd)


def _has_magic(fd: int) -> bool:
    return os.pread(fd, WORD, H.MAGIC * WORD) == MAGIC.to_bytes(WORD, "little")


def _is_locked(fd: int) -> bool:
    probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # length 0: to the end of the file
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, probe))[0] != fcntl.F_UNLCK)


def _is_in_use(name: SegmentName, fd: int) -> bool:
    """Whether another process has a lock on the file, or has it open or mapped, as far as this user may know."""
    if _is_locked(fd):
        return True
    path = str(name.path)
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) == path:
                        return True
            if any(line.endswith(f" {path}") for line in (process / "maps").read_text().splitlines()):
                return True
    return False


def unlink_if_orphaned(name: SegmentName, *, made: os.stat_result | None = None) -> bool:
    """Remove a segment's name if no participant is alive; the memory goes when its last viewer does.

    Takes the guard's byte 0, checks that the name still leads to the file it looked at, then unlinks.

    Args:
        made: of the file that the caller made: whatever else has its name by now stays.

    Returns:
        False if a participant still holds its byte, another process is unlinking, or it is somebody else's file.
    """
    if made is None and is_somebody_elses(name):
        return False
    try:
        fd = os.open(name.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return made is not None
    try:
        if made is not None and not os.path.samestat(os.fstat(fd), made):
            return True
        try:
            _lock_byte(fd, _F_OFD_SETLK, fcntl.F_WRLCK, 0)
        except OSError:
            return False
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, 0, 0)  # length 0: to the end of the file
        if _FLOCK.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, probe))[0] != fcntl.F_UNLCK:
            return False
        if leads_to(name, fd):
            name.path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
