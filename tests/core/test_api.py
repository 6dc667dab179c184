"""The HTTP interface over real rows, with daemons and a model that are played by a task of the test."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizer_kinds import CORPUS, MANY, build

from pdctl.core.api import (
    INLINE_BODY_BYTES,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    ServerConfig,
    create_app,
)
from pdctl.core.hosts import Hosts
from pdctl.core.keys import ApiKey
from pdctl.core.requests import RowClient
from pdctl.core.server.body import MAX_BODY_BYTES
from pdctl.core.tokenizer import Tokenizer
from pdctl.core.weights.generation import SamplingDefaults
from pdctl.transport.doorbell import Bell
from pdctl.transport.layout import DType, Geometry, H, P, R
from pdctl.transport.recovery import verify
from pdctl.transport.rows import Actor, Claim, FinishReason, RowParams, RowState, TokenLogprobs
from pdctl.transport.segment import ParticipantState, Role, Segment

MODEL = "tiny"
BOS, EOS = 1, 2
TEMPLATE = (
    "{% if messages[0].role == 'system' and messages[0].content == 'no' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
TEXT = "Héllo 😀 wörld, one two three. 안녕하세요!"


@functools.cache
def inner_tokenizer(*, template: bool = True) -> Any:
    """One token a byte, BOS before every completion."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {letter: at + 3 for at, letter in enumerate(alphabet)}
    inner = Inner(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE if template else None,
    )


def ids_of(text: str) -> list[int]:
    return list(inner_tokenizer()(text, add_special_tokens=False).input_ids)


def logprobs_of(position: int, token: int, number: int) -> TokenLogprobs:
    """Values that float32 holds exactly: the token itself comes second, parts of a character after it."""
    value = -position / 8
    others = list(dict.fromkeys([(token + 1) % 259, token, *ids_of("😀"), *range(40, 80)]))
    top = tuple((other, value - rank / 16) for rank, other in enumerate(others[:number], -1))
    return TokenLogprobs(token=token, logprob=value, top=top)


class Engine:
    """A prefill and a decode daemon. The model continues every prompt with `reply`, then EOS, over and over.

    Attributes:
        reply: prompt ids -> all output ids.
        burst: tokens a step.
        paused: decode claims and computes nothing.
        failure: the next step fails all rows with this.
    """

    def __init__(self, segment: Segment, run_dir: Path) -> None:
        self.segment, self.rows = segment, segment.rows
        self.prefill, self.decode = segment.attach(Role.PREFILL), segment.attach(Role.DECODE)
        self.bells = [Bell(run_dir, self.prefill.slot), Bell(run_dir, self.decode.slot)]
        self.reply: Callable[[list[int]], list[int]] = lambda prompt: [*ids_of(TEXT), EOS]
        self.burst = 1
        self.paused = False
        self.failure = ""
        self.seen: list[RowParams] = []
        self.prompts: list[list[int]] = []
        self._active: dict[int, tuple[Claim, list[int]]] = {}

    def become_ready(self, *participants: Any) -> None:
        for participant in participants or (self.prefill, self.decode):
            participant.put(P.READY_NS, time.monotonic_ns())
            participant.put(P.STATE, ParticipantState.READY)

    async def run(self) -> None:
        while True:
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        rows = self.rows
        for bell in self.bells:
            bell.drain()
        for row in rows.in_state(RowState.QUEUED):
            claim = rows.claim(self.prefill, row, alone=True)
            if claim is not None:
                rows.commit_kv(row, claim.num_tokens - 1)
                rows.put(row, R.PREFILLED_TOKENS, claim.num_tokens - 1)
                rows.hand_over(row)
        for row in [] if self.paused else rows.in_state(RowState.READY):
            claim = rows.claim(self.decode, row, alone=True)
            if claim is not None:
                prompt = rows.tokens(row, 0, claim.num_tokens)
                self.seen.append(rows.params(row))
                self.prompts.append(prompt)
                self._active[row] = (claim, self.reply(prompt))
        for row in list(self._active):
            self._advance(row)

    def _advance(self, row: int) -> None:
        rows = self.rows
        claim, reply = self._active[row]
        if rows.get(row, R.CANCEL):
            rows.end_cancelled(row, Actor.DECODE)
            del self._active[row]
        elif self.failure:
            rows.fail(row, self.failure, Actor.DECODE)
            del self._active[row]
        elif not self.paused:
            for _ in range(self.burst):
                if self._sample(row, claim, reply):
                    del self._active[row]
                    break
        else:
            return
        self.bells[1].ring(rows.get(row, R.CLIENT) - 1)

    def _sample(self, row: int, claim: Claim, reply: list[int]) -> bool:
        rows, params = self.rows, self.rows.params(row)
        position = rows.count_tokens(row)
        token = reply[(position - claim.num_tokens) % len(reply)]
        if (number := params.num_logprobs) is not None:
            if not rows.has_logprob_room(row, position):
                return False
            rows.put_logprobs(row, position, logprobs_of(position, token, number))
        assert rows.grow(row, position + 1)
        if not rows.get(row, R.T_FIRST_TOKEN):
            rows.put(row, R.T_FIRST_TOKEN, time.monotonic_ns())
        rows.commit_kv(row, position)
        rows.commit_token(row, claim.generation, position, token)
        if token in params.stop_ids or (token == EOS and not params.ignore_eos):
            rows.finish(row, FinishReason.STOP)
        elif position + 1 == rows.get(row, R.LIMIT_TOKENS):
            rows.finish(row, FinishReason.LENGTH)
        else:
            return False
        return True


