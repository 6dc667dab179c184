"""Writing logs: no line is lost at a rotation, and nothing that becomes of the files disturbs who writes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import logs

WATCHDOG_S = 60
SETUP = """
import logging, os, shutil, sys
from pathlib import Path
from pdctl.core import logs
directory = Path(sys.argv[1])
logs.setup(directory, "router")
log = logging.getLogger("x")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "logs" / "default"
    made.mkdir(mode=0o700, parents=True)
    return made


def spawn(directory: Path, script: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SETUP + textwrap.dedent(script), str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(directory: Path, script: str) -> str:
    """What it still prints to the stderr that it was started with."""
    _, err = (process := spawn(directory, script)).communicate(timeout=WATCHDOG_S)
    assert process.returncode == 0, err.decode()
    return err.decode()


def numbers(path: Path) -> list[int]:
    return [int(line.rsplit("line ", 1)[1]) for line in path.read_text().splitlines() if "line " in line]


class Follower:
    """Reads like `logs -f` may: what is in the open file, then the one that has its name by then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self.text = b""

    def look(self) -> None:
        while True:
            if self._file is None:
                if not self._path.exists():
                    return
                self._file = self._path.open("rb")
            renamed = not self._path.exists() or not os.path.samestat(
                os.fstat(self._file.fileno()), self._path.stat()
            )
            self.text += self._file.read()
            if not renamed:
                return
            self._file.close()
            self._file = None


def test_no_line_is_lost_at_a_rotation(directory: Path) -> None:
    """Neither of two processes that write one file, nor for a reader that follows, whatever else fills it."""
    script = """
        logs.MAX_LOG_BYTES = 20_000
        start = int(sys.stdin.readline())
        for number in range(start, start + 300):
            log.info("line %d", number)
            if number % 10 == 9:
                os.write(2, b"x" * 500 + b"\\n")
                os.write(3, b".")
                os.read(4, 1)
    """
    turn, go = os.pipe(), os.pipe()
    writers = []
    for start in (0, 1000):
        command = [sys.executable, "-c", SETUP + textwrap.dedent(script), str(directory)]
        inner = f"import os, sys; os.dup2({turn[1]}, 3); os.dup2({go[0]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", inner, *command]
        writers.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(turn[1], go[0])))
        assert writers[-1].stdin is not None
        writers[-1].stdin.write(f"{start}\n".encode())
        writers[-1].stdin.close()
    os.close(turn[1])
    os.close(go[0])
    follower = Follower(directory / "router.log")
    while os.read(turn[0], 1):
        follower.look()
        os.write(go[1], b".")
    assert [writer.wait(WATCHDOG_S) for writer in writers] == [0, 0]
    follower.look()
    found = [int(line.rsplit(b"line ", 1)[1]) for line in follower.text.splitlines() if b"line " in line]
    assert sorted(found) == [*range(300), *range(1000, 1300)]
    assert [one for one in found if one < 1000] == list(range(300))
    assert {entry.name for entry in directory.iterdir()} == {"router.log", "router.log.1"}
    assert max(path.stat().st_size for path in directory.iterdir()) < 25_000


@pytest.mark.parametrize("what", ["file", "directory", "another file"])
def test_what_was_removed_is_made_again_or_done_without(directory: Path, what: str) -> None:
    script = f"""
        log.info("line 1")
        what, path = {what!r}, directory / "router.log"
        if what == "directory":
            shutil.rmtree(directory.parent)
        else:
            path.unlink()
        if what == "another file":
            path.write_text("line 0\\n")
        log.info("line 2")
        directory.mkdir(0o700, parents=True, exist_ok=True)
        log.info("line 3")
    """
    assert run(directory, script) == ""
    assert numbers(directory / "router.log") == {"file": [2, 3], "directory": [3], "another file": [0, 2, 3]}[what]


@pytest.mark.parametrize("what", ["missing", "a file", "open to others", "a link"])
def test_without_a_directory_a_process_starts_and_logs_to_where_it_may(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "logs"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "open to others":
        directory.mkdir()
        directory.chmod(0o777)
    elif what == "a link":
        directory.symlink_to(elsewhere)
    elif what == "a file":
        directory.write_text("")
    else:
        directory = Path("/proc/none/logs")
    assert "line 1" in run(directory, 'log.info("line 1")')
    assert not any(elsewhere.iterdir())
    assert not directory.is_dir() or not any(directory.iterdir())
    with pytest.raises(OSError):
        logs.open_log(directory, "router")


def test_a_rotation_that_fails_half_way_leaves_a_file_to_write_to(directory: Path) -> None:
    script = """
        logs.MAX_LOG_BYTES = 300
        real, fails, calls = (os.rename, os.open), {"rename": (1, 4), "open": (3, 5)}, {"rename": 0, "open": 0}
        def failing(name, call):
            def one(*arguments, **more):
                if name == "open" and arguments[0] != "router.log":
                    return call(*arguments, **more)
                calls[name] += 1
                if calls[name] in fails[name]:
                    raise OSError(24, "Too many open files")
                return call(*arguments, **more)
            return one
        os.rename, os.open = failing("rename", os.rename), failing("open", os.open)
        for number in range(80):
            log.info("line %d", number)
        assert calls["rename"] > 6 and calls["open"] > 6
    """
    assert run(directory, script) == ""
    assert {path.name for path in directory.iterdir()} == {"router.log", "router.log.1"}
    kept = numbers(directory / "router.log.1") + numbers(directory / "router.log")
    assert kept == list(range(kept[0], 80))


def test_a_full_disk_is_counted(directory: Path) -> None:
    script = """
        full = os.open("/dev/full", os.O_WRONLY)
        kept = os.dup(2)
        keep, logging.root.handlers[0]._keep = logging.root.handlers[0]._keep, lambda: None
        os.dup2(full, 2)
        log.info("line 1")
        log.info("line 2")
        os.dup2(kept, 2)
        log.info("line 3")
    """
    assert run(directory, script) == ""
    assert "(before this, 2 lines could not be written)" in (directory / "router.log").read_text()
    assert numbers(directory / "router.log") == [3]
