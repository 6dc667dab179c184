"""`pdctl bench handoff` below its command line: real processes, a tiny geometry, and transports that fail."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdctl.core.bench import handoff, transports
from pdctl.core.bench.handoff import KINDS, Kind, Plan, geometry_for, run, whole_blocks
from pdctl.core.bench.transports import Pattern
from pdctl.transport.errors import CapacityError, UsageError
from pdctl.transport.layout import DType, Geometry
from pdctl.transport.names import segments_of

OWN = tuple(kind for kind in KINDS if not kind.modules)
TINY = Geometry(num_blocks=1, block_tokens=16, num_layers=2, num_kv_heads=1, head_dim=64, dtype=DType.BFLOAT16)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does: no process, no segment, no directory outlives the run."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    # Not pytest's: sockets have short names.
    directory = tempfile.mkdtemp(prefix="pdctl-")
    monkeypatch.setattr(tempfile, "tempdir", directory)
    processes = psutil.Process().children(recursive=True)
    yield
    until = time.monotonic() + 30
    # Tests beside this one may be between making a segment and taking its name away.
    while segments_of("bench") and time.monotonic() < until:
        time.sleep(0.05)
    assert segments_of("bench") == []
    assert psutil.Process().children(recursive=True) == processes
    Path(directory).rmdir()


def test_a_directory_too_long_for_sockets_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(UsageError, match="too long for the names of sockets"):
        run(Plan(geometry=TINY, tokens=(16,), kinds=OWN, rounds=1, load=False), lambda: None)
    assert list(long.iterdir()) == []


def failing(*names: str) -> tuple[Kind, ...]:
    return tuple(Kind(name=name, endpoint="failing_endpoint") for name in names)


def test_the_same_bytes_arrive_by_every_transport_at_every_length() -> None:
    plan = Plan(geometry=TINY, tokens=(16, 512), kinds=OWN, rounds=2, load=True)
    steps = []
    result = run(plan, lambda: steps.append(1))
    assert (result.failed, result.not_installed) == ({}, {})
    assert len(steps) == plan.num_steps == 2 * 2 * 3 * 4
    assert [(cell.transport, cell.tokens, cell.load) for cell in result.cells] == [
        (name, tokens, load)
        for load in (False, True)
        for tokens in (16, 512)
        for name in ("pdctl", "memcpy", "pipe", "unix")
    ]
    assert all(len(cell.samples_ms) == 2 and min(cell.samples_ms) > 0 for cell in result.cells)
    assert {cell.num_bytes for cell in result.cells} == {16 * 512, 512 * 512}
    assert all(cell.ratio == 1 for cell in result.cells if cell.transport == "pdctl")
    assert result.load_gb_per_s is not None and result.load_gb_per_s > 0


def test_the_keys_of_the_json() -> None:
    missing = Kind(name="nixl", modules=("surely_not_installed",), install="pip install nixl-cu12")
    plan = Plan(geometry=TINY, tokens=(16,), kinds=(*OWN[:1], missing, *failing("refuses")), rounds=1, load=False)
    result = run(plan, lambda: None).to_json()
    assert result["not_installed"] == [{"transport": "nixl", "install": "pip install nixl-cu12"}]
    assert [one["transport"] for one in result["failed"]] == ["refuses"]
    assert result["geometry"] == {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "dtype": "bfloat16",
        "block_tokens": 16,
        "token_bytes": 512,
    }
    assert set(result) == {"geometry", "rounds", "load_gb_per_s", "cells", "failed", "not_installed"}
    (cell,) = result["cells"]
    assert set(cell) == {
        "transport",
        "kv_tokens",
        "bytes",
        "load",
        "p50_ms",
        "p99_ms",
        "ratio_to_pdctl",
        "samples_ms",
    }
    assert cell["p50_ms"] == cell["samples_ms"][0]


def test_a_transport_that_fails_says_why_and_harms_no_other() -> None:
    bad = failing("corrupts", "misreads", "dies", "refuses", "prints")
    result = run(Plan(geometry=TINY, tokens=(64,), kinds=(*OWN, *bad), rounds=2, load=False), lambda: None)
    assert list(result.failed) == ["refuses", "corrupts", "misreads", "dies"]
    assert result.failed["refuses"] == "refuses sender: ImportError: libnothing.so: cannot open shared object file"
    assert "wrong bytes arrived: piece 0 of 1, byte 1234" in result.failed["corrupts"]
    assert "wrong bytes arrived: piece 0 of 4" in result.failed["misreads"]
    assert "receiver: died of SIGKILL" in result.failed["dies"]
    # What libraries print is no message.
    names = [cell.transport for cell in result.cells]
    assert names == ["pdctl", "memcpy", "pipe", "unix", "prints"]
    assert all(len(cell.samples_ms) == 2 for cell in result.cells)


def test_a_transport_that_hangs_has_failed_when_its_time_is_over() -> None:
    plan = Plan(geometry=TINY, tokens=(64,), kinds=failing("hangs"), rounds=2, load=False, timeout_s=3)
    result = run(plan, lambda: None)
    assert result.failed == {"hangs": "hangs receiver: receiving took longer than 3 s"}
    assert result.cells == ()


def test_a_pattern_sees_one_wrong_byte_and_pieces_in_another_order() -> None:
    memory = bytearray(300_000)
    pieces = [memoryview(memory)[:150_000], memoryview(memory)[150_000:]]
    Pattern(1).fill(pieces)
    assert Pattern(1).fault(pieces) is None
    assert "piece 0 of 2, byte 8" in (Pattern(2).fault(pieces) or "")
    assert "piece 0 of 2" in (Pattern(1).fault([pieces[1], pieces[0]]) or "")
    memory[299_999] ^= 1
    assert "piece 1 of 2, byte 149999" in (Pattern(1).fault(pieces) or "")


def test_a_chunk_in_another_chunks_place_is_seen() -> None:
    memory = bytearray(4 * transports._CHUNK_BYTES)
    Pattern(1).fill([memoryview(memory)])
    size = transports._CHUNK_BYTES
    memory[:size], memory[size : 2 * size] = memory[size : 2 * size], memory[:size]
    assert "byte 4" in (Pattern(1).fault([memoryview(memory)]) or "")


def test_a_hand_over_that_does_not_fit_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "available_bytes", lambda: (1 << 20, "/dev/shm"))
    with pytest.raises(CapacityError, match=r"4096 tokens: want \d+ bytes, /dev/shm has 1048576"):
        run(Plan(geometry=TINY, tokens=(4096,)), lambda: None)


def test_lengths_become_whole_blocks() -> None:
    assert whole_blocks((1, 16, 17, 30), 16) == (16, 32)


@pytest.mark.parametrize("token_bytes", [4, 512, 23_040, 46_080, 131_072, 4 * 7919])
def test_a_geometry_has_the_bytes_that_were_asked_for(token_bytes: int) -> None:
    assert geometry_for(token_bytes).token_bytes == token_bytes


@pytest.mark.parametrize("token_bytes", [0, -4, 3, 1001])
def test_bytes_that_no_geometry_has(token_bytes: int) -> None:
    with pytest.raises(UsageError, match=f"--kv-bytes-per-token {token_bytes}"):
        geometry_for(token_bytes)
