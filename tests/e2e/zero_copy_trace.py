"""One side of two hand-overs, traced: `python zero_copy_trace.py prefill|decode MODEL SEGMENT`.

Prints a line of JSON for row 0 and one for row 1: bytes that torch allocated, peak of Python's own allocations, and
page faults, between the two ends of the trace. For row 1 decode makes one deliberate copy of its blocks: the control.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pdctl.core import attention
from pdctl.core.config import ClusterSpec
from pdctl.core.daemon import map_pages
from pdctl.core.decode import DecodeEngine
from pdctl.core.model import load
from pdctl.core.numerics import numerics
from pdctl.core.prefill import PrefillEngine
from pdctl.core.wake import Wake
from pdctl.transport.layout import R
from pdctl.transport.names import parse_segment_name
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, Segment


class Trace:
    """Counts from `start` to `stop`."""

    def __init__(self) -> None:
        self.result: dict[str, int] = {}
        self._profile: Any = None

    def start(self) -> None:
        tracemalloc.start()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        self._faults = self._count_faults()

    def stop(self) -> None:
        if self._profile is None:
            return
        faults = self._count_faults() - self._faults
        peak = tracemalloc.get_traced_memory()[1] - self._before
        profiled, self._profile = self._profile, None
        profiled.__exit__(None, None, None)
        tracemalloc.stop()
        torch_bytes = sum(max(0, event.cpu_memory_usage) for event in profiled.events() if event.name == "[memory]")
        torch_bytes += sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
        self.result = {"torch_bytes": torch_bytes, "python_peak_bytes": peak, "fault_bytes": faults * 4096}

    @staticmethod
    def _count_faults() -> int:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_minflt + usage.ru_majflt


class NoBell:
    """The other process polls."""

    def ring(self, slot: int) -> None:
        pass


def main(side: str, spec_path: str, segment_name: str) -> None:
    spec = ClusterSpec.from_json(Path(spec_path).read_text())
    torch.set_num_threads(1)
    model = load(spec.model_path, numerics(spec.dtype))
    name = parse_segment_name(segment_name)
    assert name is not None
    segment = Segment.open(name, expected=spec.expected)
    me = segment.attach(Role.PREFILL if side == "prefill" else Role.DECODE)
    pages = map_pages(segment)
    # Warm: the first forward loads kernels, the first use of the profiler its own library.
    model.use_pages(torch.zeros((4, *pages.shape[1:]), dtype=pages.dtype))
    for _ in range(2):
        model.forward([5, 6], [attention.TokenRun(block_table=[0], start=0, length=2)], [1])
        model.forward([5], [attention.TokenRun(block_table=[0], start=2, length=1)], [0])
    model.use_pages(pages)
    segment.mapping.populate(segment.layout.kv_offset, segment.geometry.kv_bytes, write=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.zeros(4)

    trace = Trace()
    rows = segment.rows
    wake = Wake(segment, me.slot, NoBell())  # type: ignore[arg-type]
    if side == "prefill":
        engine = PrefillEngine(segment, me, model, spec, wake)
        real = model.forward
        now = [0]

        def forward(tokens: Any, runs: Any, logit_rows: Any) -> Any:
            out = real(tokens, runs, logit_rows)
            if runs[0].start + runs[0].length == rows.get(now[0], R.NUM_PROMPT) - 1:
                trace.start()
            return out

        model.forward = forward  # type: ignore[method-assign]
        print("attached", flush=True)
        for row in range(2):
            now[0] = row
            until(lambda row=row: engine.step() and rows.state(row) is RowState.READY)
            trace.stop()
            print(json.dumps(trace.result), flush=True)
    else:
        decode = DecodeEngine(segment, me, model, spec, wake)
        copied: list[int] = []
        for runs in (attention._DecodeRuns, attention._Chunk):
            real_attend = runs.attend

            def attend(self: Any, *arguments: Any, _real: Any = real_attend) -> Any:
                if copied:
                    pages[torch.tensor(rows.block_table(copied[0]))].clone()
                trace.stop()
                return _real(self, *arguments)

            runs.attend = attend  # type: ignore[method-assign]
        print("attached", flush=True)
        for row in range(2):
            until(lambda row=row: rows.state(row) is RowState.READY)
            copied += [row] * row
            trace.start()
            until(lambda row=row: decode.step() and rows.state(row) is RowState.FINISHED)
            print(json.dumps(trace.result), flush=True)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("deadline")
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
