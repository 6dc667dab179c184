"""What `/metrics` tells Prometheus.

    Segment's words --read at a scrape--> counters and gauges        outlive the router
    first tokens, Choices that are done --observe--> histograms      this router's own

One registry, this router's. Counters of a daemon begin anew when it is restarted; all others count since the segment
was made. Called by api.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdctl.core.requests import Choice, RowClient, RowStream
from pdctl.transport.layout import H, P, R
from pdctl.transport.rows import TERMINAL, RowState
from pdctl.transport.segment import Role, Segment

# Buckets as vLLM has them, so that dashboards for it can be used here.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Nobody else hands over so fast that there were buckets for it.
_HANDOVER_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_NO_ROW_YET = frozenset(map(int, (*TERMINAL, RowState.FREE, RowState.FILLING)))
_READ_TRIES = 5

# Each histogram would get a second series with the time of its making.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of one router."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, client: RowClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SegmentCollector(client))
        lengths = _lengths_up_to(client.segment.geometry.max_context)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_S
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens.", _PER_TOKEN_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", _LATENCY_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Waiting for a row and then for the first daemon.", _LATENCY_S
        )
        self._handover = self._histogram(
            "handover_seconds", "From READY after prefill to a decode daemon's claim.", _HANDOVER_S
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._generation = self._histogram("request_generation_tokens", "Tokens of an answer.", lengths)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pdctl_{name}", words, buckets=buckets, registry=self._registry)

    def observe_first_token(self, stream: RowStream) -> None:
        """Note a first token when it is there: the answer may be cancelled later."""
        first_ms = stream.stats().first_token_ms
        if first_ms is not None:
            self._first_token.observe(first_ms / 1e3)

    def observe(self, choice: Choice) -> None:
        """Note an answer that is done. What did not happen once (see RowStats) is not observed."""
        stream, stats = choice.stream, choice.stream.stats()
        total_ms = (time.monotonic_ns() - stream.request.received_ns) / 1e6
        self._prompt.observe(len(stream.request.tokens))
        self._generation.observe(choice.num_tokens)
        self._latency.observe(total_ms / 1e3)
        if stats.first_token_ms is not None and choice.num_tokens > 1:
            rest_ms = max(0.0, total_ms - stats.first_token_ms)
            self._per_token.observe(rest_ms / 1e3 / (choice.num_tokens - 1))
        if stats.queue_ms is not None:
            self._queue.observe(stats.queue_ms / 1e3)
        if stats.handover_us is not None:
            self._handover.observe(stats.handover_us / 1e6)

    def text(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return prometheus_client.generate_latest(self._registry)


def _lengths_up_to(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`."""
    found, scale = [], 1
    while scale <= longest:
        found += [float(step * scale) for step in (1, 2, 5) if step * scale <= longest]
        scale *= 10
    return tuple(found)


