"""Many requests at once, requests that are given up, pools that are too small.

Every answer is the one it would be alone, and afterwards nothing is held.

One cluster of two prefill and two decode daemons for all; a cramped one for what needs want of room.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.status import ClusterStatus, Counters, cluster_status, private_bytes
from pdctl.core.tokenizer import Tokenizer
from pdctl.transport.doorbell import Bell
from pdctl.transport.layout import P, R
from pdctl.transport.names import cluster_dir
from pdctl.transport.recovery import verify
from pdctl.transport.rows import OWNED, Claim, RowParams, RowState
from pdctl.transport.segment import Participant, Role, Segment, open_to_look, take_snapshot

pytestmark = pytest.mark.e2e

BLOCK = 16
NUM_BLOCKS = 512
MAX_BATCH = 16
DAEMONS = (Role.PREFILL, Role.DECODE)


@pytest.fixture(scope="module")
def cluster(start_shared: Any, tiny_dir: Path) -> Any:
    """Without --threads: how many there are, the environment says."""
    return start_shared(
        "--model", str(tiny_dir), "--dtype", "float32", "--block-size", str(BLOCK), "--kv-blocks", str(NUM_BLOCKS),
        "--max-context", "2048", "--chunk-tokens", "16", "--local-prefill-tokens", "0", "--prefill", "2",
        "--decode", "2", "--max-batch", str(MAX_BATCH), "--max-queue", "100",
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, its blocks come back, nobody died that was not meant to, and everything adds up."""
    one = request.getfixturevalue("cramped" if "cramped" in request.fixturenames else "cluster")
    deaths, pids = counters(one).num_deaths, pids_of(one)
    yield
    settle(one)
    status = status_of(one)
    assert (status.pool.num_private, status.pool.num_referenced) == (0, 0)
    assert (status.num_queued, status.causes) == (0, ())
    assert verify(snapshot(one)) == []
    if "deadly" not in request.keywords:
        assert (status.counters.num_deaths, pids_of(one)) == (deaths, pids)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not in {timeout_s} s")


def snapshot(cluster: Any) -> Segment:
    return take_snapshot(cluster.state.segment_name).segment


def count(cluster: Any, *states: RowState) -> int:
    found = snapshot(cluster).rows.states()
    return sum(found.count(int(state)) for state in states)


def settle(cluster: Any) -> None:
    rows = snapshot(cluster).geometry.max_rows
    wait_for(lambda: count(cluster, RowState.FREE) == rows, "the end of all rows")


def status_of(cluster: Any) -> ClusterStatus:
    return cluster_status(cluster.state_dir, cluster.name)


def counters(cluster: Any) -> Counters:
    return status_of(cluster).counters


def pids_of(cluster: Any) -> list[int]:
    return sorted(pid for role in (Role.SUPERVISOR, Role.ROUTER, *DAEMONS) for _, pid in cluster.slots(role))


def computed(cluster: Any, word: P) -> int:
    """A counter summed over all daemons."""
    segment = snapshot(cluster)
    return sum(segment.participant_word(slot, word) for role in DAEMONS for slot in segment.slots(role))


def tokens_of(length: int, seed: int) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(3, 259) for _ in range(length)]