class World:
    def __init__(self, run_dir: Path, options: dict[str, Any]) -> None:
        self.segment = Segment.anonymous(
            Geometry(
                num_blocks=options.get("num_blocks", 256),
                block_tokens=8,
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
                dtype=DType.FLOAT32,
                max_rows=options.get("max_rows", 8),
                max_context=256,
                max_participants=8,
            )
        )
        self.engine = Engine(self.segment, run_dir)
        self.supervisor = self.segment.attach(Role.SUPERVISOR)
        me = self.segment.attach(Role.ROUTER)
        self.client = RowClient(
            self.segment,
            me,
            Bell(run_dir, me.slot),
            local_prefill_tokens=4,
            max_batch=8,
            max_queue=options.get("max_queue", 16),
        )
        self.app = create_app(
            self.client,
            options.get("tokenizer") or Tokenizer(inner_tokenizer(template=options.get("template", True))),
            ServerConfig(
                model_name=MODEL,
                vocab_size=options.get("vocab_size", 259),
                eos_token_ids=options.get("eos_token_ids", (EOS,)),
                sampling=options.get("sampling", SamplingDefaults()),
                request_timeout_s=options.get("request_timeout_s", 60),
                hosts=options.get("hosts"),
                api_key=options.get("api_key"),
            ),
        )
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://router")
        if options.get("ready", True):
            self.engine.become_ready()

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, prompt: Any = "ab", **body: Any) -> dict[str, Any]:
        response = await self.post(prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.content)

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they stand in the text."""
        response = await self.http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        samples = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        assert len(samples) == len(lines)
        return samples

    async def settle(self) -> None:
        while self.client.num_live:
            await asyncio.sleep(0.001)


def parse_events(content: bytes) -> list[Any]:
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return ["[DONE]" if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def text_of(events: list[Any], index: int = 0) -> str:
    pieces = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in pieces
        if choice["index"] == index
    )


Scenario = Callable[[World], Awaitable[None]]


def in_world(**options: Any) -> Callable[[Scenario], Callable[[Path], None]]:
    """Makes a test of a scenario; afterwards nothing of it may be left in the segment."""

    def decorate(scenario: Scenario) -> Callable[[Path], None]:
        async def run(run_dir: Path) -> None:
            async with asyncio.timeout(60):
                world = World(run_dir, options)
                world.client.start()
                engine = asyncio.create_task(world.engine.run())
                try:
                    await scenario(world)
                    world.engine.paused = False
                    await world.settle()
                finally:
                    engine.cancel()
                    world.app.state.close()
                    world.client.begin_shutdown("over")
                    await world.client.finish_shutdown(1)
                assert set(world.segment.rows.states()) == {RowState.FREE}
                assert verify(world.segment) == []

        def test(tmp_path: Path) -> None:
            asyncio.run(run(tmp_path))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    if param is not None:
        assert (error["param"] or "").split(".")[0] == param, error
    return error


# --- answers ---------------------------------------------------------------------------------------------------


@in_world()
async def test_completion_and_its_usage(world: World) -> None:
    answer = await world.complete("ab", max_tokens=200)
    num_reply = len(ids_of(TEXT)) + 1
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": num_reply,
        "total_tokens": 3 + num_reply,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@in_world()
async def test_cached_tokens_are_told(world: World) -> None:
    def publish_everything(prompt: list[int]) -> list[int]:
        for row in world.segment.rows.in_state(RowState.DECODING):
            world.segment.rows.publish(row)
        return [EOS]

    world.engine.reply = publish_everything
    cached = []
    for _ in range(2):
        answer = await world.complete("x" * 30, max_tokens=5)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 24]


@in_world()
async def test_limits_are_exact(world: World) -> None:
    """max_tokens 1, 2, 3: so many tokens, and "length"; in all four forms."""
    messages = [{"role": "user", "content": "hi"}]
    for limit in (1, 2, 3):
        for path, body in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            answer = (await world.post(path, max_tokens=limit, **body)).json()
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["choices"][0]["finish_reason"] == "length"
            events = await world.events(path, max_tokens=limit, stream_options={"include_usage": True}, **body)
            assert events[-2]["usage"] == answer["usage"] | {
                "prompt_tokens_details": events[-2]["usage"]["prompt_tokens_details"]
            }
            reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
            assert reasons == ["length"]


@in_world()
async def test_first_token_may_be_the_end(world: World) -> None:
    world.engine.reply = lambda prompt: [EOS]
    answer = await world.complete(max_tokens=5)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1
    world.engine.reply = lambda prompt: ids_of("xyz")
    answer = await world.complete(max_tokens=5, stop="x")
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1


@in_world()
async def test_default_limits(world: World) -> None:
    """16 for completions as with OpenAI, the rest of the context for chats; less if there is less."""
    world.engine.reply = lambda prompt: ids_of("abc")
    assert (await world.complete())["usage"]["completion_tokens"] == 16
    assert (await world.complete(max_tokens=None))["usage"]["completion_tokens"] == 16
    assert (await world.complete("x" * 250))["usage"]["completion_tokens"] == 5
    chat = await world.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.json()["usage"]["total_tokens"] == 256
    both = await world.complete(max_tokens=3, max_completion_tokens=3)
    assert both["usage"]["completion_tokens"] == 3


@in_world()
async def test_prompt_ids_are_the_tokenizers(world: World) -> None:
    """One BOS, from the tokenizer in completions, from the template in chats; ids as they are."""
    await world.complete("hé", max_tokens=1)
    await world.complete([5, 6, 7], max_tokens=1)
    messages = [{"role": "user", "content": "hi"}]
    chat = await world.post("/v1/chat/completions", messages=messages, max_tokens=1)
    expected = inner_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert world.engine.prompts == [inner_tokenizer()("hé").input_ids, [5, 6, 7], expected]
    assert world.engine.prompts[2].count(BOS) == 1
    assert chat.json()["usage"]["prompt_tokens"] == len(expected)


@in_world()
async def test_prompt_lists_keep_their_order(world: World) -> None:
    """More prompts than rows; answers of different lengths; strings and ids; streamed and not."""
    world.engine.reply = lambda prompt: [*[token for token in prompt if token > 2] * (1 + prompt[-1] % 3), EOS]
    prompts = [f"p{number}" for number in range(11)]
    alone = [(await world.complete(prompt))["choices"][0]["text"] for prompt in prompts]
    assert len(set(alone)) == len(prompts)
    for form in (prompts, [inner_tokenizer()(prompt).input_ids for prompt in prompts]):
        answer = await world.complete(form)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
        assert [choice["text"] for choice in answer["choices"]] == alone
        events = await world.events(prompt=form)
        assert [text_of(events, index) for index in range(len(prompts))] == alone
        finished = [c["index"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
        assert sorted(finished) == list(range(len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(len(inner_tokenizer()(p).input_ids) for p in prompts)


@in_world()
async def test_streams_join_to_the_whole_text(world: World) -> None:
    """Characters of up to four tokens, in any grouping, never halved."""
    for burst in (1, 2, 3, 7):
        world.engine.burst = burst
        events = await world.events(prompt="ab", max_tokens=200)
        assert text_of(events) == TEXT
        assert all("\ufffd" not in text_of([event]) for event in events)
        assert len(events) <= len(ids_of(TEXT)) + 2
        if burst == 1:  # a token that is part of a character is a chunk as well: clients time them
            assert "" in [text_of([event]) for event in events[:-3]]


@in_world()
async def test_stop_strings_cut_at_their_first_occurrence(world: World) -> None:
    for burst in (1, 4):
        world.engine.burst = burst
        for at in range(28):
            stop = TEXT[at : at + 3]
            expected = TEXT[: TEXT.find(stop)]
            answer = await world.complete(max_tokens=200, stop=stop)
            assert answer["choices"][0]["text"] == expected
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == len((expected + stop).encode())
            assert text_of(await world.events(prompt="ab", max_tokens=200, stop=[stop])) == expected
    answer = await world.complete(max_tokens=200, stop=["three", "one", "absent"])
    assert answer["choices"][0]["text"] == TEXT[: TEXT.find("one")]


@pytest.mark.parametrize("kind", MANY)
def test_stops_and_spaces_do_not_follow_the_tokens(tmp_path: Path, kind: str) -> None:
    """S16, S17, S18: tokens of several characters; stops that begin and end inside them, spaces at all places."""
    tokenizer = build(kind)
    ids = tokenizer.encode("    indented\n" + CORPUS[1] + CORPUS[0])
    text = tokenizer.decode(ids)
    edges = {len(tokenizer.decode(ids[:number])) for number in range(len(ids) + 1)}
    assert len(edges) < len(text)  # tokens are longer than a character

    @in_world(tokenizer=tokenizer, vocab_size=len(tokenizer))
    async def scenario(world: World) -> None:
        world.engine.reply = lambda prompt: [*ids, EOS]

        async def both(**body: Any) -> tuple[str, int]:
            whole = await world.complete([5], max_tokens=200, **body)
            events = await world.events(prompt=[5], max_tokens=200, **body)
            assert text_of(events) == whole["choices"][0]["text"]
            reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
            assert reasons == [whole["choices"][0]["finish_reason"]] == ["stop"]
            return whole["choices"][0]["text"], whole["usage"]["completion_tokens"]

        assert await both() == (text, len(ids) + 1)
        assert text.startswith("  ") and "\n    return" in text
        inside = [
            text[at:end]
            for at in range(30)
            for end in range(at + 6, at + 9)
            if at not in edges and end not in edges and any(edge in edges for edge in range(at, end))
        ]
        assert len(inside) > 5
        for stop in (*inside, *(text[at : at + 3] for at in range(30))):
            shown, used = await both(stop=stop)
            assert shown == text[: text.find(stop)]
            assert used < len(ids)
        assert (await both(stop=["daemon", "return"]))[0] == text[: text.find("return")]

    scenario(tmp_path)


@in_world()
async def test_stop_string_ends_the_row_early(world: World) -> None:
    world.engine.reply = lambda prompt: ids_of("ab")
    await world.complete(max_tokens=200, stop="b")
    await world.settle()
    words = world.segment.words
    # The answer was whole.
    assert (words[H.CANCELLED], words[H.FINISHED]) == (0, 1)


@in_world()
async def test_stop_ids_and_ignore_eos(world: World) -> None:
    world.engine.reply = lambda prompt: [*ids_of("ab"), EOS]
    letter_b = ids_of("b")[0]
    answer = await world.complete(stop_token_ids=[letter_b], return_token_ids=True)
    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["token_ids"] == ids_of("ab")
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = await world.complete(ignore_eos=True, max_tokens=7)
    assert answer["choices"][0]["text"] == "ababa"
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 7)
    assert world.engine.seen[-1].ignore_eos


@in_world()
async def test_chat_stream_has_its_shape(world: World) -> None:
    """One id, role first, finish once, usage only when asked and last, then [DONE]."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"messages": messages, "max_tokens": 100}
    whole = (await world.post("/v1/chat/completions", **body)).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
    for options in (None, {"include_usage": False}, {"include_usage": True}):
        events = await world.events("/v1/chat/completions", stream_options=options, **body)
        assert events.pop() == "[DONE]"
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
        assert events[0]["id"].startswith("chatcmpl-")
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        usages = [event for event in events if "usage" in event]
        if options == {"include_usage": True}:
            assert usages == [events.pop()]
            assert usages[0]["choices"] == []
            assert usages[0]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        else:
            assert usages == []
        choices = [event["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert text_of(events) == TEXT


@in_world()
async def test_token_ids_and_timings_on_demand(world: World) -> None:
    reply = [*ids_of(TEXT), EOS]
    answer = await world.complete("long enough", max_tokens=200, return_token_ids=True, timings=True)
    assert answer["choices"][0]["token_ids"] == reply
    keys = {
        "queue_ms",
        "prefill_ms",
        "handover_us",
        "decode_ms",
        "first_token_ms",
        "prefill_tokens",
        "local_tokens",
        "prefill_slot",
        "decode_slot",
        "adoptions",
        "preemptions",
    }
    assert answer["timings"].keys() == keys
    assert answer["timings"]["prefill_tokens"] == len(b"long enough")
    assert None not in answer["timings"].values()
    short = await world.complete("ab", timings=True)
    assert (short["timings"]["prefill_ms"], short["timings"]["handover_us"]) == (None, None)
    for usage in (False, True):
        events = await world.events(
            prompt="ab",
            max_tokens=200,
            return_token_ids=True,
            timings=True,
            stream_options={"include_usage": usage},
        )
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        assert [token for choice in choices for token in choice["token_ids"]] == reply
        assert ["timings" in event for event in events[:-1]] == [False] * (len(events) - 2) + [True]


@in_world(sampling=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40))
async def test_sampling_parameters_reach_the_row(world: World) -> None:
    await world.complete(max_tokens=1)
    await world.complete(max_tokens=1, temperature=1, top_p=0.5, top_k=-1, seed=-1, user="me", metadata={"a": [1]})
    await world.complete(max_tokens=1, temperature=1e-300, top_k=1000, seed=2**64 - 1)
    defaults, given, extreme = world.engine.seen
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 40)
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (1.0, 0.5, 0, 2**64 - 1)
    assert (extreme.temperature, extreme.top_k) == (0.0, 259)
    card = (await world.http.get("/v1/models")).json()["data"][0]
    assert card["default_sampling_params"] == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": None,
    }


