"""When everything is collected: in a quiet moment, or when there has been none for long."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pdctl.core.server import collector as collector_module
from pdctl.core.server.collector import Collector


def test_it_waits_for_a_quiet_moment_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = 1000
    collector = Collector(lambda: num_requests)
    gc.collect()
    gc.collect(1)
    assert not collector.collect()
    num_requests = 3
    assert collector.collect()
    assert not collector.collect()  # nothing has been allocated to speak of
    num_requests = 1000
    gc.collect(1)
    assert not collector.collect()
    monkeypatch.setattr(collector_module, "_LONGEST_WAIT_S", -1.0)
    assert collector.collect()


def test_from_its_start_on_nothing_else_collects_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "INTERVAL_S", 0.01)
    asked = asyncio.Event()

    def num_requests() -> int:
        asked.set()
        return 1000

    async def run() -> None:
        Collector(num_requests).start()
        assert gc.get_freeze_count() > 0
        before = gc.get_stats()[2]["collections"]
        kept = [[number] for number in range(200_000)]
        await asyncio.wait_for(asked.wait(), 30)
        assert len(kept) and gc.get_stats()[2]["collections"] == before

    usual = gc.get_threshold()
    try:
        asyncio.run(run())
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