class Caller:
    """A client that can hang up at any moment. Its prompt: ids for a completion, a text for a chat."""

    def __init__(
        self, url: str, prompt: list[int] | str, max_tokens: int, *, stream: bool = False, name: str = "", **more: Any
    ) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream, **more}
        chat = isinstance(prompt, str)
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        data = json.dumps(body).encode()
        headers = {
            "Host": host,
            "Content-Type": "application/json",
            "Connection": "close",
            "Content-Length": len(data),
            "X-Request-Id": name,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        self.socket.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    def rest(self) -> bytes:
        found = b"".join(iter(lambda: self.socket.recv(65536), b""))
        self.socket.close()
        return found

    def leave(self) -> None:
        self.socket.close()


# --- the same answers ----------------------------------------------------------------------------------------


def test_sixteen_at_once_get_their_own_answers(cluster: Any) -> None:
    """S04: three rounds; prompts and answers of all lengths, so that they join and leave the batches."""
    words = ["ZEBRA", "OTTER", "LLAMA", "TAPIR", "GECKO", "HERON", "BISON", "LEMUR"]
    secrets = [f"{word}-{number:02}" for number, word in enumerate(2 * words)]
    prompts = [
        "x" * (13 * at % 90) + f" The password is {secret}. The password is" for at, secret in enumerate(secrets)
    ]

    def ask(at: int) -> tuple[str, list[int]]:
        choice = cluster.complete(prompts[at], 8 + 5 * at % 24)["choices"][0]
        return choice["text"], choice["token_ids"]

    alone = [ask(at) for at in range(16)]
    assert len({tuple(ids) for _, ids in alone}) == 16
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            assert list(pool.map(ask, range(16))) == alone
    for at, (text, _) in enumerate(alone):
        assert not any(secret in text for other, secret in enumerate(secrets) if other != at)


def test_a_prefix_from_the_cache_changes_nothing(cluster: Any) -> None:
    """S05: cold, warm, warm beside four streams, and after others have taken its blocks."""
    prompt = tokens_of(100, seed=5)
    full = (len(prompt) - 1) // BLOCK * BLOCK

    def ask() -> tuple[int, list[int]]:
        answer = cluster.complete(prompt, 24)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

    cold, warm = ask(), ask()
    others = [Caller(cluster.state.url, tokens_of(20, seed=at), 300, stream=True) for at in range(4)]
    wait_for(lambda: count(cluster, RowState.DECODING) == 4, "four streams")
    beside = ask()
    assert count(cluster, RowState.DECODING) == 4
    assert all(other.rest().endswith(b"0\r\n\r\n") for other in others)
    with ThreadPoolExecutor(4) as pool:
        # 20 prompts of 30 blocks: more than there are.
        list(pool.map(lambda at: cluster.complete(tokens_of(480, seed=at), 1), range(20)))
    evicted = ask()
    assert [hits for hits, _ in (cold, warm, beside, evicted)] == [0, full, full, 0]
    assert cold[1] == warm[1] == beside[1] == evicted[1]


def test_all_daemons_share_one_prefix_cache(cluster: Any) -> None:
    """S06: whichever daemon filled the blocks, and whichever claims the row, every full block is a hit."""
    for length in (33, 200, 257):
        prompt = tokens_of(length, seed=6)
        first = cluster.complete(prompt, 20)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        expected = (length - 1) // BLOCK * BLOCK
        slots = {role: {slot for slot, _ in cluster.slots(role)} for role in DAEMONS}
        seen: dict[Role, set[int | None]] = {role: set() for role in DAEMONS}

        def ask(more: list[int], prompt: list[int] = prompt) -> dict[str, Any]:
            answer: dict[str, Any] = cluster.complete(prompt + more, 4)
            return answer

        for turn in range(50):
            # Several at once: no daemon can take them all. What comes after the prompt differs, to need a prefill.
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, [[3 + turn, 3 + at] for at in range(8)]))
            for answer in answers:
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (length + 1) // BLOCK * BLOCK or cached == expected
                assert cached >= expected
                seen[Role.PREFILL].add(answer["timings"]["prefill_slot"])
                seen[Role.DECODE].add(answer["timings"]["decode_slot"])
            if all(seen[role] - {None} == slots[role] for role in DAEMONS):
                break
        assert {role: seen[role] - {None} for role in DAEMONS} == slots
        # What a decode daemon generated is as good: the next turn finds it.
        spoken = prompt + first["choices"][0]["token_ids"]
        again = cluster.complete([*spoken, 5], 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again == (len(spoken) - 1) // BLOCK * BLOCK


def test_lists_of_prompts_keep_their_order_every_time(cluster: Any, tiny_dir: Path) -> None:
    """S11."""
    tokenizer = Tokenizer.load(tiny_dir)
    prompts = ["one", "two and a half", "x" * 70, "four", "five " * 9]
    alone = [cluster.complete(prompt, 12)["choices"][0] for prompt in prompts]
    for form in (prompts, prompts, prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        choices = cluster.complete(form, 12)["choices"]
        assert [choice["index"] for choice in choices] == list(range(5))
        assert [choice["text"] for choice in choices] == [choice["text"] for choice in alone]
        assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in alone]


def test_counters_add_up_with_usages(cluster: Any) -> None:
    """`/metrics` over real daemons that share prefixes."""

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(cluster.state.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = scrape()
    stems = [tokens_of(300, seed=at) for at in (61, 62)]
    prompts = [stems[at % 2] + tokens_of(5 + at, seed=63) for at in range(40)]
    with ThreadPoolExecutor(20) as pool:
        usages = [answer["usage"] for answer in pool.map(lambda prompt: cluster.complete(prompt, 20), prompts)]
    after = scrape()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert grown["pdctl_prefix_cache_hit_tokens_total"] == cached
    assert grown["pdctl_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["pdctl_generation_tokens_total"] == 40 * 20
    assert grown['pdctl_requests_total{outcome="finished"}'] == 40
    assert grown["pdctl_time_to_first_token_seconds_count"] == 40
    kinds = dict.fromkeys(("prefill", "local_prefill", "decode"), 0.0)
    for name, value in grown.items():
        if name.startswith("pdctl_daemon_tokens_total"):
            kinds[name.split('kind="')[1].split('"')[0]] += value
    assert kinds["decode"] == 40 * 20
    # What was not cached was computed by somebody, but for every prompt's last token, which decode samples from.
    uncached = sum(usage["prompt_tokens"] for usage in usages) - cached - 40
    assert kinds["prefill"] + kinds["local_prefill"] == uncached


def test_greedy_and_sampled_in_one_batch(cluster: Any) -> None:
    """S10: A greedy, B seed 7, C greedy, D seed 7."""
    prompt = tokens_of(40, seed=10)
    sampled = {"temperature": 0.9, "seed": 7}
    alone = {"A": cluster.ids(prompt, 60), "B": cluster.ids(prompt, 60, **sampled)}
    assert alone["A"] != alone["B"]
    with ThreadPoolExecutor(4) as pool:
        a, b, c, d = pool.map(lambda more: cluster.ids(prompt, 60, **more), [{}, sampled, {}, sampled])
    assert (a, c) == (alone["A"], alone["A"])
    assert (b, d) == (alone["B"], alone["B"])


def test_empty_prompts_disturb_nobody(cluster: Any) -> None:
    """S51: all of them while two streams run."""
    prompts = [tokens_of(30, seed=51), tokens_of(50, seed=52)]
    alone = [cluster.ids(prompt, 300) for prompt in prompts]
    bodies: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 2}, status)
        for prompt, status in (("", 400), ("   ", 200), ([], 400), ([""], 400), (None, 400), ([[]], 400))
    ]
    bodies += [("/v1/completions", {"max_tokens": 2}, 400), ("/v1/chat/completions", {"messages": []}, 400)]
    for content, status in ((None, 400), ("", 200)):
        messages = [{"role": "user", "content": content}]
        bodies.append(("/v1/chat/completions", {"messages": messages, "max_tokens": 2}, status))
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(cluster.ids, prompt, 300) for prompt in prompts]
        wait_for(lambda: count(cluster, RowState.DECODING) == 2, "two streams")
        for path, body, expected in bodies:
            for stream in (False, True) if expected == 400 else (False,):
                status, answer = cluster.post(path, {**body, "stream": stream})
                assert status == expected, (body, answer)
        assert count(cluster, RowState.DECODING) > 0, "the streams ended too early to be disturbed"
        assert [one.result() for one in streams] == alone


