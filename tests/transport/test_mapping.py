from __future__ import annotations

import gc
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdctl.transport import mapping as mapping_module
from pdctl.transport.errors import CapacityError, CorruptSegmentError, IncompatibleError, NoRoomError, NotFoundError
from pdctl.transport.layout import LAYOUT_VERSION, MAGIC, WORD, DType, H, Layout, P, SegmentState
from pdctl.transport.mapping import check_room, open_segment, unlink_if_orphaned
from pdctl.transport.names import SegmentName
from pdctl.transport.recovery import verify
from pdctl.transport.rows import RowParams, RowState
from pdctl.transport.segment import Expected, Role, Segment

Fork = Callable[[Callable[[Callable[[object], None]], None]], Any]


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new() -> Iterator[None]:
    """Whatever other tests of this process loaded takes a quarter of a second to look through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


# --- create and open ---------------------------------------------------------------------------------------


def test_created_segment_opens_with_the_same_geometry(shared: Segment, name: SegmentName) -> None:
    opened = Segment.open(name)
    assert opened.geometry == shared.geometry
    assert opened.words[H.FINGERPRINT] == 7
    assert opened.words[H.NUMERICS_ID] == 9
    assert opened.words[H.STATE] == SegmentState.OPEN
    assert name.path.stat().st_size == opened.layout.total_bytes
    assert verify(opened) == []
    opened.close()


def test_the_file_has_its_memory_before_anybody_touches_it(shared: Segment, name: SegmentName) -> None:
    assert name.path.stat().st_blocks * 512 >= shared.layout.total_bytes


def test_the_version_is_stored_last(kit: ModuleType) -> None:
    """An attacher that sees the version sees everything."""
    g = kit.geometry()
    words = kit.DyingWords(memoryview(bytearray(Layout(g).meta_words * WORD)).cast("Q"))
    seen = []
    words.after_store = lambda: seen.append((words[H.MAGIC], words[H.VERSION]))
    mapping_module.format_header(words, g, fingerprint=1, numerics_id=1)
    assert seen[-1] == (MAGIC, LAYOUT_VERSION)
    assert {version for _, version in seen[:-1]} == {0}


def test_an_existing_file_is_never_taken_over(shared: Segment, name: SegmentName) -> None:
    shared.words[H.FINGERPRINT] = 1234
    with pytest.raises(FileExistsError):
        Segment.create(name, shared.geometry, fingerprint=0, numerics_id=0)
    assert name.path.exists()
    assert shared.words[H.FINGERPRINT] == 1234


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_mode_is_0600_under_any_umask(kit: ModuleType, name: SegmentName, mask: int) -> None:
    before = os.umask(mask)
    try:
        Segment.create(name, kit.geometry(), fingerprint=0, numerics_id=0).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(name.path.stat().st_mode) == 0o600


def test_a_failed_creation_leaves_nothing(
    kit: ModuleType, name: SegmentName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mapping_module, "format_header", fail)
    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        Segment.create(name, kit.geometry(), fingerprint=0, numerics_id=0)
    assert not name.path.exists()
    assert open_descriptors() == before


def test_opening_what_is_not_there(name: SegmentName) -> None:
    with pytest.raises(NotFoundError, match=re.escape(str(name.path))):
        Segment.open(name)


def test_a_symlink_is_not_followed(shared: Segment, name: SegmentName, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(name.path)
    with pytest.raises(NotFoundError, match="link"):
        open_segment(link, writable=False)


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(CorruptSegmentError, match=kind):
        open_segment(path, writable=False)


def corrupt_size(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def corrupt_word(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(word * WORD)
        file.write(value.to_bytes(WORD, "little"))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p, s: corrupt_word(p, H.MAGIC, 0x1234), CorruptSegmentError, r"0x1234.*0x[0-9a-f]{16}"),
        (
            lambda p, s: corrupt_word(p, H.VERSION, 77),
            IncompatibleError,
            rf"version 77 found, {LAYOUT_VERSION} expected",
        ),
        (lambda p, s: corrupt_word(p, H.VERSION, 0), IncompatibleError, r"version 0 found"),
        (lambda p, s: corrupt_size(p, s - 1), CorruptSegmentError, r"(\d+) bytes found, (\d+) expected"),
        (lambda p, s: corrupt_size(p, 4096), CorruptSegmentError, r"4096 bytes found"),
        (lambda p, s: corrupt_size(p, 4095), CorruptSegmentError, r"4095 bytes found"),
        (lambda p, s: corrupt_size(p, 0), CorruptSegmentError, r"0 bytes found"),
        (lambda p, s: corrupt_word(p, H.GEOMETRY, 0), CorruptSegmentError, r"impossible"),
        (lambda p, s: corrupt_word(p, H.GEOMETRY, (1 << 64) - 1), CorruptSegmentError, r"impossible"),
        (lambda p, s: corrupt_word(p, H.GEOMETRY + 5, 99), CorruptSegmentError, r"impossible.*99"),
        (lambda p, s: corrupt_word(p, H.GEOMETRY, 13), CorruptSegmentError, r"header says \d+ bytes"),
        (lambda p, s: corrupt_word(p, H.KV_OFFSET, 64), CorruptSegmentError, r"header says"),
        (lambda p, s: corrupt_word(p, H.TOTAL_BYTES, 64), CorruptSegmentError, r"header says 64 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_its_numbers(
    shared: Segment,
    tmp_path: Path,
    name: SegmentName,
    damage: Callable[[Path, int], None],
    error: type[Exception],
    message: str,
) -> None:
    path = tmp_path / "copy"
    shutil.copy(name.path, path)
    damage(path, path.stat().st_size)
    before = open_descriptors()
    for writable in (True, False):
        with pytest.raises(error, match=message) as caught:
            open_segment(path, writable=writable)
        assert str(path) in str(caught.value)
        caught = None  # type: ignore[assignment]  # its traceback holds the mapping
    assert open_descriptors() == before
    assert path.exists()


def test_a_closed_segment_cannot_be_attached(shared: Segment, name: SegmentName) -> None:
    shared.mark_closed()
    assert shared.is_closed()
    with pytest.raises(NotFoundError, match="closed"):
        Segment.open(name)


def test_another_pid_namespace_is_refused(shared: Segment, name: SegmentName) -> None:
    shared.words[H.PID_NAMESPACE] += 1
    with pytest.raises(IncompatibleError, match=str(shared.words[H.PID_NAMESPACE])):
        Segment.open(name)


EXPECTED = Expected(
    fingerprint=7,
    numerics_id=9,
    dtype=DType.FLOAT32,
    block_tokens=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


@pytest.mark.parametrize(
    ("field", "value", "found", "wanted"),
    [
        ("fingerprint", 0xABC, f"{7:016x}", f"{0xABC:016x}"),
        ("numerics_id", 0xDEF, f"{9:016x}", f"{0xDEF:016x}"),
        ("dtype", DType.BFLOAT16, "float32", "bfloat16"),
        ("block_tokens", 1601, "4", "1601"),
        ("num_layers", 1602, "1", "1602"),
        ("num_kv_heads", 1603, "1", "1603"),
        ("head_dim", 1604, "1", "1604"),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(
    shared: Segment, name: SegmentName, field: str, value: Any, found: str, wanted: str
) -> None:
    Segment.open(name, expected=EXPECTED).close()
    with pytest.raises(IncompatibleError, match=rf"\b{field}\b.*\b{found}\b.*\b{wanted}\b"):
        Segment.open(name, expected=replace(EXPECTED, **{field: value}))


# --- closing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attribute", ["memory", "words"])
@pytest.mark.parametrize("view", [memoryview, pickle.PickleBuffer])
def test_closing_under_live_views_raises_nothing_and_keeps_them(
    name: SegmentName, kit: ModuleType, attribute: str, view: Callable[[Any], Any]
) -> None:
    segment = Segment.create(name, kit.geometry(), fingerprint=7, numerics_id=9)
    held = view(getattr(segment.mapping, attribute))
    segment.close()
    del segment
    gc.collect()
    assert bytes(memoryview(held).cast("B")[:8]) == MAGIC.to_bytes(8, "little")


@pytest.mark.parametrize("attribute", ["memory", "words"])
def test_closing_under_a_tensor_does_not_unmap_it(attribute: str) -> None:
    """torch.frombuffer keeps the object it was given, but exports nothing: an unmap would be a crash."""
    script = f"""
        import gc, torch
        from pdctl.transport.layout import DType, Geometry
        from pdctl.transport.segment import Segment
        s = Segment.anonymous(Geometry(num_blocks=2, block_tokens=4, num_layers=1, num_kv_heads=1, head_dim=1,
                                       dtype=DType.FLOAT32, max_rows=1, max_context=8, max_participants=2))
        t = torch.frombuffer(s.mapping.{attribute}, dtype=torch.int64, count=4)
        s.close()
        del s
        gc.collect()
        print(int(t[1]))
    """
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(LAYOUT_VERSION)), done.stderr


def test_closing_unmaps_when_nobody_looks_any_more(name: SegmentName, kit: ModuleType) -> None:
    segment = Segment.create(name, kit.geometry(), fingerprint=7, numerics_id=9)
    assert str(name) in Path("/proc/self/maps").read_text()
    segment.close()
    del segment
    gc.collect()
    assert str(name) not in Path("/proc/self/maps").read_text()


def test_a_closed_segment_takes_no_lock_of_another_file(shared: Segment, tmp_path: Path) -> None:
    """Its descriptor's number soon belongs to somebody else."""
    number = shared.mapping.fd
    shared.close()
    other = (tmp_path / "other").open("w")
    assert other.fileno() == number, "the number was not reused: the test would prove nothing"
    with pytest.raises((ValueError, OSError)):
        shared.mapping.file_lock().try_acquire()
    with pytest.raises((ValueError, OSError)):
        shared.lock._file_lock.try_acquire()
    other.close()


