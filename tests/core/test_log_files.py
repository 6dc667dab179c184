"""Logs as they are read: no line is lost to a rotation, and one run is told from another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.core.cluster import ClusterLock
from pdctl.core.log_files import Log, Logs, Run
from pdctl.core.logs import RUN_BEGINS
from pdctl.transport.names import log_dir

WATCHDOG_S = 60
MAX_LOG_BYTES = 1200
# A process that logs as many lines as it is told, and says when they are written. A file has some thirty of them.
WRITER = f"""
import logging, os, sys
from pathlib import Path
from pdctl.core import logs
logs.MAX_LOG_BYTES = {MAX_LOG_BYTES}
told = os.dup(1)
logs.setup(Path(sys.argv[1]), "router")
number = 0
for line in sys.stdin:
    for _ in range(int(line)):
        logging.info("line %d", number)
        number += 1
    os.write(told, b".")
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Has so many lines written to router.log."""
    (tmp_path / "logs").mkdir(mode=0o700)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "logs")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None and writer.stdout is not None
    told, heard = writer.stdin, writer.stdout

    def write(number: int) -> None:
        told.write(f"{number}\n".encode())
        told.flush()
        assert heard.read(1) == b"."

    yield write
    told.close()
    assert writer.wait(WATCHDOG_S) == 0
    heard.close()


def numbers(log: Log) -> list[int]:
    return [int(line.text.rsplit(" ", 1)[1]) for line in log.read()]


def test_no_line_is_lost_to_rotations_between_two_looks(tmp_path: Path, write: Callable[[int], None]) -> None:
    """None, one or two; and what is written after the last look, before the file loses its name, is read first."""
    path, expected = tmp_path / "logs" / "router.log", 0
    write(10)
    log = Log(path)
    # At its beginning it has all that is there.
    assert numbers(log) == [*range(10)]
    expected = 10
    for step in (1, 5, 40, 7, 25, 60, 1, 33, 34, 55, 0, 60, 3):
        write(step)
        assert numbers(log) == [*range(expected, expected + step)]
        expected += step
    assert path.stat().st_size + path.with_name("router.log.1").stat().st_size < expected * 40 / 2, "no rotation"


def test_reading_from_the_end_begins_with_what_comes(tmp_path: Path, write: Callable[[int], None]) -> None:
    write(50)
    logs = Logs(tmp_path / "logs", from_end=True)
    assert logs.read() == []
    write(40)
    assert [line.text.rsplit(" ", 1)[1] for line in logs.read()] == [str(number) for number in range(50, 90)]
    # A process that begins later is read from its beginning.
    (tmp_path / "logs" / "decode-1.log").write_text("2026-01-01 00:00:00.000Z I daemon hello\nhalf a li")
    assert [(line.process, line.text[-5:]) for line in logs.read()] == [("decode-1", "hello")]


def test_a_file_that_was_removed_or_cut_off_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.with_name("router.log.1").write_text("before\n")
    path.write_text("one\ntwo\n")
    log = Log(path)
    assert [line.text for line in log.read()] == ["before", "one", "two"]
    path.write_text("1\n")
    assert [line.text for line in log.read()] == ["1"]
    with path.open("a") as file:
        path.unlink()
        file.write("last w")
        file.flush()
        assert log.read() == []
        path.write_text("new\n")
        # What stands in router.log.1 is older than all of it; a line without an end ends with its file.
        assert [line.text for line in log.read()] == ["last w", "new"]
    path.unlink()
    path.mkdir()
    assert log.read() == []


# --- one run ---------------------------------------------------------------------------------------------------

OLD, NEW = "2026-01-01 10:00", "2026-01-01 11:00"
FILES = {
    "supervisor.log.1": [f"{OLD}:00.000Z I supervisor {RUN_BEGINS}"],
    "supervisor.log": [
        f"{OLD}:01.000Z I supervisor old",
        f"{NEW}:00.000Z I supervisor {RUN_BEGINS}",
        f"{NEW}:01.000Z I supervisor new",
    ],
    "router.log": [
        f"{OLD}:02.000Z I router old",
        "Traceback of old",
        f"{NEW}:02.000Z I router new",
        "Traceback of new",
    ],
    "prefill-0.log": [f"{OLD}:03.000Z I daemon old", "Traceback of old"],
    "zygote.log": [f"{OLD}:04.000Z I zygote old", "ImportError: new"],
}


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """Logs of two runs of a cluster that does not run; of the second, the zygote could not even begin to log."""
    directory = log_dir(tmp_path, "two-runs")
    directory.mkdir(parents=True, mode=0o700)
    for name, lines in FILES.items():
        (directory / name).write_text("".join(f"{line}\n" for line in lines))
        # 10:30 or 11:30, UTC.
        written = 1767263400 if name == "prefill-0.log" else 1767267000
        os.utime(directory / name, (written, written))
    return ["--name", "two-runs", "--state-dir", str(tmp_path)]


def shown(place: list[str], *arguments: str) -> str:
    result = CliRunner().invoke(app, ["logs", *arguments, *place])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_this_run_is_shown_and_earlier_ones_when_asked_for(place: list[str]) -> None:
    lines = shown(place).splitlines()
    assert [line.split(" | ")[0].strip() for line in lines] == [
        "zygote",
        "supervisor",
        "supervisor",
        "router",
        "router",
    ]
    assert "old" not in shown(place)
    assert "ImportError: new" in lines[0] and RUN_BEGINS in lines[1] and lines[-1].endswith("Traceback of new")
    assert len(shown(place, "--all").splitlines()) == sum(map(len, FILES.values()))
    assert shown(place, "router", "--tail", "1") == "router | Traceback of new\n"
    assert shown(place, "prefill-0") == ""
    assert CliRunner().invoke(app, ["logs", "--grep", "old", *place]).exit_code == 1
    assert len(shown(place, "--grep", "old", "--all").splitlines()) == 6


def test_without_a_known_beginning_all_is_shown(tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text("what an older version wrote\n")
    assert Run.of(tmp_path) == Run()
    assert [line.text for line in Logs(tmp_path).read_run(Run.of(tmp_path), None, 50)] == [
        "what an older version wrote"
    ]


def test_following_ends_with_the_cluster(tmp_path: Path, place: list[str]) -> None:
    """With exit code 0 and a word; what was written until then is shown. Of one that does not run: at once."""
    at_once = CliRunner().invoke(app, ["logs", "-f", *place])
    assert (at_once.exit_code, at_once.stderr) == (0, "cluster 'two-runs' does not run: its logs end here\n")
    assert at_once.stdout == shown(place)
    lock = ClusterLock(tmp_path, "two-runs")
    assert lock.acquire(0)
    command = [sys.executable, "-m", "pdctl.cli", "logs", "supervisor", "-f", "-n", "1", *place]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline().endswith("supervisor new\n")
    with (log_dir(tmp_path, "two-runs") / "supervisor.log").open("a") as log:
        log.write(f"{NEW}:05.000Z I supervisor is up\n")
    assert following.stdout.readline().endswith("supervisor is up\n")
    with (log_dir(tmp_path, "two-runs") / "supervisor.log").open("a") as log:
        log.write(f"{NEW}:06.000Z I supervisor goes\n")
    lock.release(remove=True)
    out, err = following.communicate(timeout=WATCHDOG_S)
    assert (following.returncode, err) == (0, "cluster 'two-runs' does not run: its logs end here\n")
    assert out.endswith("supervisor goes\n")