def test_any_bytes_are_valid_answers(cluster: Any) -> None:
    """S19: a random model at temperature 2 says every id, those without a text too."""
    bodies = [
        {"prompt": f"{at}", "max_tokens": 256, "temperature": 2, "seed": at, "ignore_eos": True} for at in range(20)
    ]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda body: cluster.post("/v1/completions", body), bodies))
    assert [status for status, _ in answers] == [200] * 20
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [256] * 20
    texts = "".join(answer["choices"][0]["text"] for _, answer in answers)
    assert "\ufffd" in texts  # what is no UTF-8 is shown as such
    for value in ("\ud800", "a\x00\x1b[31m\u202e\ud800"):
        for name in ("prompt", "stop", "model", value):
            status, answer = cluster.post("/v1/completions", {"prompt": "a", name: value})
            assert status in (400, 404), (name, answer)
            assert answer["error"]["message"]


def test_bench_alone_measures_the_running_cluster(cluster: Any) -> None:
    """S60: one token has no time per token, and nothing is divided by it."""
    table = cluster.cli("bench", "-n", "2", "--prompt-tokens", "40", "--max-tokens", "4")
    assert table.code == 0, table.err
    assert "hand-over" in table.out and "2 / 0" in table.out
    single = cluster.cli("bench", "-n", "2", "--prompt-tokens", "2", "--max-tokens", "1", "--json")
    phases = json.loads(single.out)["phases"]
    assert [phase["num_ok"] for phase in phases] == [2, 2]
    assert [phase["tpot_ms"] for phase in phases] == [None, None]
    assert all(phase["ttft_ms"]["p50"] > 0 for phase in phases)