@in_world(sampling=SamplingDefaults(temperature=0.0, min_p=0.1, repetition_penalty=1.3, max_tokens=3))
async def test_defaults_of_the_model_hold_until_a_request_says_otherwise(world: World) -> None:
    """What generation_config.json asks for: max_new_tokens is a default, which what is asked for may exceed."""
    silent = await world.complete()
    chat = (await world.post("/v1/chat/completions", messages=[{"role": "user", "content": "ab"}])).json()
    told = await world.complete(temperature=1, min_p=0, repetition_penalty=1, max_tokens=5, ignore_eos=True)
    assert [one["usage"]["completion_tokens"] for one in (silent, chat, told)] == [3, 3, 5]
    for params in world.engine.seen[:2]:
        assert (params.temperature, params.min_p, params.repetition_penalty) == (0.0, 0.1, 1.3)
    params = world.engine.seen[2]
    assert (params.temperature, params.min_p, params.repetition_penalty) == (1.0, 0.0, 1.0)


@in_world(sampling=SamplingDefaults(max_tokens=100))
async def test_a_default_length_never_raises_that_of_completions(world: World) -> None:
    """As in vLLM: OpenAI's 16 stays the default of completions."""
    assert (await world.complete(ignore_eos=True))["usage"]["completion_tokens"] == 16


@in_world()
async def test_top_p_zero_is_greedy(world: World) -> None:
    await world.complete(max_tokens=1, top_p=0, temperature=2)
    (params,) = world.engine.seen
    assert params.top_p == 0.0
    import torch

    from pdctl.core.sampler import sample

    logits = torch.tensor([0.1, 3.0, 2.9, 3.0])
    drawn = {sample(logits, replace(params, seed=seed, top_k=top_k), 7) for seed in range(50) for top_k in (0, 2)}
    assert drawn == {1}


@in_world(tokenizer=Tokenizer(inner_tokenizer()), eos_token_ids=(5,))
async def test_an_end_token_that_only_the_tokenizer_has_ends_answers(world: World) -> None:
    """Its class may have one that no file names: daemons learn of it with the row."""
    world.engine.reply = lambda prompt: [*ids_of("x"), EOS, *ids_of("yz")]
    answer = await world.complete(max_tokens=4)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("x", "stop")
    await world.complete(max_tokens=4, ignore_eos=True)
    await world.complete(max_tokens=4, stop_token_ids=[9])
    assert [params.stop_ids for params in world.engine.seen] == [(EOS,), (), (9, EOS)]


@in_world()
async def test_seeds_differ_unless_given(world: World) -> None:
    await world.complete(["ab", "ab"], max_tokens=1)
    await world.complete(["ab", "ab"], max_tokens=1, seed=7)
    seeds = [params.seed for params in world.engine.seen]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, 7]


@in_world()
async def test_every_parameter_reaches_the_row(world: World) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.125,
        "seed": 11,
        "min_tokens": 3,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
        "ignore_eos": True,
        "stop_token_ids": [258, 0],
    }
    biases = {"258": -100, "0": 100, "7": 0.5}
    await world.complete(max_tokens=3, logit_bias=biases, logprobs=4, **asked)
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    assert (await world.post("/v1/chat/completions", max_tokens=3, **chat, **asked)).status_code == 200
    expected = RowParams(
        **{name: value for name, value in asked.items() if name != "stop_token_ids"},  # type: ignore[arg-type]
        stop_ids=(258, 0),
        logit_bias=((0, 100.0), (7, 0.5), (258, -100.0)),
        num_logprobs=4,
    )
    assert world.engine.seen == [expected, replace(expected, logit_bias=(), num_logprobs=20)]


# --- several answers to a prompt -------------------------------------------------------------------------------


