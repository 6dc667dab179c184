"""What other users and strangers can reach of a running cluster: files, sockets, the interface, the key."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdctl.transport.segment import Role

pytestmark = pytest.mark.e2e

KEY = "e2e-KEY-0a1b2c3d4e5f"
PROMPT = "the-prompt-that-no-log-holds"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def cluster(start_shared: Any, tiny_dir: Path) -> Iterator[Any]:
    """One with a key, made under the umask that most people have; tests see no key in their own environment."""
    before = os.umask(0o022)
    try:
        yield start_shared(
            *("--model", str(tiny_dir), "--kv-blocks", "64", "--threads", "1", "--max-context", "512"),
            *("--dtype", "float32", "--allowed-host", "llm.example"),
            env={"PDCTL_API_KEY": KEY},
        )
    finally:
        os.umask(before)


def processes(cluster: Any) -> list[psutil.Process]:
    top = psutil.Process(cluster.state.supervisor_pid)
    return [top, *top.children(recursive=True)]


def ask(cluster: Any, path: str, *, key: str | None = None, host: str | None = None, body: Any = None) -> int:
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"Host": host} if host else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(cluster.state.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        assert json.loads(error.read())["error"]["message"]
        return error.code


def test_strangers_are_refused_and_the_owner_needs_no_flag(cluster: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3}
    assert ask(cluster, "/v1/completions", body=body) == 401
    assert ask(cluster, "/v1/completions", body=body, key=KEY + "x") == 401
    assert ask(cluster, "/metrics") == 401
    assert ask(cluster, "/health") == 200
    assert ask(cluster, "/v1/completions", body=body, key=KEY) == 200
    assert ask(cluster, "/v1/models", key=KEY, host="llm.example") == 200
    assert ask(cluster, "/v1/models", key=KEY, host="evil.example") == 421
    assert cluster.cli("generate", PROMPT, "--max-tokens", "3").code == 0
    assert cluster.cli("bench", "-n", "1", "--prompt-tokens", "4", "--max-tokens", "2").code == 0
    wrong = cluster.cli("generate", PROMPT, env={"PDCTL_API_KEY": "wrong"})
    assert wrong.code == 2 and "unset PDCTL_API_KEY" in wrong.err


def test_the_key_outlives_the_router(cluster: Any) -> None:
    cluster.kill(Role.ROUTER)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline
        try:
            if ask(cluster, "/health/ready") == 200:
                break
        except (OSError, KeyError):
            time.sleep(0.05)
    assert ask(cluster, "/v1/models") == 401
    assert ask(cluster, "/v1/models", key=KEY) == 200


def test_the_key_shows_itself_nowhere(cluster: Any) -> None:
    for arguments in (["status"], ["status", "--json"], ["inspect", "shm", "--json"], ["generate", "x", "--json"]):
        result = cluster.cli(*arguments)
        assert result.code == 0
        assert KEY not in result.out + result.err
    living = processes(cluster)
    assert len(living) >= 5
    for process in living:
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in " ".join(process.environ().values())
    holding = {path for path in cluster.state_dir.rglob("*") if path.is_file() and KEY in path.read_text()}
    directory = cluster.state_dir / cluster.name
    assert holding == {directory / "spec.json", directory / "state.json"}


def test_no_log_holds_a_prompt(cluster: Any) -> None:
    ask(cluster, "/v1/completions", body={"prompt": PROMPT, "max_tokens": 3}, key=KEY)
    ask(cluster, "/v1/completions", body={"prompt": PROMPT, "max_tokens": -3}, key=KEY)
    logs = cluster.cli("logs").out
    assert "completion 200" in logs and "400 invalid_value" in logs
    assert PROMPT not in logs


def test_files_are_this_users_alone(cluster: Any) -> None:
    """S57; under umask 000: test_lifecycle.py."""
    found = [cluster.state_dir, *cluster.state_dir.rglob("*"), cluster.state.segment_name.path]
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in found}
    assert kinds == {stat.S_IFDIR, stat.S_IFREG, stat.S_IFSOCK}
    for path in found:
        status = path.lstat()
        assert status.st_uid == os.getuid()
        assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_only_loopback_and_our_own_sockets_listen(cluster: Any) -> None:
    """S56"""
    port = int(cluster.state.url.rsplit(":", 1)[1])
    for process in processes(cluster):
        for one in process.net_connections("inet"):
            assert one.laddr.ip == "127.0.0.1", one
            assert one.type == socket.SOCK_STREAM
            if one.status == psutil.CONN_LISTEN:
                assert one.laddr.port == port
        for one in process.net_connections("unix"):
            # Unnamed ones are pairs; an abstract name would be open to every user.
            assert not one.laddr or Path(one.laddr).parent == cluster.state_dir / cluster.name, one


def test_bodies_that_are_none_cost_no_process(cluster: Any) -> None:
    """S52, over the wire; each refusal: test_api.py."""
    before = sorted(process.pid for process in processes(cluster))
    port = int(cluster.state.url.rsplit(":", 1)[1])
    bodies = [
        b"{:",
        b"",
        '{"prompt": "你好"}'.encode("gbk"),
        b'{"prompt": "\\ud800"}',
        b"[]",
        b"[" * 5000 + b"]" * 5000,
    ]
    bodies += [b'{"prompt": "' + b"x" * (10 << 20) + b'"}', b'{"prompt": "' + b"x" * (1 << 20) + b'"}', b"\0" * 100]
    for body in bodies:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        assert speak(port, head.encode() + body).split()[1] in (b"400", b"413"), body[:40]
    for garbage in (b"\x16\x03\x01" + bytes(100), b"GET /\r\n\r\n", b"X" * 40_000, bytes(range(256)) * 100):
        assert speak(port, garbage).split()[1] in (b"400", b"431"), garbage[:40]
    assert ask(cluster, "/v1/completions", body={"prompt": "x", "max_tokens": 1}, key=KEY) == 200
    assert sorted(process.pid for process in processes(cluster)) == before


def speak(port: int, data: bytes) -> bytes:
    """Say bytes, and hear all that is answered before the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        answer = b""
        try:
            client.sendall(data)
            while part := client.recv(65536):
                answer += part
        except ConnectionError:  # refused before it had all been sent
            answer = answer or client.recv(65536)
        return answer


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--top-p", "inf"),
        ("--max-tokens", "0"),
        ("--max-tokens", "9" * 30),
        ("--max-tokens", "1e3"),
        ("--seed", "9" * 30),
        ("--repetition-penalty", "0"),
        ("--min-tokens", "-1"),
        ("--stop", ""),
    ],
)
def test_numbers_that_nobody_can_want(cluster: Any, arguments: tuple[str, ...]) -> None:
    result = cluster.cli("generate", "x", *arguments)
    assert result.code == 2 and result.out == ""
    assert "Traceback" not in result.err and arguments[0].strip("-").replace("-", "_") in result.err.replace("-", "_")