# --- given up ------------------------------------------------------------------------------------------------


def test_who_leaves_before_the_first_token_frees_everything(cluster: Any) -> None:
    """S23: decode is full, ten more are past prefill and wait for it; their clients go."""
    full = 2 * MAX_BATCH
    streams = [Caller(cluster.state.url, tokens_of(20, seed=at), 180, stream=True) for at in range(full)]
    wait_for(lambda: count(cluster, RowState.DECODING) == full, "full batches")
    waiting = [Caller(cluster.state.url, tokens_of(60, seed=at), 100, stream=at % 2 == 0) for at in range(10)]
    wait_for(lambda: count(cluster, RowState.READY) == 10, "ten rows past prefill")
    for caller in waiting:
        caller.leave()
    wait_for(lambda: count(cluster, RowState.READY) == 0, "their end")
    assert count(cluster, RowState.DECODING) == full
    assert all(stream.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for stream in streams)


def num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_clients_that_come_and_go_leave_no_trace(cluster: Any) -> None:
    """S24: 160 short requests, a quarter given up at random moments; memory and descriptors do not grow."""
    source = random.Random(24)
    plans = [(at, source.random() < 0.25, source.random() * 0.2) for at in range(160)]
    samples: list[tuple[dict[int, int], dict[int, int]]] = []

    def call(plan: tuple[int, bool, float]) -> bool:
        at, gives_up, after_s = plan
        caller = Caller(cluster.state.url, tokens_of(10 + at % 50, seed=at), 12, stream=at % 3 == 0)
        if gives_up:
            time.sleep(after_s)
            caller.leave()
            return True
        return caller.rest().startswith(b"HTTP/1.1 200")

    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(plans), 40):
            assert all(pool.map(call, plans[start : start + 40]))
            settle(cluster)
            pids = pids_of(cluster)
            samples.append(
                (
                    {pid: num_fds(pid) for pid in pids},
                    {pid: private_bytes(pid) or 0 for pid in pids},
                )
            )
    # After the first half, when all has been touched once.
    (fds_before, bytes_before), (fds_after, bytes_after) = samples[1], samples[3]
    print("fds", fds_before, fds_after, "private", bytes_before, bytes_after)
    # A connection may be closed a little later than its row.
    wait_for(lambda: all(num_fds(pid) <= fds_before[pid] for pid in fds_before), "as few descriptors as before")
    assert all(bytes_after[pid] - bytes_before[pid] < 2 << 20 for pid in bytes_before)


def test_work_stops_when_its_client_leaves(cluster: Any) -> None:
    """S47: in the middle of a long prompt, and of a long answer, not streamed; then daemons have nothing to do."""

    def left_undone(prompt_tokens: int, max_tokens: int, word: P) -> bool:
        """Whether less was computed than was asked for. On a busy machine a client may leave too late."""
        before = computed(cluster, word)
        caller = Caller(cluster.state.url, tokens_of(prompt_tokens, seed=next(seeds)), max_tokens)
        wait_for(lambda: computed(cluster, word) > before, word.name)
        caller.leave()
        settle(cluster)
        return computed(cluster, word) - before < max(prompt_tokens - 1, max_tokens)

    seeds = itertools.count(4700)
    assert any(left_undone(1900, 100, P.PREFILL_TOKENS) for _ in range(10))
    assert any(left_undone(30, 1900, P.DECODE_TOKENS) for _ in range(10))
    used = [_cpu_s(cluster) for _ in range(2) if time.sleep(1) is None]
    # A daemon that went on would use a second of it.
    assert used[1] - used[0] < 0.5
    assert len(cluster.ids(tokens_of(50, seed=47), 3)) == 3