@in_world()
async def test_n_answers_have_streams_of_their_own_and_share_the_prompt(world: World) -> None:
    """More answers than rows; index = prompt * n + number; each seed its own, from the one that was given."""
    prompts = ["ab", "cde", "f"]
    world.engine.reply = lambda prompt: [*prompt, EOS]
    answer = await world.complete(prompts, n=4, best_of=4, seed=2**64 - 2, max_tokens=9)
    assert [choice["index"] for choice in answer["choices"]] == list(range(12))
    assert [choice["text"] for choice in answer["choices"]] == [p for p in prompts for _ in range(4)]
    assert [params.seed for params in world.engine.seen] == [2**64 - 2, 2**64 - 1, 0, 1] * 3
    tokens = [len(prompt) + 1 for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(tokens)
    assert answer["usage"]["completion_tokens"] == 4 * (sum(tokens) + 3)
    events = await world.events(prompt=prompts, n=4, max_tokens=9, stream_options={"include_usage": True})
    assert [text_of(events[:-2], index) for index in range(12)] == [p for p in prompts for _ in range(4)]
    assert events[-2]["usage"] | {"prompt_tokens_details": None} == answer["usage"] | {"prompt_tokens_details": None}
    assert len({params.seed for params in world.engine.seen[12:]}) == 12


@in_world()
async def test_n_chats_each_begin_with_their_role(world: World) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 4}
    whole = (await world.post("/v1/chat/completions", **body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    events = (await world.events("/v1/chat/completions", **body))[:-1]
    for index in range(3):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert text_of(events, index) == whole["choices"][index]["message"]["content"]


@in_world()
async def test_too_many_answers_are_refused(world: World) -> None:
    prompts = ["a"] * (MAX_PROMPTS // MAX_CHOICES + 1)
    error = check_error(await world.post(prompt=prompts, n=MAX_CHOICES), 400, "n")
    assert f"at most {MAX_PROMPTS}" in error["message"]
    for best_of in (1, 3):
        check_error(await world.post(prompt="a", n=2, best_of=best_of), 400, "best_of")
    assert world.engine.prompts == []


# --- log-probabilities -----------------------------------------------------------------------------------------

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(events: list[Any]) -> dict[str, list[Any]]:
    """The lists of a streamed choice's log-probabilities, one after the other."""
    found: dict[str, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            for name, part in (choice["logprobs"] or {}).items():
                found.setdefault(name, []).extend(part or [])
    return found


@in_world()
async def test_logprobs_of_completions(world: World) -> None:
    reply = [*ids_of(TEXT), EOS]
    for number in (0, 2, 5):
        for burst in (1, 5):
            world.engine.burst = burst
            answer = await world.complete("ab", max_tokens=200, logprobs=number)
            found = answer["choices"][0]["logprobs"]
            assert tuple(found) == LISTS
            # Every token that counts, the first and the last included.
            assert {len(found[name]) for name in LISTS} == {answer["usage"]["completion_tokens"]} == {len(reply)}
            assert found["tokens"][:3] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
            assert found["tokens"][-1] == "</s>"
            assert found["token_logprobs"] == [-(3 + at) / 8 for at in range(len(reply))]
            for at, one in enumerate(found["top_logprobs"]):
                assert one[found["tokens"][at]] == found["token_logprobs"][at]
                assert len(one) == max(number, 1)
            data = TEXT.encode()
            assert found["text_offset"] == [len(data[:at].decode(errors="ignore")) for at in range(len(reply))]
            events = (await world.events(prompt="ab", max_tokens=200, logprobs=number))[:-1]
            assert joined(events) == found
            assert text_of(events) == answer["choices"][0]["text"]


@in_world()
async def test_logprobs_of_chats(world: World) -> None:
    reply = [*ids_of(TEXT), EOS]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "logprobs": True}
    for number in (None, 0, 1, 7):
        whole = (await world.post("/v1/chat/completions", top_logprobs=number, **body)).json()
        found = whole["choices"][0]["logprobs"]
        assert found.keys() == {"content", "refusal"}
        assert [bytes(one["bytes"]) for one in found["content"]] == [
            *(bytes([byte]) for byte in TEXT.encode()),
            b"</s>",
        ]
        start = whole["usage"]["prompt_tokens"]
        for at, (one, token) in enumerate(zip(found["content"], reply, strict=True)):
            expected = logprobs_of(start + at, token, number or 0)
            assert one["logprob"] == expected.logprob
            assert [entry["logprob"] for entry in one["top_logprobs"]] == [value for _, value in expected.top]
            if number == 7 and at == 0:
                assert [bytes(entry["bytes"]) for entry in one["top_logprobs"][2:6]] == [
                    bytes([byte]) for byte in "😀".encode()
                ]
        events = (await world.events("/v1/chat/completions", top_logprobs=number, **body))[:-1]
        assert joined(events) == {"content": found["content"], "refusal": []}
    plain = (await world.post("/v1/chat/completions", **{**body, "logprobs": False})).json()
    assert plain["choices"][0]["logprobs"] is None


@in_world()
async def test_logprobs_of_many_tokens_and_up_to_a_stop_string(world: World) -> None:
    """More tokens than the ring holds, in bursts that fill it; and none beyond what counts."""
    world.engine.reply = lambda prompt: ids_of("abcdefg")
    world.engine.burst = 100
    answer = await world.complete("ab", max_tokens=240, logprobs=1, n=2)
    for choice in answer["choices"]:
        assert choice["logprobs"]["tokens"] == list(("abcdefg" * 40)[:240])
        assert choice["logprobs"]["text_offset"] == list(range(240))
    for stream in (False, True):
        if stream:
            events = await world.events(prompt="ab", max_tokens=50, logprobs=1, stop="de")
            found = joined(events[:-1])
        else:
            found = (await world.complete("ab", max_tokens=50, logprobs=1, stop="de"))["choices"][0]["logprobs"]
        assert found["tokens"] == list("abcde")


@in_world()
async def test_stop_strings_wait_for_min_tokens(world: World) -> None:
    world.engine.reply = lambda prompt: ids_of("ab")
    for stream in (False, True):
        body = {"prompt": "x", "stop": "b", "min_tokens": 4, "max_tokens": 20}
        if stream:
            assert text_of(await world.events(**body)) == "ababa"
        else:
            choice = (await world.complete(body.pop("prompt"), **body))["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("ababa", "stop")


@in_world()
async def test_each_field_alone_is_obeyed_or_named(world: World) -> None:
    """Never a failure of ours, and never half: what is accepted shows in the answer or in the row."""
    world.engine.reply = lambda prompt: [*ids_of("abc"), EOS]
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"min_tokens": 20}, "min_tokens"),
        ({"min_tokens": 20, "max_tokens": 20, "ignore_eos": True}, None),
        ({"n": 2}, None),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 2}, None),
        ({"logprobs": 3}, None),
        ({"echo": True}, "echo"),
        ({"seed": 5}, None),
        ({"top_k": 3}, None),
        ({"user": "me"}, None),
        ({"unheard_of": 1}, "unheard_of"),
    ]
    for fields, refused in cases:
        for stream in (False, True):
            response = await world.post(prompt="ab", stream=stream, **fields)
            if refused:
                check_error(response, 400, refused)
                continue
            assert response.status_code == 200
            events = parse_events(response.content)[:-1] if stream else [response.json()]
            assert len({choice["index"] for event in events for choice in event["choices"]}) == fields.get("n", 1)
            assert bool(joined(events)) is ("logprobs" in fields)
            params = world.engine.seen[-1]
            assert params.min_tokens == fields.get("min_tokens", 0)
            assert params.top_k == fields.get("top_k", 0)
            assert params.seed == 5 or "seed" not in fields


