"""Two prefill and two decode daemons under mixed load, one killed or stopped every few seconds with rows in hand.

S22, S43: no answer may be another than alone, hang, fail or leak. It goes on for its time and until enough has
happened, however busy the machine is; an hour for each dtype with

    PDCTL_SOAK_S=3600 pytest -m soak -s
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.client import Client
from pdctl.core.status import private_bytes
from pdctl.transport.layout import H, P, R
from pdctl.transport.recovery import verify
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, Segment, open_to_look, take_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SOAK_S = float(os.environ.get("PDCTL_SOAK_S", "40"))
# So much has to happen; within so much more time than it is told to take.
ANSWERS, KILLS_OF_A_ROLE = 40, max(2, SOAK_S / 30)
WATCHDOG_S = 10 * SOAK_S + 600
CLIENTS = 8
ROLES = ("prefill", "decode")
SHORT, LONG = (5, 60), (300, 900)
PAUSE_S = (1.0, 3.0)


@dataclass(frozen=True)
class Ask:
    """A request whose answer is known."""

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "timings": True,
            **self.sampling,
        }


@dataclass
class Seen:
    """What happened, added up by all threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    left: int = 0
    recomputed: int = 0
    adopted: int = 0
    pauses_s: list[float] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    def note(self, **changes: Any) -> None:
        with self.lock:
            for name, value in changes.items():
                found = getattr(self, name)
                setattr(self, name, found + ([value] if isinstance(found, list) else value))


def asks(rng: random.Random) -> list[Ask]:
    """Short and long prompts, some with a beginning in common; greedy and sampled, short and long answers."""
    stem = [rng.randrange(3, 259) for _ in range(200)]
    found = []
    for index in range(24):
        length = rng.randint(*(LONG if index % 4 == 0 else SHORT))
        beginning = stem[: rng.randrange(len(stem))] if index % 3 == 0 else []
        prompt = beginning + [rng.randrange(3, 259) for _ in range(length)]
        sampling: dict[str, Any] = {"temperature": 0}
        if index % 2:
            sampling = {"temperature": 0.9, "seed": index, "top_p": 0.9, "frequency_penalty": 0.3}
        found.append(Ask(prompt, rng.choice((4, 40, 150)), sampling))
    return found


def stream(cluster: Any, ask: Ask) -> tuple[list[int], dict[str, Any], float]:
    """Ids, timings with the usage, and the longest pause between two of its chunks."""
    ids: list[int] = []
    timings: dict[str, Any] = {}
    body = {**ask.body, "stream_options": {"include_usage": True}}
    last, longest = 0.0, 0.0
    for _, chunk in Client(cluster.state.url).stream("/v1/completions", body):
        now = time.monotonic()
        if last:
            longest = max(longest, now - last)
        last = now
        if not chunk["choices"]:
            timings = {**chunk["timings"], **chunk["usage"]["prompt_tokens_details"]}
        for choice in chunk["choices"]:
            ids += choice["token_ids"]
    return ids, timings, longest