def _cpu_s(cluster: Any) -> float:
    return sum(one.cpu_s or 0 for one in status_of(cluster).processes if one.role in ("prefill", "decode"))


# --- too many ------------------------------------------------------------------------------------------------


def test_a_storm_is_served_or_refused(cluster: Any) -> None:
    """S46: 150 at once; `status` answers meanwhile and knows the queue."""
    prompt = tokens_of(24, seed=46)
    expected = cluster.ids(prompt, 64)
    rejected, longest, stop = counters(cluster).num_rejected, 0, threading.Event()

    def look() -> None:
        nonlocal longest
        while not stop.is_set():
            longest = max(longest, status_of(cluster).num_queued)

    def watch() -> int:
        looks = 0
        while not stop.is_set():
            result = cluster.cli("status", "--json")
            assert result.code == 0, result
            status = json.loads(result.out)
            assert status["max_queue"] == 100
            assert 0 <= status["num_queued"] <= 100
            looks += 1
        return looks

    def ask(_: int) -> tuple[int, dict[str, Any]]:
        body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer: tuple[int, dict[str, Any]] = cluster.post("/v1/completions", body)
        return answer

    with ThreadPoolExecutor(152) as pool:
        watcher, looker = pool.submit(watch), pool.submit(look)
        answers = list(pool.map(ask, range(150)))
        stop.set()
        looker.result()
        assert watcher.result() >= 1
    assert {status for status, _ in answers} <= {200, 429}
    refused = [answer["error"] for status, answer in answers if status == 429]
    assert all(error["code"] == "queue_full" for error in refused)
    assert counters(cluster).num_rejected - rejected == len(refused)
    served = [answer["choices"][0]["token_ids"] for status, answer in answers if status == 200]
    assert len(served) >= 100
    assert all(ids == expected for ids in served)
    assert 0 < longest <= 100


@dataclass
class Leaver:
    """Goes away when its row is seen in a state, or past it."""

    caller: Caller
    wants: RowState | None
    left_in: RowState | None = None
    cancelled_at: tuple[int, int] | None = None


def see_leavers_off(segment: Segment, leavers: dict[str, Leaver], over: threading.Event) -> None:
    """Close connections on the live segment's word; rows that nobody wants are let go within a chunk or a step.

    Whoever owns one looks at the wish at the beginning of a turn: one turn may have begun before, and between
    putting a row back and taking it up again a wish may come that the next one sees.
    """
    rows, order = segment.rows, [RowState.QUEUED, RowState.PREFILLING, RowState.READY, RowState.DECODING]
    while not over.is_set():
        turns = [segment.participant_word(slot, P.PROGRESS) for slot in range(segment.geometry.max_participants)]
        for row, number in enumerate(rows.states()):
            state, owner = RowState(number), rows.get(row, R.OWNER) - 1
            leaver = leavers.get(rows.request_id(row)) if state in order else None
            if leaver is None:
                continue
            if leaver.left_in is None and leaver.wants in order[: order.index(state) + 1]:
                leaver.left_in = state
                leaver.caller.leave()
            if state not in OWNED or not rows.get(row, R.CANCEL):
                leaver.cancelled_at = None
            elif leaver.cancelled_at is None or leaver.cancelled_at[0] != owner:
                leaver.cancelled_at = (owner, segment.participant_word(owner, P.PROGRESS))
            else:
                assert turns[owner] <= leaver.cancelled_at[1] + 2, f"row {row}: held on, unwanted, in {state.name}"
        time.sleep(0.001)


def ids_of(answer: bytes) -> list[int]:
    """Tokens of an answer, streamed (a chunk of HTTP is one event) or whole."""
    events = re.findall(rb"^data: (\{.*\})$", answer, re.MULTILINE) or [answer.partition(b"\r\n\r\n")[2]]
    return [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]


