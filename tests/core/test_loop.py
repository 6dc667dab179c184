"""The router's loop never stands still, whatever a client sends or the machine does; and its memory has a bound.

Measured in CPU time of its own, on a router that is a process (loop_probe.py): a busy machine changes nothing. No
other thread of it could hold the interpreter, for there is none.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

LONGEST_CALLBACK_MS = 50
WATCHDOG_S = 120
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Router:
    """The router under test, and ways to ask it."""

    def __init__(self, run_dir: Path) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, str(here / "loop_probe.py"), str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(here)},
        )
        assert self._process.stdout is not None
        where = json.loads(self._process.stdout.readline())
        self.pid = self._process.pid
        self._port, self.segment = where["port"], Path(where["segment"])

    def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WATCHDOG_S)
        if body is None:
            connection.request("GET", path)
        else:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def begin(self, path: str, body: object) -> socket.socket:
        """Send a request and read nothing of its answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return self.say(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def say(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=WATCHDOG_S)
        connection.sendall(data)
        return connection

    def probe(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("/probe")[1])
        return found

    def check(self) -> None:
        found = self.probe()
        assert found["longest_ms"] < LONGEST_CALLBACK_MS, found
        assert found["threads"] == 1

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (.*)$", self.ask("/metrics")[1].decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def wait_for(self, metric: str, value: float) -> None:
        deadline = time.monotonic() + WATCHDOG_S
        while self.metric(metric) != value:
            assert time.monotonic() < deadline, f"{metric} is {self.metric(metric)}, not {value}"
            time.sleep(0.01)

    def readers(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = []
        for pid in children:
            try:
                if Path(f"/proc/{pid}/comm").read_text().strip() == "pdctl-reader":
                    found.append(int(pid))
            except OSError:
                pass  # it has just ended
        return found

    def memory_mib(self) -> float:
        """Of the router and its readers, each page once."""
        total = 0
        for pid in (self.pid, *self.readers()):
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0])
        return total / 1024

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(WATCHDOG_S) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    made = Router(tmp_path_factory.mktemp("loop"))
    try:
        for path, body in ((COMPLETIONS, {"prompt": "warm", "max_tokens": 1}), (CHATS, chat("warm", max_tokens=1))):
            assert made.ask(path, body)[0] == 200
        yield made
    finally:
        made.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*texts: str, **more: object) -> dict[str, object]:
    return {"messages": [user(text) for text in texts], **more}


def noise(number: int) -> str:
    """What no tokenizer has long tokens for."""
    draw = random.Random(1)
    return "".join(chr(draw.randrange(33, 126)) for _ in range(number))


