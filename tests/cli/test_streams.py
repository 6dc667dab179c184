"""Standard streams that are missing, full, or that nobody reads: the right exit code, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WATCHDOG_S = 60
PDCTL = f"'{sys.executable}' -m pdctl.cli"


def shell(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "PDCTL_STATE_DIR": str(tmp_path / "s"), "PDCTL_NAME": f"streams-{os.getpid()}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("status 2>&-", 3),
        ("up --model /nowhere 2>&-", 2),
        ("ls >&-", 0),
        ("--version >&-", 0),
        ("status --json >&- 2>&-", 3),
        ("generate <&-", 3),
        ("down <&- >&- 2>&-", 0),
        ("nonsense 2>&-", 2),
    ],
)
def test_a_missing_stream_changes_no_exit_code(tmp_path: Path, command: str, code: int) -> None:
    done = shell(f"{PDCTL} {command}", tmp_path)
    assert done.returncode == code, done
    assert "Traceback" not in done.stdout + done.stderr and "Exception" not in done.stdout + done.stderr
    assert ("2>&-" not in command) or done.stderr == ""


def test_no_file_gets_the_number_of_a_missing_stream(tmp_path: Path) -> None:
    """Else what is complained of would be written into it; children find streams as well."""
    code = (
        "from pdctl.cli.output import open_missing_streams; open_missing_streams(); import os, sys, subprocess\n"
        "assert os.open('/dev/null', os.O_RDONLY) > 2\n"
        "assert all(os.get_inheritable(number) for number in range(3))\n"
        "sys.stdout.write('x'); sys.stdout.flush(); sys.stderr.write('\\udcff'); assert sys.stdin.read() == ''\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'import os; [os.fstat(number) for number in range(3)]']))\n"
    )
    done = shell(f"'{sys.executable}' -c \"{code}\" <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0, done


@pytest.mark.parametrize("command", ["ls --json", "--help", "--version"])
def test_a_full_disk_is_an_error_with_words(tmp_path: Path, command: str) -> None:
    """Also where the words are written only at the end."""
    done = shell(f"{PDCTL} {command} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr.count("No space left on device")) == (1, 1), done
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_an_error_that_nobody_can_hear_keeps_its_exit_code(tmp_path: Path) -> None:
    """The terminal is gone, or whoever read stderr."""
    for command, code in (("status", 3), ("up --model /nowhere", 2)):
        assert shell(f"{PDCTL} {command} 2> /dev/full", tmp_path).returncode == code
        read, write = os.pipe()
        os.close(read)
        ended = subprocess.run(
            [sys.executable, "-m", "pdctl.cli", *command.split()],
            env={**os.environ, "PDCTL_STATE_DIR": str(tmp_path / "s"), "PDCTL_NAME": f"streams-{os.getpid()}"},
            stderr=write,
            timeout=WATCHDOG_S,
            check=False,
        )
        os.close(write)
        assert ended.returncode == code