def test_three_hundred_at_once_of_all_kinds(cluster: Any) -> None:
    """Who stays gets its own tokens, whoever else leaves in whichever state, reads late, or never.

    More blocks are asked for than there are. Twice: the second time, the router has learnt to hold what it needs; and
    again, if by chance few left in one of the states.
    """
    source = random.Random(300)
    asks = [(tokens_of(source.choice((5, 40, 170)), seed=at), source.choice((3, 10, 30))) for at in range(24)]
    sampling = [{"temperature": 0.9, "seed": at} if at % 3 else {} for at in range(24)]
    known = [cluster.ids(*ask, **more) for ask, more in zip(asks, sampling, strict=True)]
    url, router = cluster.state.url, cluster.pid(Role.ROUTER)
    use: list[tuple[int, int]] = []
    left: Counter[RowState | None] = Counter()
    wants = [None, RowState.QUEUED, RowState.PREFILLING, RowState.READY, RowState.DECODING]

    def stay(at: int, reads_after: threading.Event | None = None) -> None:
        stream = at % 2 == 0 or reads_after is not None
        while True:
            caller = Caller(url, *asks[at % 24], stream=stream, return_token_ids=True, **sampling[at % 24])
            if reads_after is not None:
                reads_after.wait(120)
            answer = caller.rest()
            if not answer.startswith(b"HTTP/1.1 429"):
                break
            time.sleep(0.2)
        assert ids_of(answer) == known[at % 24]

    # It never reads. Four megabytes, more than all buffers between here and the router take.
    big = {"n": 12, "logprobs": True, "top_logprobs": 20}
    silent = Caller(url, "hello", 300, stream=True, name="silent", **big)
    silent.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for turn in range(8):
        if turn >= 2 and all(left[state] >= 3 for state in wants):
            break
        over, served = threading.Event(), threading.Event()
        leavers: dict[str, Leaver] = {}
        with ThreadPoolExecutor(301) as pool, contextlib.ExitStack() as stack:
            stack.callback(over.set)
            stack.callback(served.set)
            segment = stack.enter_context(contextlib.closing(open_to_look(cluster.state.segment_name)))
            watcher = pool.submit(see_leavers_off, segment, leavers, over)
            late = [pool.submit(stay, at, served) for at in range(9)]
            for at in range(60):
                name, length = f"leaver-{turn}-{at}", source.choice((20, 100, 300))
                prompt = tokens_of(length, seed=1000 * turn + at)
                leaver = Leaver(Caller(url, prompt, 300, stream=at % 2 == 0, name=name), wants[at % 5])
                leavers[name] = leaver
                if leaver.wants is None:
                    time.sleep(source.random() * 0.05)
                    leaver.caller.leave()
            others = [pool.submit(stay, at) for at in range(230)]
            for one in others:
                one.result()
            served.set()
            for one in late:
                one.result()
            # Refused, or never seen in a row.
            for leaver in leavers.values():
                leaver.caller.leave()
            settle(cluster)
            over.set()
            watcher.result()
        left += Counter(leaver.left_in for leaver in leavers.values())
        use.append((num_fds(router), private_bytes(router) or 0))
    print(dict(left), use)
    assert all(left[state] >= 3 for state in wants)
    wait_for(lambda: num_fds(router) <= use[0][0], "as few descriptors as before")
    assert use[-1][1] - use[0][1] < 4 << 20
    # The silent one's rows are free, what was sampled waits in the router; and that lets go when it leaves.
    said = ("logs", "router", "--tail", "1000", "--grep", "silent")
    assert cluster.cli(*said).out == ""
    silent.leave()
    wait_for(lambda: cluster.cli(*said).out, "its end")


def test_threads_are_what_the_environment_says(cluster: Any) -> None:
    """S48."""
    daemons = [one for one in status_of(cluster).processes if one.role in ("prefill", "decode")]
    assert [one.num_threads for one in daemons] == [1] * 4
    for one in daemons:
        names = [path.read_text().strip() for path in Path(f"/proc/{one.pid}/task").glob("*/comm")]
        # Its own, and the one that maps the pool, if that is not done yet.
        assert len(names) <= 2, names


@pytest.fixture
def other_router(cluster: Any) -> Iterator[tuple[Segment, Participant]]:
    """A router's place beside the router's: whoever has it writes into rows what no client can ask for."""
    segment = Segment.open(cluster.state.segment_name)
    me = segment.attach(Role.ROUTER)
    bell = Bell(cluster_dir(cluster.state_dir, cluster.name), me.slot)
    yield segment, me
    segment.detach(me)
    bell.close()
    segment.close()