def leave(cluster: Any, ask: Ask, after_s: float) -> None:
    """Ask, and go away in the middle."""
    host, _, port = cluster.state.url.removeprefix("http://").rpartition(":")
    data = json.dumps({**ask.body, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after_s)


def client(cluster: Any, known: list[tuple[Ask, list[int]]], seen: Seen, stop: threading.Event, number: int) -> None:
    rng = random.Random(number)
    while not stop.is_set():
        ask, expected = rng.choice(known)
        if rng.random() < 0.15:
            leave(cluster, ask, rng.random())
            seen.note(left=1)
            continue
        try:
            if rng.random() < 0.6:
                ids, timings, pause_s = stream(cluster, ask)
            else:
                answer = cluster.complete(ask.prompt, ask.max_tokens, **ask.sampling)
                timings = {**answer["timings"], **answer["usage"]["prompt_tokens_details"]}
                ids, pause_s = answer["choices"][0]["token_ids"], 0.0
        except Exception as error:
            seen.note(wrong=f"{len(ask.prompt)} tokens, {ask.sampling}: {error!r}")
            continue
        if ids != expected:
            same = next((at for at, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), "end")
            seen.note(wrong=f"{len(ask.prompt)} tokens, {ask.sampling}: differs at {same}; {timings}")
        seen.note(answers=1)
        if timings["adoptions"]:
            seen.note(adopted=1)
            if pause_s:
                seen.note(pauses_s=pause_s)
            if not timings["preemptions"]:
                # Every prompt token came from the cache or was computed once, whoever died.
                done = timings["prefill_tokens"] + timings["local_tokens"] + timings["cached_tokens"]
                seen.note(recomputed=max(0, done - (len(ask.prompt) - 1)))


def segment_of(cluster: Any) -> Segment:
    return take_snapshot(cluster.state.segment_name).segment


def victims(segment: Segment) -> list[tuple[Role, int]]:
    """Daemons with rows in flight."""
    found = set()
    for role, state in ((Role.PREFILL, RowState.PREFILLING), (Role.DECODE, RowState.DECODING)):
        for row in segment.rows.in_state(state):
            slot = segment.rows.get(row, R.OWNER) - 1
            if slot in segment.slots(role):
                found.add((role, segment.participant_word(slot, P.PID)))
    return sorted(found)


def killer(cluster: Any, seen: Seen, stop: threading.Event) -> None:
    rng = random.Random(99)
    segment = open_to_look(cluster.state.segment_name)
    while not stop.wait(rng.uniform(*PAUSE_S)):
        # Prefill first: it is seldom seen at work, the answers being longer than the prompts.
        role = Role.PREFILL if rng.random() < 0.6 else Role.DECODE
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not stop.is_set():
            chosen = [pid for one, pid in victims(segment) if one is role]
            if chosen:
                number = signal.SIGSTOP if rng.random() < 0.25 else signal.SIGKILL
                try:
                    os.kill(rng.choice(chosen), number)
                except ProcessLookupError:
                    continue
                seen.note(kills=Counter({f"{role.label} {number.name}": 1}))
                break
            time.sleep(0.001)
    segment.close()


def use(cluster: Any) -> dict[str, tuple[int, int]]:
    """Private bytes and open descriptors of those who live through it all."""
    found = {"router": cluster.pid(Role.ROUTER), "supervisor": cluster.pid(Role.SUPERVISOR)}
    return {
        name: (private_bytes(pid) or 0, len(list(Path(f"/proc/{pid}/fd").iterdir()))) for name, pid in found.items()
    }


def not_yet(cluster: Any, seen: Seen) -> list[str]:
    """What has not happened often enough for the rest to mean anything; a wrong answer ends the waiting."""
    with seen.lock:
        kills = {role: sum(seen.kills[name] for name in seen.kills if name.startswith(role)) for role in ROLES}
        counts: dict[str, tuple[int, float]] = {"answers": (seen.answers, ANSWERS)}
        wrong = bool(seen.wrong)
    counts |= {f"kills of {role}": (number, KILLS_OF_A_ROLE) for role, number in kills.items()}
    # A kill may come a moment too late, when the row has ended; most find some.
    counts["adoptions"] = (segment_of(cluster).words[H.ADOPTIONS], max(3, sum(kills.values()) / 4))
    short = [f"{name}: {found} of {wanted:.0f}" for name, (found, wanted) in counts.items() if found < wanted]
    return [] if wrong else short


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_soak(start: Any, tiny_dir: Path, dtype: str) -> None:
    cluster = start(
        "--model", str(tiny_dir), "--dtype", dtype, "--kv-blocks", "160", "--max-context", "2048",
        "--chunk-tokens", "32", "--prefill", "2", "--decode", "2", "--threads", "1", "--verify-kv", "recompute",
    )  # fmt: skip
    rng = random.Random(7)
    known = [(ask, cluster.ids(ask.prompt, ask.max_tokens, **ask.sampling)) for ask in asks(rng)]
    seen, stop = Seen(), threading.Event()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        threads = [pool.submit(client, cluster, known, seen, stop, number) for number in range(CLIENTS)]
        threads.append(pool.submit(killer, cluster, seen, stop))
        try:
            time.sleep(SOAK_S / 5)
            before = use(cluster)
            time.sleep(SOAK_S * 4 / 5)
            deadline = time.monotonic() + WATCHDOG_S
            while missing := not_yet(cluster, seen):
                assert time.monotonic() < deadline, f"{missing}; {seen.wrong[:3]}"
                time.sleep(0.2)
        finally:
            stop.set()
        for thread in threads:
            thread.result(timeout=WATCHDOG_S)
    deadline = time.monotonic() + WATCHDOG_S
    while set(segment_of(cluster).rows.states()) != {RowState.FREE}:
        assert time.monotonic() < deadline, "rows are left"
        time.sleep(0.05)
    after, segment = use(cluster), segment_of(cluster)
    words = segment.words
    pauses = sorted(seen.pauses_s)
    log = (cluster.state_dir / "logs" / cluster.name / "supervisor.log").read_text()
    adoptions = {role: log.count(f"waits for another than {role}-") for role in ROLES}
    print(
        f"\n{dtype}, {SOAK_S:.0f} s: {seen.answers} answers, {seen.left} left, {dict(seen.kills)}, "
        f"{words[H.ADOPTIONS]} adoptions {adoptions} ({seen.adopted} answers), {words[H.PREEMPTIONS]} preemptions, "
        f"{seen.recomputed} tokens recomputed; private bytes, descriptors: {before} then {after}"
    )
    if len(pauses) > 1:
        p99 = statistics.quantiles(pauses, n=100, method="inclusive")[98]
        print(f"longest pause of an adopted stream: p50 {statistics.median(pauses):.2f} s, p99 {p99:.2f} s")
    assert seen.wrong == []
    assert verify(segment) == []
    assert segment.pool.num_available() == segment.geometry.num_blocks
    assert words[H.FAILED] == 0
    assert words[H.BAD_BLOCKS] == 0
    assert seen.recomputed == 0
    for name, (used, descriptors) in after.items():
        assert descriptors <= before[name][1] + CLIENTS, name
        assert used <= before[name][0] * 1.3 + (8 << 20), name