def test_populate_maps_pages(shared: Segment) -> None:
    if not shared.mapping.populate(0, shared.layout.kv_offset, write=True):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert shared.words[H.MAGIC] == MAGIC
    shared.close()


# --- several processes -------------------------------------------------------------------------------------


def test_a_second_process_sees_and_takes_rows(shared: Segment, name: SegmentName, fork: Fork) -> None:
    me = shared.attach(Role.ROUTER)
    row = shared.rows.submit(
        me,
        request_id="größe",
        tokens=[5, 6, 7],
        limit_tokens=9,
        params=RowParams(seed=3, temperature=0.5),
        local_prefill_tokens=0,
    )
    assert row is not None

    def body(say: Callable[[object], None]) -> None:
        other = Segment.open(name)
        daemon = other.attach(Role.PREFILL)
        (found,) = other.rows.in_state(RowState.QUEUED)
        say(other.rows.request_id(found))
        say(other.rows.tokens(found, 0, 3))
        say(other.rows.params(found))
        assert other.rows.claim(daemon, found, alone=False)
        say((daemon.slot, os.getpid()))

    child = fork(body)
    assert child.line() == "größe"
    assert child.line() == "[5, 6, 7]"
    assert child.line() == str(RowParams(seed=3, temperature=0.5))
    slot, pid = eval(child.line())
    assert child.wait() == 0
    assert shared.rows.state(row.row) is RowState.PREFILLING
    assert slot != me.slot
    assert shared.participant_word(slot, P.PID) == pid == child.pid


