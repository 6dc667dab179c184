"""Loads against servers that misbehave in every way: right counts, right causes, and the load ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import DONE, WATCHDOG_S, FakeServer, chunk, good, running

from pdctl.core.bench.client import Server, carries_token, find_server
from pdctl.core.bench.compare import figures_of
from pdctl.core.bench.figures import summarize
from pdctl.core.bench.serve import serve
from pdctl.core.bench.workloads import Arrivals, Workload, make
from pdctl.core.keys import ApiKey
from pdctl.transport.errors import IncompatibleError, NotFoundError, PdctlError, UsageError


def workload(kind: str = "random", **more: Any) -> Workload:
    values: dict[str, Any] = {"num_prompts": 6, "input_len": 5, "output_len": 3, "max_concurrency": None}
    values |= {"arrivals": Arrivals(), "seed": 1, "vocab_size": 50}
    return make(kind, **{**values, **more})


def measure(server: Server, load_: Workload, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"objectives": {}, "num_warmups": 0, "timeout_s": 20.0, **more}
    return serve(server, load_, **options)


def causes(measured: dict[str, Any]) -> dict[str, int]:
    return {error["kind"]: error["count"] for error in measured["summary"]["errors_by_kind"]}


def test_a_good_server() -> None:
    fake = FakeServer(good)
    ended = []
    with running(fake) as server:
        measured = measure(server, workload(), on_sample=ended.append)
    summary = measured["summary"]
    assert (summary["completed"], summary["failed"], causes(measured)) == (6, 0, {})
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 18)
    assert [one["token_ids"] for one in measured["samples"]] == [[0, 1, 2]] * 6
    assert sorted(one.index for one in ended) == list(range(6))
    body = fake.bodies[0]
    assert body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}
    assert {"ignore_eos", "return_token_ids", "timings"} <= set(body)


def test_another_server_is_asked_what_the_interface_has() -> None:
    fake = FakeServer(good, owner="somebody")
    with running(fake) as server:
        measure(server, workload())
    assert {"timings", "return_token_ids"}.isdisjoint(fake.bodies[0])


async def _nothing(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield DONE


async def _no_bytes(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    return
    yield


async def _closes(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield chunk(1)
    yield None


async def _ends_early(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield chunk(1)


async def _error_event(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield chunk(1)
    yield {"error": {"message": "the decode daemon died", "code": "daemon_died"}}
    yield DONE


async def _too_many(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield web.json_response({"error": {"message": "queue full"}}, status=429)


async def _server_error(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield web.Response(status=500, text="<html>oops</html>")


async def _no_json(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield b"data: {not json\n\n"


async def _other_shapes(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield [b"data: 5\n\n", b'data: {"choices": 7}\n\n', b'data: {"choices": ["x"]}\n\n'][number % 3]


async def _endless_line(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield b"data: " + b"x" * (9 << 20)


async def _drips(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Never silent for long, and never done."""
    for _ in range(1000):
        yield b": still here\n\n"
        await asyncio.sleep(0.05)