class SegmentCollector(Collector):
    """The segment's counters as they are at the moment of a scrape."""

    def __init__(self, client: RowClient) -> None:
        self._client = client
        self._segment = client.segment
        self._generated = 0

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._pool()
        yield from self._daemons(self._segment)

    def _requests(self) -> Iterator[Metric]:
        words = self._segment.words
        outcomes = {"finished": H.FINISHED, "failed": H.FAILED, "cancelled": H.CANCELLED, "rejected": H.REJECTED}
        requests = CounterMetricFamily(
            "pdctl_requests",
            "Answers by how they ended; rejected: requests that were turned away with 429 or 503.",
            labels=["outcome"],
        )
        for outcome, word in outcomes.items():
            requests.add_metric([outcome], words[word])
        yield requests
        for name, what, word in (
            ("prompt_tokens", "Prompt tokens of answers that a daemon has begun.", H.PROMPT_TOKENS),
            ("prefix_cache_hit_tokens", "Those of them that came from the cache.", H.CACHED_TOKENS),
            ("preemptions", "Rows that lost their blocks for want of room.", H.PREEMPTIONS),
            ("adoptions", "Rows that went on with another daemon after a death.", H.ADOPTIONS),
            ("deaths", "Processes that died.", H.DEATHS),
            ("repairs", "Operations cut off by a death and undone.", H.REPAIRS),
            ("evicted_blocks", "Cached blocks that made way.", H.EVICTIONS),
        ):
            yield CounterMetricFamily(f"pdctl_{name}", what, words[word])
        yield CounterMetricFamily("pdctl_generation_tokens", "Tokens sampled.", self._count_generated())
        yield GaugeMetricFamily(
            "pdctl_requests_waiting", "Requests that wait for a daemon, their first or next.", self._client.num_queued
        )
        rows = GaugeMetricFamily("pdctl_rows", "Rows of the segment by state.", labels=["state"])
        states = self._segment.rows.states()
        for state in RowState:
            rows.add_metric([state.name.lower()], states.count(int(state)))
        yield rows

    def _count_generated(self) -> int:
        """Tokens of rows that have ended, and of those that have not: read when no row moves from here to there."""
        words, rows = self._segment.words, self._segment.rows
        for _ in range(_READ_TRIES):
            before = words[H.SEQUENCE]  # SYNC: snapshot
            live = [row for row, state in enumerate(rows.states()) if state not in _NO_ROW_YET]
            found = words[H.OUTPUT_TOKENS] + sum(rows.count_tokens(row) - rows.get(row, R.NUM_PROMPT) for row in live)
            if not before & 1 and words[H.SEQUENCE] == before:
                self._generated = max(self._generated, found)
                break
        return self._generated

    def _pool(self) -> Iterator[Metric]:
        words, num_blocks = self._segment.words, self._segment.geometry.num_blocks
        free, cached, evictable = words[H.FREE_COUNT], words[H.CACHED_COUNT], words[H.LRU_COUNT]
        blocks = GaugeMetricFamily(
            "pdctl_pool_blocks",
            "Blocks: free, owned by the row that fills them, cached and in use, cached and evictable.",
            labels=["state"],
        )
        for state, number in (
            ("free", free),
            ("owned", num_blocks - free - cached),
            ("cached", cached - evictable),
            ("evictable", evictable),
        ):
            blocks.add_metric([state], number)
        yield blocks

    def _daemons(self, segment: Segment) -> Iterator[Metric]:
        labels = ["role", "index"]
        claims = CounterMetricFamily("pdctl_daemon_claims", "Rows that a daemon took.", labels=labels)
        steps = CounterMetricFamily("pdctl_daemon_steps", "Forwards that it ran.", labels=labels)
        tokens = CounterMetricFamily("pdctl_daemon_tokens", "Tokens that it computed.", labels=[*labels, "kind"])
        busy = CounterMetricFamily("pdctl_daemon_busy_seconds", "Time that it computed.", labels=labels)
        rows = GaugeMetricFamily("pdctl_daemon_rows", "Rows that it works on.", labels=labels)
        ready = GaugeMetricFamily("pdctl_daemon_ready", "Whether it takes rows.", labels=labels)
        for role in (Role.PREFILL, Role.DECODE):
            ready_slots = self._client.readiness.ready_slots(role)
            # Slots change with every restart, a name does not; of two of one name the later one lives.
            slots = sorted(segment.slots(role), key=lambda slot: segment.participant_word(slot, P.INCARNATION))
            named = {segment.participant_word(slot, P.INDEX): slot for slot in slots}
            for index, slot in named.items():
                where = [role.label, str(index)]
                claims.add_metric(where, segment.participant_word(slot, P.CLAIMS))
                steps.add_metric(where, segment.participant_word(slot, P.STEPS))
                for kind, word in (
                    ("prefill", P.PREFILL_TOKENS),
                    ("local_prefill", P.LOCAL_PREFILL_TOKENS),
                    ("decode", P.DECODE_TOKENS),
                ):
                    tokens.add_metric([*where, kind], segment.participant_word(slot, word))
                busy.add_metric(where, segment.participant_word(slot, P.BUSY_NS) / 1e9)
                rows.add_metric(where, segment.participant_word(slot, P.LOAD))
                ready.add_metric(where, slot in ready_slots)
        yield from (claims, steps, tokens, busy, rows, ready)
