"""What one request of a load looked like to its client: the raw truth from which every figure is computed.

Arrivals of chunks, nothing derived; all times in milliseconds since the run began, on the monotonic clock. The
derived figures are those of `vllm bench serve`. Pure; made by client.py, read by figures.py and report.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request.

    Attributes:
        index: its place in the workload; the same seed makes the same request of it.
        group: what it plays in the workload ("stream" and "prompt" of the mixed one), else "".
        due_ms: when the workload wanted it sent; a maximum of concurrency may have held it back.
        sent_ms: just before it was sent.
        chunks_ms: arrivals of the chunks that bring a token: of a completion, all that have choices.
        prompt_tokens, cached_tokens, output_tokens: the server's usage, else its token ids; None: it told neither.
        token_ids: of the answer; None: the server does not tell them.
        timings: our server's own times of its phases; empty for others.
        error: why it failed; None: it did not.
        error_kind: http_<status>, connection, open_files, timeout, event, cut_off, empty, malformed or no_token_ids.
    """

    index: int
    group: str = ""
    due_ms: float
    sent_ms: float
    chunks_ms: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    error_kind: str | None = None

    @property
    def ok(self) -> bool:
        return self.error_kind is None

    @property
    def ttft_ms(self) -> float | None:
        """From just before it was sent to the first chunk that brings a token."""
        return self.chunks_ms[0] - self.sent_ms if self.chunks_ms else None

    @property
    def itls_ms(self) -> tuple[float, ...]:
        """Gaps between chunks."""
        return tuple(later - sooner for sooner, later in zip(self.chunks_ms, self.chunks_ms[1:], strict=False))

    @property
    def e2el_ms(self) -> float | None:
        """To the last chunk that brings a token."""
        return self.chunks_ms[-1] - self.sent_ms if self.chunks_ms else None

    @property
    def tpot_ms(self) -> float | None:
        """(E2EL - TTFT) / (output tokens - 1); None of an answer of one token, or of unknown length."""
        if self.output_tokens is None or self.output_tokens < 2 or not self.chunks_ms:
            return None
        return (self.chunks_ms[-1] - self.chunks_ms[0]) / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON values; times rounded to microseconds."""
        values = dataclasses.asdict(self)
        for key in ("due_ms", "sent_ms"):
            values[key] = round(values[key], 3)
        values["chunks_ms"] = [round(at, 3) for at in self.chunks_ms]
        values["token_ids"] = None if self.token_ids is None else list(self.token_ids)
        return values