def test_attached_processes_get_slots_of_their_own(shared: Segment, name: SegmentName, fork: Fork) -> None:
    def body(say: Callable[[object], None]) -> None:
        me = Segment.open(name).attach(Role.DECODE)
        say((me.slot, me.incarnation))
        os.read(gate[0], 1)

    gate = os.pipe()
    children = [fork(body) for _ in range(4)]
    seen = {child.line() for child in children}
    assert len(seen) == 4
    assert len(shared.slots(Role.DECODE)) == 4
    os.write(gate[1], b"xxxx")
    assert [child.wait() for child in children] == [0] * 4


def test_no_slot_is_left(kit: ModuleType, name: SegmentName) -> None:
    segment = Segment.create(name, kit.geometry(max_participants=2), fingerprint=0, numerics_id=0)
    first = segment.attach(Role.DECODE)
    segment.attach(Role.DECODE)
    with pytest.raises(CapacityError, match="2 participant slots"):
        segment.attach(Role.DECODE)
    segment.detach(first)
    again = segment.attach(Role.PREFILL)
    assert again.slot == first.slot
    assert again.incarnation > first.incarnation
    segment.close()


def test_a_slot_of_a_living_process_is_not_taken_even_if_its_words_say_so(
    shared: Segment, name: SegmentName, fork: Fork
) -> None:
    def body(say: Callable[[object], None]) -> None:
        say(Segment.open(name).attach(Role.DECODE).slot)
        signal_forever()

    child = fork(body)
    slot = int(child.line())
    shared.words[shared.layout.participant(slot) + P.ROLE] = Role.NONE
    assert shared.attach(Role.DECODE).slot != slot
    child.kill()