# --- refusals --------------------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 1.5, "5", 10**9, 10**30, True, [], float("inf"))],
    *[("max_completion_tokens", value) for value in (0, 10**9)],
    *[("temperature", value) for value in (-1, 3, float("nan"), "hot", True, 10**400)],
    *[("top_p", value) for value in (1.1, -0.5, float("nan"), "1")],
    *[("top_k", value) for value in (-2, 1.5, 10**9, True)],
    *[("seed", value) for value in (1.5, "7", 2**64, -(2**63) - 1, True)],
    *[("n", value) for value in (0, -1, MAX_CHOICES + 1, "1", True, 1.5)],
    *[("best_of", value) for value in (0, 2, "1", True)],
    *[("min_tokens", value) for value in (-1, 20, 1.5, "1", True, 10**30)],
    *[("min_p", value) for value in (-0.1, 1.1, "0", True, float("nan"))],
    *[("repetition_penalty", value) for value in (0, -1, 101, "1", True, float("inf"))],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 3, "1", True)],
    *[("logit_bias", value) for value in ({"5": 101}, {"5": -100.1}, {"5": "1"}, {"5": True}, {"5": None}, [], 5)],
    *[("logit_bias", {key: 1}) for key in ("259", "-1", "05", "a", "1.0", "", " 5", "9" * 30, "٣", "\ud800")],
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {str(token): 0 for token in range(MAX_LOGIT_BIAS + 1)}),
    *[("logprobs", value) for value in (-1, 6, 1.5, "3", True)],
    *[("stop", value) for value in (list("abcde"), "", [""], [None], 5, {"a": 1}, ["\ud800"], "x" * 2000)],
    *[("stop_token_ids", value) for value in ([-1], [259], ["1"], [True], 5, list(range(200)))],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("stream_options", value) for value in ({"include_usage": 1}, {"x": 1}, [])],
    *[("echo", True), ("suffix", "x"), ("user", 5), ("metadata", 5), ("nonsense", 1), ("model", 5)],
    *[("return_token_ids", 1), ("timings", "yes")],
    *[("prompt", value) for value in ("", [], [""], [[]], None, 5, {}, [1, "a"], ["a", 1], [1.5], [[1, "a"]])],
    *[("prompt", value) for value in ([True], [-1], [259], [10**30], [[1], [300]], "\ud800", ["a", ["b"]])],
]


@in_world()
async def test_bad_fields_are_named(world: World) -> None:
    """S50: as the client sent them; a stream is refused before it begins."""
    for stream in (False, True):
        for name, value in BAD_FIELDS:
            content = json.dumps({"prompt": "ab", "stream": stream, name: value})
            response = await world.http.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            error = check_error(response, 400, name)
            assert name in error["message"] or error["code"] == "context_length_exceeded", (name, value, error)
            assert response.headers["content-type"] == "application/json"
    assert world.engine.prompts == []
    check_error(await world.post(), 400, "prompt")
    check_error(await world.post(prompt="a", stream_options={}), 400, "stream_options")
    check_error(await world.post(prompt="a", max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens")


@in_world()
async def test_values_that_change_nothing_are_accepted(world: World) -> None:
    await world.complete(
        max_tokens=1,
        n=1,
        best_of=1,
        echo=False,
        logprobs=None,
        suffix=None,
        min_tokens=0,
        min_p=0.0,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1,
        temperature=None,
        top_p=None,
        stop=None,
        seed=None,
        stream=None,
        stream_options=None,
        user=None,
    )
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": ""},
    ]
    body = {"logprobs": False, "tools": [], "response_format": {"type": "text"}, "top_logprobs": None}
    assert (await world.post("/v1/chat/completions", messages=messages, **body)).status_code == 200


@in_world()
async def test_bad_chats_are_named(world: World) -> None:
    def user(content: Any) -> list[Any]:
        return [{"role": "user", "content": content}]

    bad: list[Any] = [[], None, "hi", [1], [{}], [{"role": "user"}], user(None), user(5), user([]), user([1])]
    bad += [user([{"type": "image_url", "image_url": {"url": "x"}}]), user([{"type": "text"}])]
    bad += [user([{"type": "text", "text": 5}]), user("\ud800"), [{"role": "wizard", "content": "a"}]]
    bad += [[{"role": "user", "content": "a", "odd": 1}], [{"role": "user", "content": "a", "tool_calls": [1]}]]
    for stream in (False, True):
        for messages in bad:
            content = json.dumps({"messages": messages, "stream": stream})
            response = await world.http.post(
                "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
            )
            check_error(response, 400, "messages")
    check_error(await world.post("/v1/chat/completions", prompt="a"), 400)
    fields: list[tuple[str, Any]] = [*[("logprobs", value) for value in (1, 0, "true")]]
    fields += [("top_logprobs", value) for value in (-1, 21, 1.5, True, 3)]
    for stream in (False, True):
        for name, value in fields:
            response = await world.post("/v1/chat/completions", messages=user("a"), stream=stream, **{name: value})
            check_error(response, 400, name)
    assert world.engine.prompts == []


@in_world()
async def test_template_refuses_in_its_own_words(world: World) -> None:
    """S53 b."""
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "a"}]
    for stream in (False, True):
        response = await world.post("/v1/chat/completions", messages=messages, stream=stream)
        assert "no system role" in check_error(response, 400, "messages")["message"]


@in_world(template=False)
async def test_no_template_no_chat_but_completions(world: World) -> None:
    """S53 a."""
    for stream in (False, True):
        response = await world.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=stream
        )
        assert "no chat template" in check_error(response, 400, "messages")["message"]
    await world.complete(max_tokens=1)


@in_world()
async def test_bodies_that_are_none(world: World) -> None:
    for content in (
        b"",
        b"  ",
        b"{:",
        b"[]",
        b'"a"',
        b"null",
        b"5",
        '{"prompt": "你好"}'.encode("gbk"),
        b"[" * 5000 + b"]" * 5000,
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ):
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await world.http.post(
                path, content=content, headers={"content-type": "application/json; charset=utf-8"}
            )
            check_error(response, 400)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind} if kind else {}
        response = await world.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        check_error(response, 415)
    await world.complete(max_tokens=1)


