"""`pdctl bench compare` with real clusters of its own; the quick table of a running one: test_load.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdctl.core.bench import results
from pdctl.core.cluster import is_locked, list_clusters
from pdctl.transport.names import segments_of

pytestmark = pytest.mark.e2e

WATCHDOG_S = 200
NAMES = ("bench-disaggregated", "bench-colocated")


def compare(tiny_dir: Path, state_dir: Path, *arguments: str) -> list[str]:
    sizes = [
        "-n",
        "3",
        "--input-len",
        "70",
        "--output-len",
        "24",
        "--streams",
        "2",
        "--rounds",
        "2",
        "--quiet-wait",
        "0",
    ]
    up = ["--model", str(tiny_dir), "--dtype", "float32", "--kv-blocks", "256"]
    where = ["--state-dir", str(state_dir)]
    return [sys.executable, "-m", "pdctl.cli", "bench", "compare", *sizes, *where, *arguments, "--", *up]


def assert_nothing_is_left(state_dir: Path) -> None:
    assert list_clusters(state_dir) == []
    assert [segment for name in NAMES for segment in segments_of(name)] == []


def test_two_clusters_are_compared_and_taken_down(tiny_dir: Path, tmp_path: Path) -> None:
    file, state_dir = tmp_path / "out.json", tmp_path / "s"
    done = subprocess.run(
        compare(tiny_dir, state_dir, "--chunk-tokens", "32", "-o", str(file)),
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith(("mixed,", "random,")))
    assert "Tokens: 16 of 16 answers equal, id by id" in done.stdout
    document = results.load(file)
    names = [system["name"] for system in document["results"]["systems"]]
    assert names == ["disaggregated", "colocated"]
    for system in document["results"]["systems"]:
        for entry in system["workloads"].values():
            assert [one["summary"]["failed"] for one in entry["rounds"]] == [0, 0]
            # No prompt is known to a prefix cache: neither from another round nor from another workload.
            assert [one["summary"]["total_cached_tokens"] for one in entry["rounds"]] == [0, 0]
    assert_nothing_is_left(state_dir)


@pytest.mark.parametrize(("number", "begun"), [(signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_however_a_comparison_ends_its_clusters_go(
    tiny_dir: Path, tmp_path: Path, number: signal.Signals, begun: int
) -> None:
    """While its first cluster starts; and while its second does: then the first is up, and the sweep has begun."""
    state_dir = tmp_path / "s"
    bench = subprocess.Popen(
        compare(tiny_dir, state_dir),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Tests in a shell's background have SIGINT ignored, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert bench.stderr is not None
    told = iter(bench.stderr.readline, "")
    assert [next(told).split()[:2] for _ in range(begun)] == [["pdctl", "up"]] * begun
    os.kill(bench.pid, number)
    code = bench.wait(WATCHDOG_S)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    bench.stderr.close()
    if number is signal.SIGKILL:
        # The clusters' commands are killed with it, and what they supervise goes then; what stays is for gc.
        deadline = time.monotonic() + WATCHDOG_S
        while any(is_locked(state_dir, name) for name in NAMES):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        subprocess.run(
            [sys.executable, "-m", "pdctl.cli", "gc", "--state-dir", str(state_dir)], check=True, timeout=60
        )
    assert_nothing_is_left(state_dir)
