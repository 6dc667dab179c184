"""`pdctl bench engine`: what a decode step and a prefill take without a cluster, against the machine's limits.

Decides what is measured and adds up what came; the measuring is done by a process of its own (engine_process.py),
in the environment that daemons have. No torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdctl.core.bench.figures import Series
from pdctl.core.bench.helper import Helper
from pdctl.core.bench.limits import Limits, Shape, Work
from pdctl.core.config import ClusterSpec
from pdctl.core.numerics import environment, numerics

_PROCESS = "pdctl.core.bench.engine_process"
# Timed steps of one cell and round; before them one that claims the rows, and behind them room for one token more.
STEPS = 3
_LOAD_S = 600.0
_CELL_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        spec: of a cluster that is never made: model, dtype, threads, chunk. Its pool is sized by `run`.
        batches, contexts: of decode steps, each with each.
        prompts: lengths to prefill.
        max_kv_bytes: of the pool; what does not fit is left out, and said to be.
        profiled_context: of the steps that are taken apart.
    """

    spec: ClusterSpec
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    rounds: int
    max_kv_bytes: int
    profiled_context: int = 256

    def blocks_of_decode(self, batch: int, context: int) -> int:
        return batch * self._blocks(context + STEPS + 1)

    def blocks_of_prefill(self, tokens: int) -> int:
        return self._blocks(tokens + 2)

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.spec.block_tokens)

    def decode_cells(self) -> list[tuple[int, int]]:
        """(batch, context) of all that can be measured."""
        return [
            (batch, context)
            for batch in self.batches
            for context in self.contexts
            if self._why_not(context + STEPS + 1, self.blocks_of_decode(batch, context)) is None
        ]

    def prefill_cells(self) -> list[int]:
        return [n for n in self.prompts if self._why_not(n + 2, self.blocks_of_prefill(n)) is None]

    def profiled_cells(self) -> list[tuple[int, int]]:
        """One cell a batch: the longest context up to `profiled_context`, else the shortest there is."""
        found = []
        for batch in self.batches:
            contexts = [context for one, context in self.decode_cells() if one == batch]
            short = [context for context in contexts if context <= self.profiled_context]
            if contexts:
                found.append((batch, max(short) if short else min(contexts)))
        return found

    def skipped(self) -> list[dict[str, Any]]:
        """What was asked for and cannot be measured, and why."""
        found: list[dict[str, Any]] = []
        for batch in self.batches:
            for context in self.contexts:
                why = self._why_not(context + STEPS + 1, self.blocks_of_decode(batch, context))
                if why is not None:
                    found.append({"batch": batch, "context": context, "reason": why})
        for tokens in self.prompts:
            if (why := self._why_not(tokens + 2, self.blocks_of_prefill(tokens))) is not None:
                found.append({"prompt_tokens": tokens, "reason": why})
        return found

    def _why_not(self, positions: int, blocks: int) -> str | None:
        if positions > self.spec.max_context:
            return f"{positions} positions, a row holds {self.spec.max_context} (--max-context)"
        num_bytes = blocks * self.spec.geometry.block_bytes
        if num_bytes > self.max_kv_bytes:
            return f"{num_bytes / 1e6:.1f} MB of KV, allowed are {self.max_kv_bytes / 1e6:.1f} MB (--kv-gib)"
        return None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing that was timed again and again.

    Attributes:
        batch, context: of a decode step; of a prefill, 1 and the prompt's tokens.
        tokens: that come out of it, or go in.
        limit: "memory" or "compute", whichever binds.
        limit_ms: what it takes at the least.
    """

    batch: int
    context: int
    tokens: int
    samples_ms: tuple[float, ...]
    limit: str
    limit_ms: float

    @property
    def series(self) -> Series:
        series = Series.of(self.samples_ms)
        assert series is not None
        return series

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.series.p50 * 1e3

    @property
    def share_of_limit(self) -> float:
        """1 is as fast as the machine can be."""
        return self.limit_ms / self.series.p50

    def to_json(self, **names: int) -> dict[str, Any]:
        return {
            **names,
            "p50_ms": self.series.p50,
            "p99_ms": self.series.p99,
            "min_ms": min(self.samples_ms),
            "tokens_per_s": self.tokens_per_s,
            "limit": self.limit,
            "limit_ms": self.limit_ms,
            "share_of_limit": self.share_of_limit,
            "samples_ms": list(self.samples_ms),
        }


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a decode step goes: medians.

    Attributes:
        step_ms: without timers in it.
        phases_ms: by phase; with timers in it, their sum is the step.
    """

    batch: int
    context: int
    step_ms: float
    phases_ms: dict[str, float]

    @property
    def timers_ms(self) -> float:
        """What the timers themselves cost."""
        return sum(self.phases_ms.values()) - self.step_ms


