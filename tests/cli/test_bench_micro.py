"""The commands `pdctl bench handoff` and `pdctl bench engine`: what they print, their exit codes, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from rich.table import Table

from pdctl.cli.bench_micro_tables import handoff_tables
from pdctl.cli.bench_run import numbers
from pdctl.cli.main import main
from pdctl.core.bench import handoff
from pdctl.core.bench.handoff import KINDS, Cell, Kind, Result
from pdctl.transport.errors import UsageError
from pdctl.transport.layout import DType, Geometry
from pdctl.transport.names import segments_of

SMALL = ["bench", "handoff", "--tokens", "16", "--kv-bytes-per-token", "512", "--rounds", "2", "--no-load"]


def pdctl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command that runs in this process."""
    monkeypatch.setattr(sys, "argv", ["pdctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def lines_of(*tables: Table) -> list[str]:
    console = Console(width=80, highlight=False, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text().splitlines()


def test_json_on_stdout_and_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    assert pdctl(monkeypatch, *SMALL, "--transports", "unix,pdctl", "--json", "--output", str(file)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["transport"] for cell in result["cells"]] == ["pdctl", "unix"]
    assert result["geometry"]["token_bytes"] == 512
    assert json.loads(file.read_text()) == result


def test_what_fails_is_an_error_and_what_is_not_there_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Kind(name="nixl", modules=("surely_not_installed",), install="pip install nixl-cu12")
    broken = Kind(name="mooncake", endpoint="pdctl.core.bench.no_such_module")
    monkeypatch.setattr(handoff, "KINDS", (*KINDS[:2], missing, broken))
    assert pdctl(monkeypatch, *SMALL) == 1
    out, err = capsys.readouterr()
    assert "nixl: not installed (pip install nixl-cu12)" in err
    assert "pdctl: mooncake failed: mooncake sender: ended with exit code 1" in err
    assert "No module named pdctl.core.bench.no_such_module" in err
    assert "memcpy" in out and "mooncake" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "16,x"], "--tokens '16,x'"),
        (["--tokens", "0"], "--tokens '0'"),
        (["--transports", "pdctl,carrier-pigeon"], "--transports carrier-pigeon"),
        (["--kv-bytes-per-token", "3"], "--kv-bytes-per-token 3"),
        (["--kv-bytes-per-token", "512", "--model", "smollm2"], "give one of them"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--output", "/no/such/place/file.json"], "--output /no/such/place/file.json"),
    ],
)
def test_usage_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert pdctl(monkeypatch, "bench", "handoff", *arguments) == 2
    assert says in capsys.readouterr().err


def test_lists_of_numbers() -> None:
    assert numbers("--tokens", "256, 16,16,1_024") == (16, 256, 1024)
    for wrong in ("", ",", "1,,2", "-1", "1.5", "99999999"):
        with pytest.raises(UsageError, match="--tokens"):
            numbers("--tokens", wrong)


def handoff_result(samples_ms: float) -> Result:
    geometry = Geometry(
        num_blocks=1, block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype=DType.BFLOAT16
    )
    cells = tuple(
        Cell(
            transport=kind.name,
            tokens=tokens,
            num_bytes=tokens * geometry.token_bytes,
            load=load,
            samples_ms=[samples_ms, samples_ms * 1.5],
            ratio=samples_ms,
        )
        for load in (False, True)
        for tokens in (16, 16384)
        for kind in KINDS
    )
    return Result(geometry=geometry, rounds=2, cells=cells, failed={}, not_installed={}, load_gb_per_s=12.34)


@pytest.mark.parametrize("samples_ms", [0.02, 1.234, 99.99, 4321.0])
def test_the_hand_over_tables_fit_80_columns_whatever_they_say(samples_ms: float) -> None:
    lines = lines_of(*handoff_tables(handoff_result(samples_ms)))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert "mooncake" in lines[1] and "12.3 GB/s" in "".join(lines)


def test_a_hand_over_table_shows_median_99th_percentile_and_ratio() -> None:
    lines = lines_of(*handoff_tables(handoff_result(2.0)))
    # 2 and 3 ms: the median is 2.5, the 99th percentile 2.99.
    assert lines[2].split()[:3] == ["16", "2.50", "(2.99)"]
    assert lines[3].split() == ["0.37", "MB", *["2.00x"] * 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    """Killed in the middle: no process and no segment stays; what is asked to end leaves no directory either."""
    command = [
        sys.executable,
        "-m",
        "pdctl.cli",
        *SMALL[:6],
        "--rounds",
        "1000",
        "--load",
        "--transports",
        "pdctl,pipe",
    ]
    bench = psutil.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        # The load, then pdctl's two: with the fourth, the segment has lost its name.
        helpers: list[psutil.Process] = []
        while len(helpers) < 4:
            assert bench.poll() is None
            helpers = bench.children(recursive=True)
            time.sleep(0.01)
        bench.send_signal(number)
        code = bench.wait(60)
    finally:
        if bench.poll() is None:
            bench.kill()
    assert code in {signal.SIGINT: (130,), signal.SIGTERM: (143,), signal.SIGKILL: (-9,)}[number]
    _, alive = psutil.wait_procs(helpers, 30)
    assert alive == []
    until = time.monotonic() + 30
    # Tests beside this one may be between making a segment and taking its name away.
    while segments_of("bench") and time.monotonic() < until:
        time.sleep(0.05)
    assert segments_of("bench") == []
    if number is not signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_its_processes_load_no_torch() -> None:
    code = (
        "import sys, pdctl.core.bench.endpoint, pdctl.core.bench.load\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