# By name: route, body, status.
HOSTILE: dict[str, tuple[str, object, int]] = {
    # As many as fit into the largest body.
    "messages": (CHATS, b'{"messages":[' + b",".join([json.dumps(user("")).encode()] * 250_000) + b"]}", 400),
    "messages that are none": (CHATS, b'{"messages":[' + b"{}," * 2_700_000 + b"{}]}", 400),
    "allowed messages": (CHATS, chat(*[""] * 4096, max_tokens=1), 400),
    "text": (COMPLETIONS, {"prompt": "x" * 8_000_000}, 400),
    "token ids": (COMPLETIONS, b'{"prompt":[' + b"5," * 4_000_000 + b"5]}", 400),
    "prompts": (COMPLETIONS, {"prompt": ["x" * 4000] * 1024, "max_tokens": 1}, 200),
    "prompts of ids": (COMPLETIONS, {"prompt": [[5] * 4000] * 300, "max_tokens": 1}, 200),
    "metadata": (COMPLETIONS, b'{"prompt":"ab","max_tokens":1,"metadata":{"a":[' + b"[]," * 2_600_000 + b"1]}}", 200),
    "fields": (COMPLETIONS, {str(number): 1 for number in range(600_000)}, 400),
    "a field's name": (COMPLETIONS, {"x" * 8_000_000: 1}, 400),
    "a model's name": (COMPLETIONS, {"prompt": "ab", "model": "m" * 8_000_000}, 404),
    "a user's name": (CHATS, {"messages": [{**user("a"), "name": "x" * 8_000_000}]}, 400),
    "parts": (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}]}, 400),
    "digits": (COMPLETIONS, b'{"prompt":[' + b",".join([b"9" * 4299] * 1800) + b"]}", 400),
    "brackets": (COMPLETIONS, b"[" * 8_000_000, 400),
    # As much as is read on the loop.
    "text at once": (COMPLETIONS, {"prompt": noise(8000), "max_tokens": 1}, 200),
    "prompts at once": (COMPLETIONS, {"prompt": ["abcdefghijk"] * 1000, "max_tokens": 1}, 200),
    "messages at once": (CHATS, chat(*[""] * 60, max_tokens=1), 200),
    "fields at once": (COMPLETIONS, {str(number): [] for number in range(1500)}, 400),
    "biases": (COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "logit_bias": {f"{n}": 1 for n in range(259)}}, 200),
    # What comes of it.
    "log-probabilities": (CHATS, chat("hi", n=16, max_tokens=300, logprobs=True, top_logprobs=20), 200),
    "streamed log-probabilities": (
        CHATS,
        chat("hi", n=16, max_tokens=300, logprobs=True, top_logprobs=20, stream=True),
        200,
    ),
    "stop strings": (
        COMPLETIONS,
        {"prompt": "abc", "max_tokens": 2000, "stop": ["a" * 999 + end for end in "bcde"]},
        200,
    ),
    "streams": (COMPLETIONS, {"prompt": ["xyz"] * 300, "max_tokens": 50, "stream": True, "timings": True}, 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_callback_is_long(router: Router, name: str) -> None:
    path, body, status = HOSTILE[name]
    router.probe()
    found, answer = router.ask(path, body)
    assert found == status, answer[:300]
    router.check()


def test_a_body_in_tiny_chunks_is_parsed_in_turns(router: Router) -> None:
    """Six bytes on the line for one of the body."""
    router.probe()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt":"ab","max_tokens":1' + b" " * 200_000 + b"}")
    with router.say(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    router.check()


def test_looking_at_many_rows_is_quick(router: Router) -> None:
    """All rows in use, then all of them given up at once; whoever asks for figures meanwhile."""
    router.probe()
    leaving = router.begin(COMPLETIONS, {"prompt": ["xyz"] * 1024, "max_tokens": 8000, "stream": True})
    router.wait_for("pdctl_requests_waiting", 1)
    for path in ("/metrics", "/openapi.json", "/health/ready", "/v1/models"):
        assert router.ask(path)[0] == 200
    leaving.close()
    router.wait_for('pdctl_rows{state="free"}', 300)
    router.check()


def test_many_clients_at_once_are_no_more_than_each_alone(router: Router) -> None:
    """A collection of the garbage of 900 requests under way would take longer than anything else."""
    router.probe()
    body = chat("hi", max_tokens=4, logprobs=True, top_logprobs=5, stream=True)
    clients = [router.begin(CHATS, body) for _ in range(900)]
    for client in clients:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data = data[-5:] + (part := client.recv(1 << 16))
            assert part
        client.close()
    router.check()


def test_a_reader_who_was_away_is_served_in_turns(router: Router) -> None:
    """Thousands of tokens wait, more than the sockets hold: they are not made text of in one go."""
    router.probe()
    before = router.metric('pdctl_requests_total{outcome="finished"}')
    body = chat("hi", max_tokens=3000, logprobs=True, top_logprobs=20, stream=True, n=2)
    with router.begin(CHATS, body) as away:
        router.wait_for('pdctl_requests_total{outcome="finished"}', before + 2)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data = data[-5:] + away.recv(1 << 20)
    router.check()


def test_a_lock_that_is_held_holds_up_only_whoever_needs_it(router: Router) -> None:
    """By a process that was stopped, say: others are answered, and who waits for the lock gets it in the end."""
    descriptor = os.open(router.segment, os.O_RDWR)
    leaving = router.begin(COMPLETIONS, {"prompt": "abc", "max_tokens": 8000, "stream": True})
    router.wait_for('pdctl_rows{state="decoding"}', 1)
    router.probe()
    with ThreadPoolExecutor(1) as pool:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            asking = pool.submit(router.ask, COMPLETIONS, {"prompt": "abc", "max_tokens": 1})
            leaving.close()
            router.wait_for("pdctl_requests_waiting", 1)
            for _ in range(5):
                assert router.ask("/health")[0] == 200
            assert not asking.done()
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        assert asking.result()[0] == 200
    router.wait_for('pdctl_rows{state="free"}', 300)
    router.check()


@pytest.mark.parametrize("number", [1, 1000])
def test_clients_that_send_much_and_leave_cost_no_memory(router: Router, number: int) -> None:
    """Twenty at once, each with eight megabytes: one prompt that is refused, or many that take ten seconds."""
    body = json.dumps({"prompt": [noise(8_000_000 // number)] * number, "max_tokens": 1}).encode()
    assert len(body) > 8_000_000
    router.ask(COMPLETIONS, {"prompt": [noise(4000)] * 100, "max_tokens": 1})
    router.probe()
    before, highest, over = router.memory_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, router.memory_mib())
            over.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(20) as pool:
            clients = list(pool.map(lambda _: router.begin(COMPLETIONS, body), range(20)))
        for client in clients:
            client.close()
        deadline = time.monotonic() + WATCHDOG_S
        while router.readers():
            assert time.monotonic() < deadline, "the work of those who left goes on"
            time.sleep(0.01)
    finally:
        over.set()
        watcher.join()
    # Twenty bodies, once in the sockets' buffers of the router and once read; and one reader at its work.
    assert highest - before < 20 * 8 * 2 + 128
    deadline = time.monotonic() + WATCHDOG_S
    while router.memory_mib() > before + 64:
        assert time.monotonic() < deadline, f"{router.memory_mib():.0f} MiB, {before:.0f} before"
        time.sleep(0.05)
    router.check()
    assert router.ask(COMPLETIONS, {"prompt": "ab", "max_tokens": 1})[0] == 200
