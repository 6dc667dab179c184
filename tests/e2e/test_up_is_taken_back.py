"""A start that does not come to its end leaves nothing, whatever ended it; and one whose streams are missing does."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import cluster as clusters
from pdctl.transport.names import MAX_SOCKET_PATH_BYTES, control_path

pytestmark = pytest.mark.e2e

CLI = [sys.executable, "-m", "pdctl.cli"]
WATCHDOG_S = 180


def options(model: Path) -> list[str]:
    small = ["--kv-blocks", "64", "--max-context", "512", "--threads", "1", "--dtype", "float32"]
    return ["up", "--port", "0", "--model", str(model), *small]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not in {WATCHDOG_S} s")


@pytest.fixture
def cluster(start: Any) -> Any:
    """A cluster that is not started yet; taken down, and looked after, in any case."""
    return start("--model", "/nowhere", expect_up=False)


def place(cluster: Any) -> list[str]:
    return ["--name", cluster.name, "--state-dir", str(cluster.state_dir)]


def test_the_terminal_closes(cluster: Any, tiny_dir: Path) -> None:
    """SIGHUP, and every further word to the terminal is an error: the cluster is down before the command ends."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    up = subprocess.Popen(
        [*CLI, *options(tiny_dir), *place(cluster)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    try:
        wait_for(lambda: clusters.find_supervisor(cluster.state_dir, cluster.name), "the supervisor").close()
    finally:
        os.close(ours)
    assert up.wait(WATCHDOG_S) == 128 + signal.SIGHUP
    cluster.assert_clean()


def test_the_command_is_killed(cluster: Any, tiny_dir: Path) -> None:
    """SIGKILL: it can take nothing back; the supervisor sees that nobody waits for the start any more."""
    up = subprocess.Popen([*CLI, *options(tiny_dir), *place(cluster)], stderr=subprocess.DEVNULL)
    supervisor = wait_for(lambda: clusters.find_supervisor(cluster.state_dir, cluster.name), "the supervisor")
    up.kill()
    up.wait()
    assert supervisor.is_gone(WATCHDOG_S)
    supervisor.close()
    cluster.assert_clean()


def test_nobody_reads_what_it_says(cluster: Any, tiny_dir: Path) -> None:
    """As with `2>&1 | head -1`: what is said next ends the command, and with it the cluster."""
    up = subprocess.Popen([*CLI, *options(tiny_dir), *place(cluster)], stderr=subprocess.PIPE)
    assert up.stderr is not None
    assert up.stderr.readline()
    up.stderr.close()
    assert up.wait(WATCHDOG_S) == -signal.SIGPIPE
    cluster.assert_clean()


def test_a_start_that_never_says_anything_more(cluster: Any, tiny_dir: Path) -> None:
    """Its files are on a file system that hangs, say: after the deadline the stage is named, and nothing is left."""
    up = subprocess.Popen(
        [*CLI, *options(tiny_dir), *place(cluster), "--timeout", "6"], stderr=subprocess.PIPE, text=True
    )
    found = wait_for(
        lambda: clusters.find_supervisor(cluster.state_dir, cluster.name) or up.poll() is not None, "the supervisor"
    )
    if up.poll() is None:
        found.send(signal.SIGSTOP)
        found.close()
    _, err = up.communicate(timeout=WATCHDOG_S)
    assert up.returncode == 6, err
    assert "not up after 6 s; under way: " in err and "Traceback" not in err
    assert f"cluster {cluster.name!r} is down again" in err
    cluster.assert_clean()


def test_missing_streams_and_a_long_path_are_no_obstacle(start: Any, tiny_dir: Path, tmp_path: Path) -> None:
    """One cluster, in a directory whose sockets' paths fit in no address; asked from shells that look elsewhere."""
    cluster = start("--model", "/nowhere", expect_up=False)
    cluster.state_dir = tmp_path / ("d" * 120) / "state"
    named = f"--name {cluster.name}"
    environment = {**os.environ, "PDCTL_STATE_DIR": str(cluster.state_dir)}

    def shell(arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", f"'{sys.executable}' -m pdctl.cli {arguments} {named}"],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
            check=False,
        )

    try:
        up = subprocess.run(
            ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *CLI, *options(tiny_dir), "--name", cluster.name],
            env=environment,
            timeout=WATCHDOG_S,
            check=False,
        )
        assert up.returncode == 0, cluster.cli("logs").out
        assert len(os.fsencode(control_path(cluster.state_dir / cluster.name))) > MAX_SOCKET_PATH_BYTES
        assert sorted(path.name for path in (cluster.state_dir / cluster.name).glob("bell-*"))
        # What asks it through its control socket, with and without streams.
        assert shell("status >&- 2>&- <&-").returncode == 0
        scaled = shell("scale decode=2 2>&-")
        assert (scaled.returncode, scaled.stderr) == (0, ""), scaled
        assert cluster.state.spec.num_decode == 2
        asked = shell("generate hello --max-tokens 3 <&-")
        assert asked.returncode == 0 and asked.stdout and asked.stderr == "", asked
        assert shell("generate <&-").returncode == 2
        silent = shell("generate hello --max-tokens 3 >&-")
        assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", ""), silent
        # From cron, say, whose environment has another default.
        there = tmp_path / "elsewhere"
        elsewhere = {"PDCTL_STATE_DIR": str(there)}
        told = f"cluster {cluster.name!r}: nothing of it in {there}; it runs in {cluster.state_dir}\n"
        found = shell("generate hello --max-tokens 3", **elsewhere)
        assert (found.returncode, found.stdout, found.stderr) == (0, asked.stdout, told), found
        second = shell(" ".join(f"'{word}'" for word in options(tiny_dir)), **elsewhere)
        assert second.returncode == 7 and str(cluster.state_dir) in second.stderr, second
        ended = shell("down", **elsewhere)
        assert (ended.returncode, ended.stderr) == (0, f"{told}cluster {cluster.name!r}: down\n")
        cluster.assert_clean()
        assert not (there / cluster.name).exists()
    finally:
        cluster.cli("down")
