"""Who may come in: names in the Host header, API keys, and that a key shows itself nowhere."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pdctl.core.config import ClusterSpec
from pdctl.core.gate import Gate
from pdctl.core.hosts import Hosts, check_host_name, is_loopback
from pdctl.core.keys import ApiKey, given_key, others_can_read, parse_key
from pdctl.transport.errors import UsageError

KEY = "s3cret-KEY_0123456789"


async def inside(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(gate: Gate, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/", "/health/x"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", f"Bearer {KEY}")], 200),
        ([("Authorization", f"bearer   {KEY} ")], 200),
        ([], 401),
        ([("Authorization", KEY)], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", f"Basic {KEY}")], 401),
        ([("Authorization", f"Bearer {KEY}x")], 401),
        ([("Authorization", f"Bearer {KEY[:-1]}")], 401),
        ([("Authorization", f"Bearer {KEY.lower()}")], 401),
        ([("Authorization", "Bearer s\u00e9cret")], 401),
        ([("Authorization", "Bearer x"), ("Authorization", f"Bearer {KEY}")], 401),
    ],
)
def test_all_but_health_needs_the_key(path: str, headers: list[tuple[str, str]], status: int) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    answer = ask(Gate(inside, hosts=None, key=ApiKey(KEY)), path, encoded)  # type: ignore[arg-type]
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
        assert KEY not in answer.text


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_health_is_open(path: str) -> None:
    assert ask(Gate(inside, hosts=Hosts("127.0.0.1"), key=ApiKey(KEY)), path, []).status_code == 200


@pytest.mark.parametrize(
    ("path", "hosts", "status"),
    [
        ("/health", [], 200),
        ("/health/ready", [], 200),
        ("/health", [b"evil.example"], 421),
        ("/health", [b""], 421),
        ("/health", [b"localhost", b"localhost"], 421),
        ("/v1/models", [], 421),
        ("/metrics", [], 421),
    ],
)
def test_a_probe_without_a_host_may_ask_for_health(path: str, hosts: list[bytes], status: int) -> None:
    """HTTP/1.0, which load balancers speak, knows no Host header."""
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": "http", "path": path, "headers": [(b"host", host) for host in hosts]}
    asyncio.run(Gate(inside, hosts=Hosts("127.0.0.1"), key=None)(scope, receive, send))
    assert said[0]["status"] == status


@pytest.mark.parametrize(
    ("bind", "allowed", "header", "admitted"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "LocalHost.:1", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "[0:0:0:0:0:0:0:1]", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example:8000", False),
        ("127.0.0.1", (), "localhost@evil.example", False),
        ("127.0.0.1", (), "localhost:80:80", False),
        ("127.0.0.1", (), "192.168.0.7", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", ("llm.example",), "LLM.example:443", True),
        ("127.0.0.1", ("llm.example",), "other.llm.example", False),
        ("127.0.0.2", (), "127.0.0.2", True),
        ("localhost", (), "localhost", True),
        ("::1", (), "[::1]", True),
        ("0.0.0.0", (), "whatever.example", True),
        ("0.0.0.0", (), "", True),
        ("0.0.0.0", ("llm.example",), "llm.example", True),
        ("0.0.0.0", ("llm.example",), "whatever.example", False),
        ("0.0.0.0", ("llm.example",), "192.168.0.7:8000", True),
        ("::", ("llm.example",), "[fe80::1]:8000", True),
    ],
)
def test_names_that_a_server_goes_by(bind: str, allowed: tuple[str, ...], header: str, admitted: bool) -> None:
    hosts = Hosts(bind, allowed)
    assert hosts.admits([header.encode()]) is admitted
    answer = ask(Gate(inside, hosts=hosts, key=None), "/health", [("Host", header)])
    assert answer.status_code == (200 if admitted else 421)
    if not admitted:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-host" in answer.json()["error"]["message"]


def test_one_host_and_no_other() -> None:
    assert not Hosts("127.0.0.1").admits([])
    assert not Hosts("127.0.0.1").admits([b"localhost", b"evil.example"])


def test_a_foreign_name_learns_nothing_of_keys() -> None:
    gate = Gate(inside, hosts=Hosts("127.0.0.1"), key=ApiKey(KEY))
    assert ask(gate, "/v1/models", [("Host", "evil.example")]).status_code == 421


def test_refusals_write_nothing_of_the_client_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    gate = Gate(inside, hosts=Hosts("127.0.0.1"), key=ApiKey(KEY))
    ask(gate, "/v1/%0aMARKER", [("Authorization", "Bearer MARKER")])
    ask(gate, "/MARKER", [("Host", "MARKER.example")])
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("pdctl")]
    assert [line.split(": ")[1] for line in ours] == ["invalid_api_key", "host_not_allowed"]
    assert not any("MARKER" in line or "\n" in line for line in ours)


@pytest.mark.parametrize("text", ["", "http://a", "a:80", "a/b", "*.example", "a b", "a..b", "x" * 254, "é.example"])
def test_allowed_hosts_are_names(text: str) -> None:
    with pytest.raises(UsageError, match="--allowed-host"):
        check_host_name(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# --- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \n", "two words", "line\nline", "käse", "x" * 513, "a\x00b", "a\x7f"])
def test_what_is_no_key_is_refused_without_showing_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_bytes(text.encode())
    with pytest.raises(UsageError, match="--api-key-file") as caught:
        given_key(file)
    assert not text.strip() or text.strip() not in caught.value.message
    if "\0" not in text:
        monkeypatch.setenv("PDCTL_API_KEY", text)
        with pytest.raises(UsageError, match="PDCTL_API_KEY"):
            given_key(None)


def test_files_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDCTL_API_KEY", raising=False)
    assert given_key(None) is None
    monkeypatch.setenv("PDCTL_API_KEY", KEY)
    assert given_key(None) == ApiKey(KEY)
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o640)
    assert given_key(file) == ApiKey("from-file")
    assert others_can_read(file)
    file.chmod(0o600)
    assert not others_can_read(file)


@pytest.mark.parametrize("path", ["/", "/nowhere/key", "/dev/zero"])
def test_files_that_hold_no_key(path: str) -> None:
    with pytest.raises(UsageError, match=f"--api-key-file {path}"):
        given_key(Path(path))


def test_a_key_does_not_show_itself() -> None:
    key = parse_key(KEY, "test")
    spec = ClusterSpec(
        name="c",
        state_dir=Path("/tmp/c"),
        model_path=Path("/m"),
        model_name="m",
        fingerprint=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=9,
        eos_token_ids=(),
        allowed_hosts=("llm.example",),
        api_key=key,
    )
    for shown in (repr(key), str(key), f"{key}", repr(spec), repr(asdict(spec))):
        assert KEY not in shown
    with pytest.raises(TypeError):
        json.dumps(key)
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert key != ApiKey("other") and key != KEY