def signal_forever() -> None:
    import signal

    while True:
        signal.pause()


def test_a_foreign_process_unlinks_nothing(shared: Segment, name: SegmentName) -> None:
    """multiprocessing.shared_memory's tracker would, at the exit of whoever attached last or first."""
    script = f"""
        import mmap, os
        from pdctl.transport.names import parse_segment_name
        from pdctl.transport.segment import Role, Segment
        fd = os.open("{name.path}", os.O_RDWR)
        memory = mmap.mmap(fd, 0)
        assert memory[:8] == b"pdctlKV1"
        segment = Segment.open(parse_segment_name("{name}"))
        segment.attach(Role.DECODE)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert name.path.exists()
    Segment.open(name).close()


@pytest.fixture
def participant(name: SegmentName, shared: Segment, fork: Fork) -> Iterator[Any]:
    """A process that is attached."""

    def body(say: Callable[[object], None]) -> None:
        Segment.open(name).attach(Role.DECODE)
        say("attached")
        signal_forever()

    child = fork(body)
    assert child.line() == "attached"
    yield child


def test_a_segment_in_use_is_not_unlinked(name: SegmentName, participant: Any) -> None:
    assert unlink_if_orphaned(name) is False
    assert name.path.exists()
    participant.kill()
    assert unlink_if_orphaned(name) is True
    assert not name.path.exists()
    assert unlink_if_orphaned(name) is True


def test_a_participant_of_this_process_counts_as_well(shared: Segment, name: SegmentName) -> None:
    me = shared.attach(Role.SUPERVISOR)
    assert unlink_if_orphaned(name) is False
    shared.detach(me)
    assert unlink_if_orphaned(name) is True


def test_viewers_do_not_keep_the_name_and_keep_their_memory(shared: Segment, name: SegmentName, fork: Fork) -> None:
    gate = os.pipe()

    def body(say: Callable[[object], None]) -> None:
        mapping, _ = open_segment(name, writable=False)
        say("looking")
        os.read(gate[0], 1)
        say(hex(mapping.words[H.MAGIC]))

    child = fork(body)
    assert child.line() == "looking"
    assert unlink_if_orphaned(name) is True
    os.write(gate[1], b"x")
    assert child.line() == hex(MAGIC)
    assert child.wait() == 0


def test_only_one_unlinks(shared: Segment, name: SegmentName) -> None:
    other, _ = open_segment(name, writable=True)
    assert other.hold_byte(0)
    assert unlink_if_orphaned(name) is False
    other.drop_byte(0)
    assert unlink_if_orphaned(name) is True
    other.close()


def test_a_name_that_leads_to_another_file_by_now_is_left_alone(
    shared: Segment, name: SegmentName, kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mapping_module._lock_byte

    def replace_then_lock(*args: Any) -> tuple[int, int]:
        name.path.unlink()
        monkeypatch.setattr(mapping_module, "_lock_byte", real)
        Segment.create(name, kit.geometry(), fingerprint=1234, numerics_id=0).close()
        return real(*args)

    monkeypatch.setattr(mapping_module, "_lock_byte", replace_then_lock)
    unlink_if_orphaned(name)
    opened = Segment.open(name)
    assert opened.words[H.FINGERPRINT] == 1234
    opened.close()


# --- room --------------------------------------------------------------------------------------------------

ROOM_SCRIPT = """
import os, re, sys
from dataclasses import replace
from pdctl.transport import mapping
from pdctl.transport.errors import CapacityError
from pdctl.transport.layout import DType, Geometry, Layout
from pdctl.transport.mapping import available_bytes
from pdctl.transport.names import SHM_DIR, new_segment_name
from pdctl.transport.segment import Segment

