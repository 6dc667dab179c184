"""`pdctl bench engine` below its command line: what is left out, the arithmetic of limits, and a tiny model timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdctl.core.bench import engine
from pdctl.core.bench.engine import STEPS, Cell, Plan, Profile, run
from pdctl.core.bench.helper import HelperError
from pdctl.core.bench.limits import Limits, Shape, Work
from pdctl.core.config import ClusterSpec

# A model small enough to reckon with: 10 bytes in layers, 3 numbers multiplied in them.
SMALL = Shape(
    layer_weight_bytes=1000,
    layer_weights=300,
    head_weight_bytes=400,
    head_weights=100,
    token_bytes=8,
    num_layers=2,
    num_heads=3,
    head_dim=5,
)


def spec_for(path: Path, **changes: Any) -> ClusterSpec:
    """Of the tiny checkpoint of conftest.py."""
    values: dict[str, Any] = {
        "name": "test",
        "state_dir": Path("/tmp"),
        "model_path": path,
        "model_name": "tiny",
        "fingerprint": 0,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 384,
        "eos_token_ids": (),
        "dtype": "float32",
        "max_context": 256,
        "chunk_tokens": 32,
        "threads_prefill": 2,
        "threads_decode": 1,
    }
    return ClusterSpec(**{**values, **changes})


def plan_for(path: Path, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "spec": spec_for(path),
        "batches": (1, 3),
        "contexts": (16, 130),
        "prompts": (1, 40),
        "rounds": 1,
        "max_kv_bytes": 1 << 30,
    }
    return Plan(**{**values, **changes})


# --- limits ------------------------------------------------------------------------------------------------


def test_what_a_decode_step_has_to_do() -> None:
    # 4 x 2 layers x 3 heads x 5 = 120 operations for a query and a key.
    assert SMALL.attention_flops == 120
    work = Work.of_decode(SMALL, batch=2, context=10)
    assert work.read_bytes == 1000 + 400 + 2 * 10 * 8
    assert work.flops == 2 * (2 * 400 + 10 * 120)


def test_what_a_prefill_has_to_do() -> None:
    # Chunks of 4, 4 and 2 tokens: the weights three times, KV of 0, 4 and 8 tokens; 1 + 2 + ... + 10 keys seen.
    work = Work.of_prefill(SMALL, tokens=10, chunk_tokens=4)
    assert work.read_bytes == 3 * 1000 + 12 * 8
    assert work.flops == 10 * 2 * 300 + 55 * 120


def test_the_slower_of_the_two_binds() -> None:
    limits = Limits(threads=1, read_bytes_per_s=1e6, flops_per_s=1e7)
    assert limits.binding(Work(read_bytes=2000, flops=10_000)) == ("memory", 2.0)
    assert limits.binding(Work(read_bytes=2000, flops=50_000)) == ("compute", 5.0)


def test_the_share_of_the_limit() -> None:
    cell = Cell(batch=4, context=16, tokens=4, samples_ms=(10.0, 20.0, 30.0), limit="memory", limit_ms=5.0)
    assert (cell.share_of_limit, cell.tokens_per_s) == (0.25, 200.0)


def test_what_timers_cost() -> None:
    profile = Profile(batch=1, context=16, step_ms=9.0, phases_ms={"attention": 4.0, "engine": 6.0})
    assert profile.timers_ms == 1.0


# --- what is measured --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_left_out_and_said_to_be() -> None:
    # 768 bytes of KV a token; of the context, room for four tokens more, and whole blocks.
    plan = plan_for(Path("/none"), contexts=(16, 130, 253), prompts=(40, 300), max_kv_bytes=20 * 12_288)
    assert plan.spec.geometry.block_bytes == 12_288
    assert plan.decode_cells() == [(1, 16), (1, 130), (3, 16)]
    assert plan.prefill_cells() == [40]
    assert plan.skipped() == [
        {"batch": 1, "context": 253, "reason": "257 positions, a row holds 256 (--max-context)"},
        {"batch": 3, "context": 130, "reason": "0.3 MB of KV, allowed are 0.2 MB (--kv-gib)"},
        {"batch": 3, "context": 253, "reason": "257 positions, a row holds 256 (--max-context)"},
        {"prompt_tokens": 300, "reason": "302 positions, a row holds 256 (--max-context)"},
    ]


def test_a_step_of_every_batch_is_taken_apart_at_one_context() -> None:
    assert plan_for(Path("/none"), profiled_context=64).profiled_cells() == [(1, 16), (3, 16)]
    assert plan_for(Path("/none"), profiled_context=8).profiled_cells() == [(1, 16), (3, 16)]
    assert plan_for(Path("/none"), profiled_context=130).profiled_cells() == [(1, 130), (3, 130)]


def test_a_tiny_model_is_measured(tiny_dir: Path) -> None:
    plan = plan_for(tiny_dir, contexts=(16, 130, 300))
    seen: list[tuple[int, int]] = []
    result = run(plan, lambda done, total: seen.append((done, total)))
    # Two rounds over 4 and 2 cells, and 2 profiles.
    assert seen == [(done, 14) for done in range(15)]
    assert [(cell.batch, cell.context) for cell in result.decode] == [(1, 16), (1, 130), (3, 16), (3, 130)]
    assert [cell.tokens for cell in result.prefill] == [1, 40]
    assert all(len(cell.samples_ms) in (1, STEPS) and min(cell.samples_ms) > 0 for cell in result.decode)
    assert all(len(cell.samples_ms) == 1 and cell.samples_ms[0] > 0 for cell in result.prefill)
    assert (result.decode_limits.threads, result.prefill_limits.threads) == (1, 2)
    assert result.prefill_limits.flops_per_s >= result.decode_limits.flops_per_s > 0
    assert result.prefill_limits.read_bytes_per_s >= result.decode_limits.read_bytes_per_s > 0
    for cell in (*result.decode, *result.prefill):
        assert cell.share_of_limit > 0
    for one in result.profiles:
        assert all(ms >= 0 for ms in one.phases_ms.values())
        for phase in ("embedding", "attention", "linear layers", "output layer", "sampling"):
            assert one.phases_ms[phase] > 0
    report = result.to_json()
    assert set(report) == {
        "model",
        "dtype",
        "numerics",
        "block_tokens",
        "chunk_tokens",
        "rounds",
        "limits",
        "decode",
        "prefill",
        "profile",
        "skipped",
    }
    figures = {"p50_ms", "p99_ms", "min_ms", "tokens_per_s", "limit", "limit_ms", "share_of_limit", "samples_ms"}
    assert set(report["decode"][0]) == {"batch", "context", *figures}
    assert set(report["prefill"][0]) == {"prompt_tokens", *figures}
    assert set(report["limits"]["decode"]) == {"threads", "read_gb_per_s", "compute_gflop_per_s"}
    assert set(report["profile"][0]) == {"batch", "context", "step_ms", "timers_ms", "phases_ms"}
    assert [one["context"] for one in report["skipped"]] == [300, 300]


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PROCESS", "pdctl.core.bench.endpoint")
    with pytest.raises(HelperError, match="engine: KeyError: 'transport'"):
        run(plan_for(Path("/none")), lambda done, total: None)


# --- the process, from inside ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import tempfile

    from pdctl.core.bench.engine_process import Bench
    from pdctl.core.model import load
    from pdctl.core.numerics import numerics

    # Sockets' paths must fit: not below pytest's long directories.
    with tempfile.TemporaryDirectory() as directory:
        spec = spec_for(tiny_dir, state_dir=Path(directory), num_blocks=64, max_rows=8, local_prefill_tokens=0)
        model = load(tiny_dir, numerics("float32"))
        yield Bench(spec, model), model, spec


def test_the_weights_that_are_read_and_multiplied(bench: Any) -> None:
    from pdctl.core.bench.engine_process import shape_of

    _, model, spec = bench
    shape = Shape(**shape_of(model, spec))
    # A layer: q and o 64 x 64, k and v 64 x 32, three of 64 x 128; norms: two a layer and one.
    linear = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert shape.layer_weights == linear
    assert shape.layer_weight_bytes == 4 * (linear + 7 * 64)
    assert (shape.head_weights, shape.head_weight_bytes) == (384 * 64, 4 * 384 * 64)
    assert shape.token_bytes == 3 * 2 * 2 * 16 * 4
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (3, 4, 16)


def test_the_timed_steps_see_the_context_they_are_named_after(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdctl.core.model import Model

    stepped, _, _ = bench
    forwards: list[list[tuple[int, int]]] = []
    inner = Model.forward

    def forward(self: Model, tokens: list[int], runs: list[Any], logit_rows: list[int]) -> Any:
        forwards.append([(run.start, run.length) for run in runs])
        return inner(self, tokens, runs, logit_rows)

    monkeypatch.setattr(Model, "forward", forward)
    assert len(stepped.decode_ms(2, 100, 2)) == 2
    # The first claims the rows; position 99 sees 100 keys.
    assert forwards == [[(98, 1)] * 2, [(99, 1)] * 2, [(100, 1)] * 2]
    forwards.clear()
    assert stepped.prefill_ms(40) > 0
    assert forwards == [[(0, 32)], [(32, 8)]]


def test_cells_can_be_measured_for_ever(bench: Any) -> None:
    """Rows and blocks all come back: more rounds than the pool has room for."""
    from pdctl.transport.recovery import verify

    stepped, _, _ = bench
    for _ in range(12):
        stepped.decode_ms(3, 200, STEPS)
        stepped.prefill_ms(200)
    assert verify(stepped._segment) == []


def test_timers_leave_nothing_behind(bench: Any) -> None:
    from pdctl.core.bench.engine_process import Timers, profile
    from pdctl.core.sampler import RowSampler

    stepped, model, _ = bench
    before = RowSampler.sample
    found = profile(stepped, Timers(model), 1, 20)
    assert sum(found["phases_ms"].values()) > 0
    assert RowSampler.sample is before
    assert "forward" not in vars(model) and "attend" not in vars(model.paged)
    modules = [*model._decoder.modules(), model._head]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