def submit_poison(segment: Segment, me: Participant, tokens: list[int], local: int) -> Claim:
    claim = segment.rows.submit(
        me,
        request_id="poison",
        tokens=tokens,
        limit_tokens=len(tokens) + 9,
        params=RowParams(),
        local_prefill_tokens=local,
    )
    assert claim is not None
    return claim


def test_a_request_that_nobody_can_compute_fails_alone(
    cluster: Any, other_router: tuple[Segment, Participant]
) -> None:
    """A token that no model has: the row fails with the cause, and no daemon dies of it."""
    segment, me = other_router
    before = pids_of(cluster)
    claim = submit_poison(segment, me, [5] * 20 + [1_000_000], 100)
    wait_for(lambda: segment.rows.state(claim.row) is RowState.FAILED, "the end of it")
    error = segment.rows.error_text(claim.row)
    assert segment.rows.recycle(claim.row, claim.generation)
    assert "token id 1000000 in the prompt" in error
    assert (
        f"poison row {claim.row}: failed, {error}" in cluster.cli("logs", "--tail", "100000", "--grep", "poison").out
    )
    assert pids_of(cluster) == before


@pytest.mark.deadly
def test_an_error_in_a_daemon_is_the_first_thing_its_log_shows(
    cluster: Any, other_router: tuple[Segment, Participant]
) -> None:
    """S28: a count that has no room for more ends whoever adds to it; the row goes on elsewhere.

    The log begins with the real error, and nothing complains of what was still mapped.
    """
    segment, me = other_router
    prefill = [pid for _, pid in cluster.slots(Role.PREFILL)]
    for pid in prefill:
        os.kill(pid, signal.SIGSTOP)
    claim = submit_poison(segment, me, tokens_of(15, seed=77), 0)
    segment.rows.put(claim.row, R.PREFILLED_TOKENS, (1 << 64) - 1)
    for pid in prefill:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: segment.rows.state(claim.row) is RowState.FINISHED, "the end of it")
    assert segment.rows.recycle(claim.row, claim.generation)
    wait_for(lambda: cluster.cli("status").code == 0, "four daemons")
    log = cluster.cli("logs", "--tail", "100000").out
    assert "PREFILLED_TOKENS" in log[log.index("Traceback") :].split("Traceback")[1]
    cluster.assert_no_noise()


# --- too little ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cramped(start_shared: Any, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that knows no end of an answer (S13), and a pool of one and a half requests, less than its context."""
    import shutil

    model = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny_dir, model)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        values.pop("eos_token_id", None)
        values.pop("eos_token", None)
        (model / name).write_text(json.dumps(values))
    return start_shared(
        "--model", str(model), "--dtype", "float32", "--kv-blocks", "12", "--max-context", "512",
        "--chunk-tokens", "16", "--local-prefill-tokens", "0", "--threads", "1",
    )  # fmt: skip


def test_a_model_without_an_end_goes_on_to_the_limit(cramped: Any) -> None:
    """S13."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 150}
    status, answer = cramped.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 150


def test_four_that_need_the_pool_each(cramped: Any) -> None:
    """S14: each grows to two thirds of the pool; they take turns, and nothing of it is in the answers."""
    prompts = [tokens_of(40, seed=at) for at in range(4)]
    alone = [cramped.ids(prompt, 90) for prompt in prompts]
    before = counters(cramped).num_preemptions
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: cramped.ids(prompt, 90), prompts)) == alone
    assert counters(cramped).num_preemptions > before


def test_what_fits_the_context_and_not_the_pool(cramped: Any) -> None:
    """S45: refused at once with both numbers; the next short request is served."""
    status, answer = cramped.post("/v1/completions", {"prompt": tokens_of(300, seed=45), "max_tokens": 5})
    assert status == 400
    assert answer["error"]["code"] == "capacity_exceeded"
    assert "20 blocks of 16" in answer["error"]["message"] and "the pool has 12" in answer["error"]["message"]
    assert counters(cramped).num_failed == 0
    assert len(cramped.ids(tokens_of(20, seed=45), 3)) == 3