@in_world()
async def test_large_bodies(world: World) -> None:
    async def drip() -> Any:
        for _ in range(MAX_BODY_BYTES // 65536 + 1):
            yield b"x" * 65536

    headers = {"content-type": "application/json"}
    huge = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    check_error(await world.http.post("/v1/completions", content=huge, headers=headers), 413)
    check_error(await world.http.post("/v1/completions", content=drip(), headers=headers), 413)
    too_long = await world.post(prompt="x" * 1000)
    assert "1001" in check_error(too_long, 400, "prompt")["message"]
    # No token has more than the five characters of <unk>: this is refused without being tokenized.
    for path, param, body in (
        ("/v1/completions", "prompt", {"prompt": ["ab", "x" * 100_000]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x", "name": "x" * 100_000}]}),
    ):
        error = check_error(await world.post(path, **body), 400, param)
        assert error["code"] == "context_length_exceeded"
        assert "1280" in error["message"] and "10000" in error["message"]


@in_world()
async def test_bodies_on_their_way_in_have_a_limit_together(world: World) -> None:
    """And so have the prompts that came out of them, for as long as they wait or are worked on."""
    more, held = asyncio.Event(), world.app.state.held
    held.limit = 2000

    async def slow() -> Any:
        yield b'{"prompt": "' + b"x" * 200
        await more.wait()
        yield b'"}'

    headers = {"content-type": "application/json"}
    under_way = asyncio.create_task(world.http.post("/v1/completions", content=slow(), headers=headers))
    while not held.taken:
        await asyncio.sleep(0)
    refused = await world.post(prompt=["y" * 200] * 10)
    assert check_error(refused, 503)["code"] == "too_many_bodies"
    assert refused.headers["retry-after"] == "1"
    world.engine.paused = True
    more.set()
    while not world.client.num_live:
        await asyncio.sleep(0)
    assert held.taken == 4 * 201
    assert check_error(await world.post(prompt=["y" * 99] * 3), 503)["code"] == "too_many_bodies"
    world.engine.paused = False
    assert (await under_way).status_code == 200
    assert held.taken == 0
    for stream in (False, True):
        assert (await world.post(prompt=["y" * 99] * 3, stream=stream)).status_code == 200
        assert held.taken == 0


@in_world()
async def test_large_bodies_are_answered_as_small_ones_are(world: World) -> None:
    """Read in another process: the same answers and the same refusals, word for word."""
    chat = [{"role": "user", "content": "hi"}]
    bodies: list[tuple[str, bytes]] = [
        ("/v1/completions", json.dumps(body).encode())
        for body in (
            {"prompt": "héllo 😀", "max_tokens": 3, "seed": 5},
            {"prompt": ["ab", "abc"], "n": 2, "stop": ["two", "d 😀"], "max_tokens": 30, "return_token_ids": True},
            {"prompt": [[5, 6, 7], [8]], "logprobs": 3, "max_tokens": 2, "logit_bias": {"5": 1.5, "3": -100}},
            {"prompt": [5, 6], "temperature": 0.3, "user": "me", "metadata": {"a": ["b"]}, "model": MODEL},
            {"prompt": "ab", "stream_options": {"include_usage": True}},
            {"prompt": "ab", "model": "m" * 5000},
            {"prompt": "ab", "temperature": 5},
            {"prompt": "ab", "nothing": 1, "temperature": 5},
            {"prompt": "x" * 300},
            {"prompt": [5, 300]},
            {"prompt": [5, -1]},
            {"prompt": [5, 1 << 70]},
            {"prompt": "ab", "stop_token_ids": [999]},
            {"prompt": "ab", "best_of": 3},
            {"prompt": [["a"]]},
            {"prompt": ""},
            {str(number): number for number in range(100)},
            {},
        )
    ]
    bodies += [("/v1/completions", body) for body in (b"[1]", b"{", b"\xff", b"[" * 5000, b'{"prompt": "\\ud800"}')]
    bodies += [
        ("/v1/chat/completions", json.dumps(body).encode())
        for body in (
            {"messages": chat, "max_tokens": 2, "logprobs": True, "top_logprobs": 2},
            {"messages": [{"role": "system", "content": "no"}, *chat]},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "robot", "content": "hi"}] * 3},
            {"messages": [*chat, *[{}] * 5]},
            {"messages": chat, "top_logprobs": 2},
            {"messages": []},
        )
    ]
    headers = {"content-type": "application/json"}
    changing = re.compile(rb'"(id|created)":("[^"]*"|[0-9]+)|byte [0-9]+|\(char [0-9]+\)|column [0-9]+')
    for path, body in bodies:
        answers = []
        for padding in (b"", b" " * INLINE_BODY_BYTES):
            response = await world.http.post(path, content=padding + body, headers=headers)
            answers.append((response.status_code, changing.sub(b"", response.content)))
        assert answers[0] == answers[1], body[:100]
    assert {200, 400, 404} >= {status for status, _ in answers}


@in_world()
async def test_a_count_that_is_hostile_is_refused_before_it_is_looked_at(world: World) -> None:
    head, tail = b'{"messages": [', b'{"role": "user", "content": ""}]}'
    body = head + b'{"role": "user", "content": ""},' * MAX_MESSAGES + tail
    headers = {"content-type": "application/json"}
    error = check_error(await world.http.post("/v1/chat/completions", content=body, headers=headers), 400, "messages")
    assert "at most 4096" in error["message"]
    # What is shown of a client's own words has an end.
    for words in ({"model": "m" * 100_000}, {"n" * 100_000: 1}):
        refused = await world.post(prompt="ab", **words)
        assert refused.status_code in (400, 404) and len(refused.content) < 1000


class StuckTokenizer(Tokenizer):
    def encode(self, text: str) -> list[int]:
        while text.startswith("stuck"):
            time.sleep(1)
        return super().encode(text)


@in_world(tokenizer=StuckTokenizer(inner_tokenizer()))
async def test_work_for_a_client_that_left_is_stopped(world: World) -> None:
    leave = asyncio.Event()
    body = {"prompt": ["stuck", *["ab"] * 100], "max_tokens": 1}
    call = asyncio.create_task(call_and_leave(world, leave=leave, body=json.dumps(body).encode()))
    readers = world.app.state.readers
    while not (pids := [reader.pid for reader in readers if reader.pid]):
        await asyncio.sleep(0)
    next_one = asyncio.create_task(world.complete(["ab"] * 100, max_tokens=1))
    await asyncio.sleep(0.01)
    leave.set()
    await call
    assert len((await next_one)["choices"]) == 100
    assert world.app.state.held.taken == 0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.005)


@in_world(max_rows=2)
async def test_a_batch_streams_with_its_first_answer(world: World) -> None:
    """More prompts than rows: the first ones' text comes while the others wait for their rows."""
    world.engine.reply = lambda prompt: ids_of("x")
    leave, sent = asyncio.Event(), list[Any]()
    body = json.dumps({"prompt": ["ab"] * 7, "max_tokens": 200, "stream": True}).encode()
    call = asyncio.create_task(call_and_leave(world, leave=leave, body=body, sent=sent))
    while not (len(sent) > 9 and world.client.num_waiting) and not call.done():
        await asyncio.sleep(0)
    assert world.client.num_live == 2 and not call.done()
    leave.set()
    await call
    assert world.client.num_waiting == 0


@in_world(api_key=ApiKey("key"), hosts=Hosts("127.0.0.1"))
async def test_keys_and_names_come_first(world: World) -> None:
    """The gate itself: test_gate.py."""
    world.http.headers["host"] = "localhost:8000"
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
        assert check_error(await world.http.get(path), 401)["code"] == "invalid_api_key"
    refused = await world.post(prompt=5, stream=True)
    check_error(refused, 401)
    assert (await world.http.get("/health")).status_code == 200
    assert not world.engine.prompts
    world.http.headers["authorization"] = "Bearer key"
    await world.complete("ab", max_tokens=1)
    world.http.headers["host"] = "evil.example"
    assert check_error(await world.post(prompt="ab"), 421)["code"] == "host_not_allowed"


@in_world()
async def test_no_page_of_another_origin_may_read_answers(world: World) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    check_error(await world.http.options("/v1/completions", headers=headers), 405)
    answer = await world.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@in_world()
async def test_routes_and_methods(world: World) -> None:
    check_error(await world.http.get("/v1/nothing"), 404)
    check_error(await world.http.post("/v1/completions/", json={}), 404)
    refused = await world.http.get("/v1/completions")
    check_error(refused, 405)
    assert refused.headers["allow"] == "POST"
    check_error(await world.http.post("/health"), 405)
    check_error(await world.http.delete("/v1/models"), 405)


