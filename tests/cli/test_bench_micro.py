"""The commands `pdctl bench handoff` and `pdctl bench engine`: what they print, their exit codes, how they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from model_files import make_model
from rich.console import Console
from rich.table import Table

from pdctl.cli.bench_micro_tables import engine_tables, handoff_tables
from pdctl.cli.bench_run import numbers
from pdctl.cli.main import main
from pdctl.core.bench import engine, handoff, results
from pdctl.core.bench.handoff import KINDS, Cell, Kind, Result
from pdctl.core.bench.limits import Limits
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
    document = json.loads(capsys.readouterr().out)
    result = document["results"]
    assert [cell["transport"] for cell in result["cells"]] == ["pdctl", "unix"]
    assert result["geometry"]["token_bytes"] == 512
    assert results.load(file) == document


def test_a_busy_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: list[engine.Plan]
) -> None:
    """As `compare` does; and no figure says that the machine was idle."""
    shares = [100.0, 2.0, 100.0]
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: shares.pop(0))
    model, small = str(make_model(tmp_path / "tiny")), [*SMALL, "--transports", "pdctl"]
    for arguments, is_busy in ((small, True), (small, False), (["bench", "engine", "--model", model], True)):
        assert pdctl(monkeypatch, *arguments) == 0
        out, err = capsys.readouterr()
        assert ("the machine was busy (100% of its cores)" in err) is is_busy
        assert "idle" not in out + err


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
        (["--kv-bytes-per-token", "512", "--model", "smollm2"], "leave out --model"),
        (["--kv-bytes-per-token", "512", "--dtype", "float32"], "leave out --model and --dtype"),
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


@pytest.mark.parametrize("samples_ms", [0.0001, 0.02, 1.234, 99.99, 4321.0])
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
def test_however_it_ends_nothing_is_left(number: signal.Signals) -> None:
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
    directory = Path(tempfile.mkdtemp(prefix="pdctl-"))  # not pytest's: sockets have short names
    bench = psutil.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(directory)},
        # Tests in a shell's background have SIGINT ignored, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
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
        assert list(directory.iterdir()) == []
    shutil.rmtree(directory)


def test_its_processes_load_no_torch() -> None:
    code = (
        "import sys, pdctl.core.bench.endpoint, pdctl.core.bench.memory_load\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- pdctl bench engine ------------------------------------------------------------------------------------


def engine_result(plan: engine.Plan, ms: float) -> engine.Result:
    """What a measured plan gives, every figure made of `ms`."""

    def cell(batch: int, context: int, tokens: int) -> engine.Cell:
        return engine.Cell(
            batch=batch,
            context=context,
            tokens=tokens,
            samples_ms=(ms, 2 * ms),
            limit="compute",
            limit_ms=ms * 0.75,
        )

    phases = ("embedding", "attention", "linear layers", "output layer", "norms, rope, rest", "sampling", "engine")
    return engine.Result(
        plan=plan,
        decode_limits=Limits(threads=1, read_bytes_per_s=123.4e9, flops_per_s=4321e9),
        prefill_limits=Limits(threads=64, read_bytes_per_s=234.5e9, flops_per_s=54321e9),
        decode=tuple(cell(batch, context, batch) for batch, context in plan.decode_cells()),
        prefill=tuple(cell(1, tokens, tokens) for tokens in plan.prefill_cells()),
        profiles=tuple(
            engine.Profile(batch=batch, context=context, step_ms=7 * ms, phases_ms=dict.fromkeys(phases, ms))
            for batch, context in plan.profiled_cells()
        ),
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[engine.Plan]:
    """What `pdctl bench engine` was about to measure; nothing is."""
    plans: list[engine.Plan] = []

    def run(plan: engine.Plan, progress: Callable[[int, int], None]) -> engine.Result:
        plans.append(plan)
        progress(0, 1)
        return engine_result(plan, 10.0)

    monkeypatch.setattr(engine, "run", run)
    return plans


def test_an_engine_plan_is_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: list[engine.Plan]
) -> None:
    model, file = str(make_model(tmp_path / "tiny")), tmp_path / "engine.json"
    arguments = ["--model", model, "--dtype", "float32", "--threads", "3", "--chunk-tokens", "64"]
    arguments += ["--batches", "2,1", "--contexts", "16,90", "--prompts", "8", "--rounds", "4"]
    assert pdctl(monkeypatch, "bench", "engine", *arguments, "--json", "-o", str(file)) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == results.load(file)
    (plan,) = planned
    spec = plan.spec
    assert (plan.batches, plan.contexts, plan.prompts, plan.rounds) == ((1, 2), (16, 90), (8,), 4)
    assert (spec.dtype, spec.threads_prefill, spec.threads_decode, spec.chunk_tokens) == ("float32", 3, 2, 64)
    # The model has 64 positions.
    assert [one["context"] for one in json.loads(out)["results"]["skipped"]] == [90, 90]
    assert [(one["batch"], one["context"]) for one in json.loads(out)["results"]["decode"]] == [(1, 16), (2, 16)]
    assert json.loads(out)["results"]["decode"][0]["share_of_limit"] == 0.5


def test_an_engine_table_names_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: list[engine.Plan]
) -> None:
    assert pdctl(monkeypatch, "bench", "engine", "--model", str(make_model(tmp_path / "tiny")), "--quick") == 0
    out, err = capsys.readouterr()
    assert planned[0].rounds == 3
    assert "left out: batch 8 context 256: 260 positions, a row holds 64 (--max-context)" in err
    assert "left out: prompt tokens 512" in err
    row = next(line for line in out.splitlines() if line.split()[:2] == ["8", "16"])
    # 10 and 20 ms: the median is 15, the 99th percentile 19.9; 8 tokens a step; the least is 7.5 ms.
    assert row.split() == ["8", "16", "15.0", "(19.9)", "533", "7.50", "compute", "50", "%"]


@pytest.mark.parametrize("ms", [0.0001, 0.01, 3.21, 98.76, 12345.0])
def test_the_engine_tables_fit_80_columns_whatever_they_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned: list[engine.Plan], ms: float
) -> None:
    model = str(make_model(tmp_path / "tiny", max_position_embeddings=32768))
    assert pdctl(monkeypatch, "bench", "engine", "--model", model) == 0
    lines = lines_of(*engine_tables(engine_result(planned[0], ms)))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any("step without timers" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--batches", "1,two"], 2, "--batches '1,two'"),
        (["--dtype", "int3"], 2, "--dtype int3"),
        (["--threads", "0"], 2, "--threads 0"),
        (["--kv-gib", "-1"], 2, "--kv-gib -1"),
        (["--kv-gib", "1000000"], 5, "memory has"),
        (["--max-context", "4096"], 2, "--max-context 4096"),
        (["--contexts", "80", "--prompts", "90"], 2, "nothing to measure: 84 positions, a row holds 64"),
    ],
)
def test_engine_usage_errors(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    planned: list[engine.Plan],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    model = str(make_model(tmp_path / "tiny"))
    assert pdctl(monkeypatch, "bench", "engine", "--model", model, *arguments) == code
    assert says in capsys.readouterr().err
    assert planned == []