@dataclass(frozen=True, kw_only=True)
class Result:
    plan: Plan
    decode_limits: Limits
    prefill_limits: Limits
    decode: tuple[Cell, ...]
    prefill: tuple[Cell, ...]
    profiles: tuple[Profile, ...]

    def to_json(self) -> dict[str, Any]:
        spec = self.plan.spec
        return {
            "model": spec.model_name,
            "dtype": spec.dtype,
            "numerics": numerics(spec.dtype).label,
            "block_tokens": spec.block_tokens,
            "chunk_tokens": spec.chunk_tokens,
            "rounds": self.plan.rounds,
            "limits": {
                name: {
                    "threads": limits.threads,
                    "read_gb_per_s": limits.read_bytes_per_s / 1e9,
                    "compute_gflop_per_s": limits.flops_per_s / 1e9,
                }
                for name, limits in (("decode", self.decode_limits), ("prefill", self.prefill_limits))
            },
            "decode": [cell.to_json(batch=cell.batch, context=cell.context) for cell in self.decode],
            "prefill": [cell.to_json(prompt_tokens=cell.tokens) for cell in self.prefill],
            "profile": [
                {
                    "batch": one.batch,
                    "context": one.context,
                    "step_ms": one.step_ms,
                    "timers_ms": one.timers_ms,
                    "phases_ms": one.phases_ms,
                }
                for one in self.profiles
            ],
            "skipped": self.plan.skipped(),
        }


def run(plan: Plan, progress: Callable[[int, int], None]) -> Result:
    """Load the model in a process of its own and measure all cells that fit.

    Args:
        progress: told (done, total).

    Raises:
        PdctlError: the process failed, and why.
    """
    decode, prefill = plan.decode_cells(), plan.prefill_cells()
    blocks = [plan.blocks_of_decode(batch, context) for batch, context in decode]
    blocks += [plan.blocks_of_prefill(tokens) for tokens in prefill]
    with tempfile.TemporaryDirectory(prefix="pdctl-bench-") as directory:
        batch = max(plan.batches, default=1)
        spec = replace(
            plan.spec,
            state_dir=Path(directory),
            num_blocks=max(2, *blocks),
            max_rows=max(4, batch),
            max_batch=batch,
            local_prefill_tokens=0,
        )
        with Helper("engine", _PROCESS, Path(directory), environment=environment(numerics(spec.dtype))) as helper:
            helper.tell(
                spec=spec.to_json(),
                decode=decode,
                prefill=prefill,
                profile=plan.profiled_cells(),
                rounds=plan.rounds,
            )
            answer = helper.hear(_LOAD_S, "loading the model")
            while "done" in answer:
                progress(answer["done"], answer["total"])
                answer = helper.hear(_CELL_S, "one measurement")
    return _add_up(plan, decode, prefill, answer)


def _add_up(plan: Plan, decode: list[tuple[int, int]], prefill: list[int], found: dict[str, Any]) -> Result:
    shape = Shape(**found["shape"])
    decode_limits, prefill_limits = (Limits(**found["limits"][name]) for name in ("decode", "prefill"))

    def cell(limits: Limits, work: Work, batch: int, context: int, tokens: int, samples_ms: list[float]) -> Cell:
        limit, limit_ms = limits.binding(work)
        return Cell(
            batch=batch,
            context=context,
            tokens=tokens,
            samples_ms=tuple(samples_ms),
            limit=limit,
            limit_ms=limit_ms,
        )

    return Result(
        plan=plan,
        decode_limits=decode_limits,
        prefill_limits=prefill_limits,
        decode=tuple(
            cell(decode_limits, Work.of_decode(shape, batch, context), batch, context, batch, samples_ms)
            for (batch, context), samples_ms in zip(decode, found["decode_ms"], strict=True)
        ),
        prefill=tuple(
            cell(
                prefill_limits, Work.of_prefill(shape, tokens, plan.spec.chunk_tokens), 1, tokens, tokens, samples_ms
            )
            for tokens, samples_ms in zip(prefill, found["prefill_ms"], strict=True)
        ),
        profiles=tuple(Profile(**one) for one in found["profiles"]),
    )