@in_world()
async def test_models(world: World) -> None:
    listed = (await world.http.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert (await world.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert check_error(await world.http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    assert check_error(await world.post(prompt="a", model="nope"), 404, "model")["code"] == "model_not_found"
    assert (await world.complete(model=listed["data"][0]["id"]))["model"] == MODEL


@in_world()
async def test_context_is_checked_with_numbers(world: World) -> None:
    cases = (("x" * 254, 50, "max_tokens"), ("x" * 255, 1, "prompt"), ("x" * 300, None, "prompt"))
    for prompt, limit, param in cases:
        for stream in (False, True):
            error = check_error(await world.post(prompt=prompt, max_tokens=limit, stream=stream), 400, param)
            assert error["code"] == "context_length_exceeded"
            assert "256" in error["message"] and str(len(prompt) + 1) in error["message"]
    assert (await world.complete("x" * 254, max_tokens=1))["usage"]["total_tokens"] == 256


@in_world(num_blocks=10)
async def test_pool_is_checked_with_numbers(world: World) -> None:
    error = check_error(await world.post(prompt="a", max_tokens=100), 400, "max_tokens")
    assert (error["code"], "the pool has 10" in error["message"]) == ("capacity_exceeded", True)
    chat = await world.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert chat.status_code == 200


# --- life ------------------------------------------------------------------------------------------------------


@in_world(ready=False)
async def test_loading_then_ready_then_live(world: World) -> None:
    async def health() -> tuple[int, int]:
        live, ready = [await world.http.get(path) for path in ("/health", "/health/ready")]
        return live.status_code, ready.status_code

    for stream in (False, True):
        response = await world.post(prompt="a", stream=stream)
        assert check_error(response, 503)["code"] == "loading"
        assert response.headers["retry-after"] == "1"
    assert (await world.http.get("/health")).json()["status"] == "loading"
    assert (await world.http.get("/health/ready")).json()["missing"] == ["prefill", "decode"]
    world.engine.become_ready(world.engine.prefill)
    assert await health() == (503, 503)
    assert (await world.http.get("/health/ready")).json()["missing"] == ["decode"]
    world.engine.become_ready(world.engine.decode)
    assert await health() == (200, 200)
    world.engine.decode.put(P.STATE, ParticipantState.STOPPING)
    assert await health() == (200, 503)
    world.segment.detach(world.supervisor)
    assert (await world.http.get("/health")).status_code == 503


@in_world()
async def test_request_ids(world: World) -> None:
    given = await world.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-id.1"})
    assert (given.headers["x-request-id"], given.json()["id"]) == ("my-id.1", "my-id.1")
    for odd in ("a b", "x" * 200, "ü".encode()):
        response = await world.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": odd})
        assert response.headers["x-request-id"] == response.json()["id"]
        assert response.json()["id"].startswith("cmpl-")
    refused = await world.http.post("/v1/completions", json={}, headers={"x-request-id": "my-id.2"})
    assert refused.headers["x-request-id"] == "my-id.2"


@in_world()
async def test_failures_carry_their_cause(world: World) -> None:
    world.engine.failure = "decode 0 died three times"
    response = await world.post(prompt="ab", max_tokens=50)
    assert "died three times" in check_error(response, 500)["message"]
    events = await world.events(prompt="ab", max_tokens=50)
    assert "died three times" in events[-1]["error"]["message"]
    assert all("finish_reason" not in choice for event in events[:-1] for choice in event["choices"])
    world.engine.failure = ""
    await world.complete(max_tokens=1)


@in_world(max_rows=2, max_queue=6)
async def test_queue_limit_and_retry_after(world: World) -> None:
    world.engine.paused = True
    tasks = [asyncio.create_task(world.post(prompt="ab", max_tokens=2)) for _ in range(2 + 4)]
    while world.client.num_waiting < 4:
        await asyncio.sleep(0.001)
    refused = await world.post(prompt="ab", stream=True)
    error = check_error(refused, 429)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert refused.headers["retry-after"] == "1"
    assert (await world.metrics())["pdctl_requests_waiting"] == 6
    world.engine.paused = False
    assert [(await task).status_code for task in tasks] == [200] * 6
    counted = await world.metrics()
    assert counted["pdctl_requests_waiting"] == 0
    assert counted['pdctl_requests_total{outcome="rejected"}'] == 1


@in_world(max_rows=2, max_queue=1)
async def test_prompts_of_one_request_wait_for_their_turn(world: World) -> None:
    """A list longer than the queue is one request: it is admitted as a whole, or not."""
    answer = await world.complete([f"p{number}" for number in range(9)], max_tokens=2)
    assert len(answer["choices"]) == 9
    world.engine.paused = True
    task = asyncio.create_task(world.post(prompt="ab", max_tokens=1))
    while not world.client.num_live:
        await asyncio.sleep(0.001)
    world.engine.decode.put(P.LOAD, 8)
    check_error(await world.post(prompt=["ab", "cd"]), 429)
    world.engine.decode.put(P.LOAD, 0)
    assert world.client.num_live == 1
    world.engine.paused = False
    assert (await task).status_code == 200


@in_world()
async def test_a_role_without_daemons_refuses(world: World) -> None:
    await world.complete(max_tokens=1)
    world.client.readiness.absence_limit_s = 600
    world.engine.decode.put(P.STATE, ParticipantState.STARTING)
    await world.complete(max_tokens=1)  # gone for a moment: worth waiting
    world.client.readiness.absence_limit_s = 0.001
    await asyncio.sleep(0.002)
    for stream in (False, True):
        refused = await world.post(prompt="ab", stream=stream)
        error = check_error(refused, 503)
        assert error["code"] == "no_daemon" and "no decode daemon" in error["message"]
        assert refused.headers["retry-after"] == "1"
    world.engine.decode.put(P.STATE, ParticipantState.READY)
    await world.complete(max_tokens=1)


@in_world(num_blocks=10, max_rows=2)
async def test_what_can_never_fit_is_refused_and_what_fits_is_served(world: World) -> None:
    """S45: the pool holds 80 tokens, the context 256; the first is refused with both numbers, nobody waits for it."""
    for stream in (False, True):
        error = check_error(await world.post(prompt="x" * 100, max_tokens=1, stream=stream), 400, "prompt")
        assert error["code"] == "capacity_exceeded"
        assert "13 blocks" in error["message"] and "the pool has 10" in error["message"]
        assert (world.client.num_live, world.client.num_queued) == (0, 0)
        assert (await world.complete("ab", max_tokens=2))["usage"]["completion_tokens"] == 2


# --- metrics ---------------------------------------------------------------------------------------------------


@in_world(num_blocks=40)
async def test_metrics_add_up_with_usage(world: World) -> None:
    """Prompt, cached and generated tokens of all requests; outcomes; histograms of those that were answered."""

    def reply(prompt: list[int]) -> list[int]:
        for row in world.segment.rows.in_state(RowState.DECODING):
            world.segment.rows.publish(row)
        return ids_of(TEXT)

    world.engine.reply = reply
    prompts = ["x" * 30, "x" * 30, "x" * 20, "y" * 25, "ab", "x" * 30 + "z" * 9]
    usages = [(await world.complete(prompt, max_tokens=7))["usage"] for prompt in prompts]
    usages.append((await world.complete(["x" * 30, "y" * 25], max_tokens=3))["usage"])
    await world.settle()
    counted = await world.metrics()
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert counted["pdctl_prefix_cache_hit_tokens_total"] == cached
    assert counted["pdctl_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert counted["pdctl_generation_tokens_total"] == generated
    assert counted['pdctl_requests_total{outcome="finished"}'] == 8
    assert counted["pdctl_request_prompt_tokens_sum"] == counted["pdctl_prompt_tokens_total"]
    assert counted["pdctl_request_generation_tokens_sum"] == generated
    assert counted['pdctl_request_generation_tokens_bucket{le="5.0"}'] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "time_per_output_token"):
        assert counted[f"pdctl_{name}_seconds_count"] == 8, name
    # Of prompts that a prefill daemon saw.
    assert 0 < counted["pdctl_handover_seconds_count"] < 8
    assert sum(counted[f'pdctl_pool_blocks{{state="{state}"}}'] for state in POOL_STATES) == 40
    assert counted['pdctl_pool_blocks{state="evictable"}'] == world.segment.words[H.LRU_COUNT] > 0
    assert counted['pdctl_rows{state="free"}'] == 8
    assert counted['pdctl_daemon_ready{index="0",role="decode"}'] == 1
    world.engine.decode.put(P.STATE, ParticipantState.STOPPING)
    world.engine.decode.put(P.BUSY_NS, 1_500_000_000)
    counted = await world.metrics()
    assert counted['pdctl_daemon_ready{index="0",role="decode"}'] == 0
    assert counted['pdctl_daemon_busy_seconds_total{index="0",role="decode"}'] == 1.5
    assert not any("_created" in name for name in counted)


@in_world()
async def test_every_metric_is_in_the_readme(world: World) -> None:
    await world.complete(max_tokens=2)
    text = (await world.http.get("/metrics")).text
    served = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    written = set()
    for name in re.findall(r"`(pdctl_[a-z_0-9{},]+)`", readme):
        before, _, rest = name.partition("{")
        middles, _, after = rest.partition("}")
        written |= {before + middle + after for middle in middles.split(",")}
    assert written == served


POOL_STATES = ("free", "owned", "cached", "evictable")


@in_world()
async def test_metrics_of_rows_under_way_and_of_what_did_not_finish(world: World) -> None:
    world.engine.reply = lambda prompt: ids_of("x")
    leave = asyncio.Event()
    call = asyncio.create_task(call_and_leave(world, stream=True, leave=leave))
    rows = world.segment.rows
    while sum(map(rows.count_tokens, rows.in_state(RowState.DECODING))) < 20:
        await asyncio.sleep(0)
    before = await world.metrics()
    assert before["pdctl_generation_tokens_total"] > 10
    assert before['pdctl_rows{state="decoding"}'] == 1
    leave.set()
    await call
    await world.settle()
    world.engine.failure = "out of luck"
    await world.post(prompt="ab")
    world.engine.failure = ""
    await world.complete(stop="x")
    await world.settle()
    after = await world.metrics()
    outcomes = {"finished": 1, "cancelled": 1, "failed": 1, "rejected": 0}
    assert {name: after[f'pdctl_requests_total{{outcome="{name}"}}'] for name in outcomes} == outcomes
    assert after["pdctl_generation_tokens_total"] >= before["pdctl_generation_tokens_total"]
    assert after["pdctl_e2e_request_latency_seconds_count"] == 1
    assert after["pdctl_request_generation_tokens_sum"] == 1
    # That of the answer whose client left was told when it came.
    assert before["pdctl_time_to_first_token_seconds_count"] == 1
    assert after["pdctl_time_to_first_token_seconds_count"] == 2


@in_world()
async def test_what_the_server_gives_up_is_no_cancellation(world: World) -> None:
    """Nobody there to begin it, at the door or later: the client gets an error, and did not leave."""
    world.engine.decode.put(P.STATE, ParticipantState.STARTING)
    world.engine.paused = True
    world.client.readiness.absence_limit_s = 0.05
    for code in ("no_daemon", "no_daemon"):
        assert check_error(await world.post(prompt="ab"), 503)["code"] == code
    counted = await world.metrics()
    outcomes = {"finished": 0, "cancelled": 0, "failed": 1, "rejected": 1}
    assert {name: counted[f'pdctl_requests_total{{outcome="{name}"}}'] for name in outcomes} == outcomes
    world.engine.decode.put(P.STATE, ParticipantState.READY)


@in_world(request_timeout_s=0.1)
async def test_deadlines(world: World) -> None:
    world.engine.paused = True
    assert check_error(await world.post(prompt="ab"), 504)["code"] == "timeout"
    events = await world.events(prompt="ab")
    assert [event["error"]["code"] for event in events] == ["timeout"]
    await world.settle()
    counted = await world.metrics()
    assert counted['pdctl_requests_total{outcome="failed"}'] == 2
    assert counted['pdctl_requests_total{outcome="cancelled"}'] == 0


@in_world()
async def test_shutdown_ends_open_streams_with_an_event(world: World) -> None:
    world.engine.paused = True
    stream = asyncio.create_task(world.events(prompt="ab"))
    whole = asyncio.create_task(world.post(prompt="ab"))
    while world.client.num_live < 2:
        await asyncio.sleep(0.001)
    world.client.begin_shutdown("going down")
    assert [event["error"]["code"] for event in await stream] == ["shutting_down"]
    assert check_error(await whole, 503)["code"] == "shutting_down"
    assert check_error(await world.post(prompt="ab"), 503)["code"] == "shutting_down"
    assert (await world.http.get("/health")).status_code == 503


async def call_and_leave(
    world: World,
    *,
    stream: bool = False,
    leave: asyncio.Event,
    body: bytes | None = None,
    sent: list[Any] | None = None,
) -> list[Any]:
    """A client below httpx, which cannot hang up: sends a request, and disconnects when told."""
    if body is None:
        body = json.dumps({"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent = [] if sent is None else sent

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("router", 80),
        "client": ("test", 1),
    }
    await world.app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "waiting", "decoding"])
def test_leaving_cancels_at_once(tmp_path: Path, stream: bool, when: str) -> None:
    """A client that leaves frees its row, whether it waits for one, in it, or gets tokens out of it."""

    @in_world(max_rows=1)
    async def scenario(world: World) -> None:
        world.engine.paused = when != "decoding"
        if when == "queued":
            blocker = asyncio.create_task(world.post(prompt="ab", max_tokens=1))
            while not world.client.num_live:
                await asyncio.sleep(0.001)
        world.engine.reply = lambda prompt: ids_of("x")
        leave = asyncio.Event()
        call = asyncio.create_task(call_and_leave(world, stream=stream, leave=leave))
        if when == "queued":
            while not world.client.num_waiting:
                await asyncio.sleep(0.001)
        elif when == "waiting":
            while not world.segment.rows.in_state(RowState.READY):
                await asyncio.sleep(0.001)
        else:
            while not world.engine.prompts:
                await asyncio.sleep(0)
        leave.set()
        sent = await call
        assert all(message.get("more_body", True) for message in sent[1:]) or not stream
        if when == "queued":
            assert world.client.num_waiting == 0
            world.engine.paused = False
            assert (await blocker).status_code == 200
        else:
            await world.settle()
            assert len(world.engine.prompts) == (1 if when == "decoding" else 0)
        world.engine.paused = False
        await world.complete(max_tokens=1)

    scenario(tmp_path)


@in_world()
async def test_prompts_are_not_logged(world: World) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pdctl")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        answer = await world.complete("secret words")
        await world.events(prompt="secret words", stop="secret")
        await world.post(prompt="secret words", max_tokens=10**9)
        await world.post("/v1/chat/completions", messages=[{"role": "secret", "content": "secret words"}])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert len(lines) == 4
    assert lines[0].startswith(f"{answer['id']} completion 200 prompt=13 completion=16 finish=length")
    assert not any("secret" in line for line in lines)