async def _hangs(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    yield chunk(1)
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_nothing, "empty"),
        (_no_bytes, "cut_off"),
        (_closes, "cut_off"),
        (_ends_early, "cut_off"),
        (_error_event, "event"),
        (_too_many, "http_429"),
        (_server_error, "http_500"),
        (_no_json, "malformed"),
        (_other_shapes, "malformed"),
        (_endless_line, "malformed"),
        (_drips, "timeout"),
        (_hangs, "timeout"),
    ],
)
def test_a_server_that_fails_every_second_request(answer: Any, kind: str) -> None:
    async def half(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        async for part in good(number, body) if number % 2 else answer(number // 2, body):
            yield part

    # The one that is waited for in vain costs its time, and no other must run out of it.
    half_of, timeout_s = (1, 3.0) if kind == "timeout" else (3, WATCHDOG_S)
    with running(FakeServer(half)) as server:
        measured = measure(server, workload(num_prompts=2 * half_of, max_concurrency=1), timeout_s=timeout_s)
    assert causes(measured) == {kind: half_of}
    summary = measured["summary"]
    assert (summary["completed"], summary["failed"]) == (half_of, half_of)
    assert len(measured["samples"]) == 2 * half_of
    # What failed is in no other figure.
    assert summary["total_output_tokens"] == 3 * half_of
    assert summary == {**summarize_again(measured), "errors_by_kind": summary["errors_by_kind"]}


def summarize_again(measured: dict[str, Any]) -> dict[str, Any]:
    from pdctl.core.bench.samples import Sample

    good_ones = [
        Sample(**{**one, "chunks_ms": tuple(one["chunks_ms"])}) for one in measured["samples"] if one["error"] is None
    ]
    duration = measured["summary"]["duration"]
    again = summarize(good_ones, duration, {})
    # Samples are kept to the microsecond.
    return {
        key: pytest.approx(value, abs=0.01) if isinstance(value, float) else value for key, value in again.items()
    } | {"failed": measured["summary"]["failed"]}


def test_the_causes_own_words_are_kept() -> None:
    with running(FakeServer(_error_event)) as server:
        measured = measure(server, workload())
    assert measured["summary"]["errors_by_kind"][0]["first"] == "the decode daemon died"


def test_nobody_listens_any_more() -> None:
    with running(FakeServer(good)) as server:
        pass
    measured = measure(server, workload())
    assert causes(measured) == {"connection": 6}
    assert measured["summary"]["p50_ttft_ms"] is None


def test_at_most_so_many_at_once() -> None:
    """They are answered once so many are there, so that no more would be seen."""
    for most, load_ in ((2, workload(max_concurrency=2)), (6, workload())):
        met = asyncio.Event()

        async def answer(
            number: int, body: dict[str, Any], most: int = most, met: asyncio.Event = met
        ) -> AsyncIterator[Any]:
            yield chunk(1)
            if number + 1 == most:
                met.set()
            await asyncio.wait_for(met.wait(), WATCHDOG_S)
            yield DONE

        fake = FakeServer(answer)
        with running(fake) as server:
            measured = measure(server, load_, timeout_s=WATCHDOG_S)
        assert fake.most_at_once == most
        assert measured["summary"]["completed"] == 6
        assert measured["summary"]["total_output_tokens"] == 6  # no usage: from token ids


def test_requests_come_when_they_are_due() -> None:
    with running(FakeServer(good)) as server:
        measured = measure(server, workload(arrivals=Arrivals(kind="constant", rate_per_s=20)))
    first_ms = measured["samples"][0]["due_ms"]
    for index, one in enumerate(measured["samples"]):
        assert one["due_ms"] - first_ms == pytest.approx(50 * index, abs=0.01)
        assert one["sent_ms"] >= one["due_ms"] - 0.01


def test_a_turn_continues_what_was_answered() -> None:
    fake = FakeServer(good)
    with running(fake) as server:
        measure(server, workload("multi-turn", num_prompts=1, turns=3))
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert second[:8] == [*first, 0, 1, 2]
    assert third[:16] == [*second, 0, 1, 2]
    assert len(third) == 5 * 3 + 3 * 2


def test_a_conversation_ends_with_its_first_failure() -> None:
    async def second_fails(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        async for part in _too_many(number, body) if number == 1 else good(number, body):
            yield part

    with running(FakeServer(second_fails)) as server:
        measured = measure(server, workload("multi-turn", num_prompts=1, turns=4))
    assert (measured["summary"]["completed"], measured["summary"]["failed"]) == (1, 1)


def test_turns_need_a_server_that_tells_ids() -> None:
    with running(FakeServer(good, owner="other")) as server, pytest.raises(IncompatibleError, match="token ids"):
        measure(server, workload("multi-turn", turns=2))


def test_prompts_of_the_mixed_workload_wait_for_all_streams() -> None:
    begun: list[int] = []
    prompts_began_at: list[int] = []

    over = asyncio.Event()

    async def watched(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        is_prompt = body["max_tokens"] == 1
        if is_prompt:
            prompts_began_at.append(len(begun))
            if len(prompts_began_at) == 2:
                over.set()
        else:
            await asyncio.sleep(0.02 * number)
            begun.append(number)
        async for part in good(number, body):
            yield part
            # Streams go on until both prompts are there.
            if not is_prompt:
                await asyncio.wait_for(over.wait(), WATCHDOG_S)

    with running(FakeServer(watched)) as server:
        measured = measure(server, workload("mixed", num_streams=3, stream_input_len=2, output_len=20, num_prompts=2))
    assert prompts_began_at == [3, 3]
    assert {group: figures["completed"] for group, figures in measured["groups"].items()} == {
        "stream": 3,
        "prompt": 2,
    }
    assert measured["under_prompts"]["num_gaps"] > 0


def test_what_the_streams_give_does_not_depend_on_the_prompts_beside_them() -> None:
    """The same streams; the second server takes a second over each prompt."""
    for prompt_s in (0.0, 1.0):

        async def answer(number: int, body: dict[str, Any], prompt_s: float = prompt_s) -> AsyncIterator[Any]:
            if body["max_tokens"] == 1:
                await asyncio.sleep(prompt_s)
            async for part in good(number, body):
                yield part

        with running(FakeServer(answer)) as server:
            measured = measure(server, workload("mixed", num_streams=2, stream_input_len=2, output_len=20))
        streams = [one for one in measured["samples"] if one["group"] == "stream"]
        took_ms = max(one["chunks_ms"][-1] for one in streams) - min(one["sent_ms"] for one in streams)
        tokens_per_s = figure(measured, "output_throughput")
        assert tokens_per_s == pytest.approx(2 * 20 / took_ms * 1e3, rel=1e-3)
        assert measured["summary"]["duration"] >= prompt_s


def figure(measured: dict[str, Any], key: str) -> float | None:
    """As `compare` takes it."""
    return next(one.of(measured) for one in figures_of("mixed") if one.key == key)


def test_prompts_come_even_if_every_stream_fails() -> None:
    with running(FakeServer(_too_many)) as server:
        measured = measure(server, workload("mixed", num_streams=2))
    assert causes(measured) == {"http_429": 8}
    assert measured["under_prompts"]["p99_itl_ms"] is None


def test_warm_ups_are_others_and_not_measured() -> None:
    fake = FakeServer(good)
    with running(fake) as server:
        measured = measure(server, workload(), num_warmups=2)
    asked = [body["prompt"] for body in fake.bodies]
    assert len(asked) == 8
    assert measured["summary"]["completed"] == 6
    assert [len(prompt) for prompt in asked] == [5] * 8
    assert asked[0] not in asked[2:]


def test_every_group_is_warmed_up_and_texts_are_others(tmp_path: Path) -> None:
    fake = FakeServer(good)
    with running(fake) as server:
        measure(server, workload("mixed", num_streams=2, stream_input_len=2), num_warmups=1)
        assert sorted(len(body["prompt"]) for body in fake.bodies[:2]) == [2, 5]
        file = tmp_path / "asked.jsonl"
        file.write_text('{"prompt": "a text"}\n{"messages": [{"role": "user", "content": "a chat"}]}\n')
        fake.bodies.clear()
        measure(server, workload("jsonl", dataset=file), num_warmups=1)
    warm_up, *asked = [body.get("prompt") for body in fake.bodies]
    assert asked == ["a text", None]
    assert warm_up.endswith(" a text")
    # A text's answer ends where it ends.
    assert all("ignore_eos" not in body for body in fake.bodies)


def _delta(delta: Any, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None, **more}


@pytest.mark.parametrize(
    ("choice", "brings"),
    [
        # As OpenAI, vLLM, llama.cpp and we send a role, a piece of text, an end.
        (_delta({"role": "assistant", "content": ""}), False),
        (_delta({"role": "assistant", "content": None, "refusal": None}), False),
        (_delta({"role": "assistant"}), False),
        (_delta({"role": "assistant", "content": "Hel"}), True),
        (_delta({"content": "lo"}), True),
        (_delta({"content": ""}), True),
        (_delta({}, finish_reason="stop"), False),
        (_delta({"content": ""}, finish_reason="stop"), False),
        (_delta({"content": None}, finish_reason="stop"), False),
        (_delta({"content": "."}, finish_reason="length"), True),
        (_delta({}), False),
        (_delta({"reasoning_content": "Hm", "content": None}), True),
        (_delta({"tool_calls": [{"index": 0}]}), True),
        # Where ids are told, they decide: the end token comes without a text.
        (_delta({"content": ""}, finish_reason="stop", token_ids=[2]), True),
        (_delta({}, finish_reason="stop", token_ids=[]), False),
        (_delta({"role": "assistant", "content": ""}, token_ids=None), False),
        # A completion: every chunk with choices, as `vllm bench serve` has it.
        ({"index": 0, "text": "", "finish_reason": "stop"}, True),
        ({"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}, True),
    ],
    ids=repr,
)
def test_which_chunks_bring_a_token(choice: dict[str, Any], brings: bool) -> None:
    assert carries_token(choice) is brings


@pytest.mark.parametrize("owner", ["somebody", "pdctl"])
def test_a_chats_first_token_is_its_first_text(tmp_path: Path, owner: str) -> None:
    """The role comes at once and the end by itself: neither is a token."""

    async def chat(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"choices": [_delta({"role": "assistant", "content": ""})]}
        await asyncio.sleep(0.2)
        for token, text in enumerate(("one", "", "two")):
            told = {"token_ids": [token]} if owner == "pdctl" else {}
            yield {"choices": [_delta({"content": text}, **told)]}
        yield {"choices": [_delta({}, finish_reason="stop")]}
        yield {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
        yield DONE

    file = tmp_path / "asked.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a chat"}]}\n')
    with running(FakeServer(chat, owner=owner)) as server:
        [sample] = measure(server, workload("jsonl", dataset=file))["samples"]
    assert len(sample["chunks_ms"]) == sample["output_tokens"] == 3
    assert sample["chunks_ms"][0] - sample["sent_ms"] >= 200
    assert (sample["finish_reason"], sample["error"]) == ("stop", None)


def test_a_chat_of_nothing_but_its_end_token_has_succeeded(tmp_path: Path) -> None:
    async def silent(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"choices": [_delta({"role": "assistant", "content": ""})]}
        if number == 0:
            yield {"choices": [_delta({"content": ""}, finish_reason="stop")]}
        yield DONE

    file = tmp_path / "asked.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a chat"}]}\n' * 2)
    with running(FakeServer(silent, owner="somebody")) as server:
        measured = measure(server, workload("jsonl", dataset=file, max_concurrency=1))
    assert [len(sample["chunks_ms"]) for sample in measured["samples"]] == [1, 0]
    assert causes(measured) == {"empty": 1}


def test_a_turn_without_ids_has_failed() -> None:
    async def no_ids(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"choices": [{"text": "x"}]}
        yield DONE

    with running(FakeServer(no_ids)) as server:
        measured = measure(server, workload("multi-turn", num_prompts=1, turns=2))
    assert causes(measured) == {"no_token_ids": 1}


def test_what_a_server_says_cannot_steer_a_terminal() -> None:
    async def hostile(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"error": {"message": "\x1b[2J gone"}}

    with running(FakeServer(hostile)) as server:
        measured = measure(server, workload())
    assert "\x1b" not in measured["summary"]["errors_by_kind"][0]["first"]


def test_a_failed_warm_up_ends_it() -> None:
    with running(FakeServer(_too_many)) as server, pytest.raises(PdctlError, match="warm-up failed: queue full"):
        measure(server, workload(), num_warmups=1)


def test_a_key_is_sent() -> None:
    fake = FakeServer(good)
    with running(fake) as server:
        keyed = Server(url=server.url, model=server.model, key=ApiKey("secret"))
        measured = measure(keyed, workload())
    assert set(fake.keys) == {"Bearer secret"}
    assert "secret" not in json.dumps(measured)


def test_what_answers_is_no_server_of_models(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="http://"):
        asyncio.run(find_server("localhost:1", None, None))
    with pytest.raises(NotFoundError, match="nobody answers"):
        asyncio.run(find_server("http://127.0.0.1:1", None, None))
    with running(FakeServer(good)) as server:
        assert (server.vocab_size, server.is_pdctl) == (50, True)
        with pytest.raises(UsageError, match="it serves m"):
            asyncio.run(find_server(f"{server.url}/v1", None, "other"))
        with pytest.raises(IncompatibleError, match="HTTP 404"):
            asyncio.run(find_server(f"{server.url}/elsewhere", None, None))