g = Geometry(num_blocks={blocks}, block_tokens=16, num_layers=8, num_kv_heads=4, head_dim=64,
             dtype=DType.FLOAT32, max_rows=8, max_context=512, max_participants=8)
name = new_segment_name("small")
if {patch}:
    real, mapping.check_room = mapping.check_room, lambda geometry: None
try:
    Segment.create(name, g, fingerprint=0, numerics_id=0)
except CapacityError as error:
    print(error.message)
    assert str(Layout(g).total_bytes) in error.message, error.message
    assert list(SHM_DIR.iterdir()) == []
    if {patch}:
        sys.exit()
    assert str(available_bytes()[0]) in error.message and available_bytes()[1] == "/dev/shm", error.message
    advised = error.fitting_blocks
    assert advised > 10, advised
    segment = Segment.create(name, replace(g, num_blocks=advised), fingerprint=0, numerics_id=0)
    view = segment.mapping.memory
    for at in range(0, len(view), 4096):
        view[at] = view[at]  # SIGBUS if a page is not there
    print("fits")
else:
    sys.exit("no error")
"""


def in_small_shm(script: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a /dev/shm of 16 MiB."""
    shell = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" -c "$1"'
    probe = ["unshare", "-Urm", "sh", "-c", shell, sys.executable, ""]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("unprivileged mount namespaces are not allowed here")
    return subprocess.run([*probe[:-1], script], capture_output=True, text=True)


@pytest.mark.parametrize("blocks", [64, 40_000, 1 << 34])
def test_a_full_shm_is_an_error_with_numbers_and_the_advice_holds(blocks: int) -> None:
    done = in_small_shm(ROOM_SCRIPT.format(patch=False, blocks=blocks))
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.endswith("fits\n")


def test_room_taken_meanwhile_is_an_error_before_any_store() -> None:
    """The check passed, the allocation does not: no SIGBUS, no file."""
    done = in_small_shm(ROOM_SCRIPT.format(patch=True, blocks=64))
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def test_room_for_tables_alone_is_missing(kit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of blocks helps: the advice must not be one."""
    monkeypatch.setattr(mapping_module, "available_bytes", lambda: (1 << 20, "the moon"))
    with pytest.raises(NoRoomError, match=r"the moon has 1048576 bytes") as caught:
        check_room(kit.geometry())
    assert caught.value.fitting_blocks == 0


def test_the_tightest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = mapping_module.MEMORY_RESERVE_BYTES
    limits = [(reserve + 5, "cgroup x"), (reserve - 7, "cgroup y")]
    monkeypatch.setattr(mapping_module, "memory_limits", lambda: limits)
    assert mapping_module.available_bytes() == (-7, "cgroup y")
    monkeypatch.setattr(mapping_module, "memory_limits", list)
    available, limit = mapping_module.available_bytes()
    assert available > 0
    assert limit in ("/dev/shm", "available memory")


def test_a_segment_in_the_making_is_no_orphan(name: SegmentName, kit: Any) -> None:
    made = Segment.create(name, kit.geometry(), fingerprint=1, numerics_id=1)
    try:
        assert not unlink_if_orphaned(name)
        me = made.attach(Role.SUPERVISOR)
        assert not unlink_if_orphaned(name)
        made.detach(me)
        assert unlink_if_orphaned(name)
        assert not name.path.exists()
    finally:
        made.close()
        name.path.unlink(missing_ok=True)
