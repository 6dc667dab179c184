"""What is asked: the requests of a load, and when each is due. The same seed makes the same workload.

A conversation is what one client does in a row: mostly one request, several turns in a multi-turn workload. A stage
is conversations that begin together; the next stage begins when every conversation of this one has had its first
token: so long prompts arrive while streams run ("mixed"). Pure; sent by load.py.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.transport.errors import UsageError

ARRIVALS = ("poisson", "constant", "burst")
STREAM, PROMPT = "stream", "prompt"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question.

    Attributes:
        index: among all of the workload.
        group: see `Sample.group`.
        token_ids, text, messages: the prompt, in one of three forms. Of a later turn: what is new in it.
        max_tokens: output tokens asked for; what is got, where end tokens are ignored.
    """

    index: int
    max_tokens: int
    group: str = ""
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Requests that follow each other; each continues what was said before it.

    Attributes:
        due_s: seconds after its stage began.
    """

    requests: tuple[Request, ...]
    due_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Conversations, in the order of their arrival.

    Attributes:
        max_concurrency: conversations under way at once; None: as many as arrive.
    """

    conversations: tuple[Conversation, ...]
    max_concurrency: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All of a load.

    Attributes:
        kind: random, shared-prefix, multi-turn, mixed, jsonl or sharegpt.
        configuration: what made it, for the results: enough to make it again.
    """

    kind: str
    stages: tuple[Stage, ...]
    configuration: dict[str, Any]

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(one for stage in self.stages for talk in stage.conversations for one in talk.requests)

    @property
    def ignores_eos(self) -> bool:
        """Whether answers are as long as asked: of random prompts, where an end says nothing."""
        return self.kind not in _DATASETS

    @property
    def num_at_once(self) -> int:
        """Requests that will be under way together, whatever the server does: arrivals at a rate depend on it."""
        return sum(
            min(
                max(Counter(talk.due_s for talk in stage.conversations).values(), default=0),
                stage.max_concurrency or len(stage.conversations),
            )
            for stage in self.stages
        )

    @property
    def needs_token_ids(self) -> bool:
        """Whether an answer's ids become part of the next prompt."""
        return any(len(talk.requests) > 1 for stage in self.stages for talk in stage.conversations)


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When conversations come.

    Attributes:
        kind: one of ARRIVALS: exponential gaps, equal gaps, or `burst_size` at once.
        rate_per_s: conversations a second; infinite: all at once (a closed loop under a maximum of concurrency).
        burst_size: of "burst".
    """

    kind: str = "poisson"
    rate_per_s: float = math.inf
    burst_size: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ARRIVALS:
            raise UsageError(f"--arrivals {self.kind}: expected one of {', '.join(ARRIVALS)}")
        if not self.rate_per_s > 0:
            raise UsageError(f"--request-rate {self.rate_per_s:g}: expected more than 0")
        if self.burst_size < 1:
            raise UsageError(f"--burst-size {self.burst_size}: expected 1 or more")

    def offsets_s(self, number: int, source: random.Random) -> list[float]:
        """Seconds from the stage's begin, ascending. Random gaps are scaled so that the last is due at
        number / rate, as `vllm bench serve` does: the rate is then what was asked for, not near it."""
        if math.isinf(self.rate_per_s):
            return [0.0] * number
        if self.kind == "constant":
            return [index / self.rate_per_s for index in range(number)]
        if self.kind == "burst":
            return [index // self.burst_size * self.burst_size / self.rate_per_s for index in range(number)]
        offsets, at = [], 0.0
        for _ in range(number):
            at += source.expovariate(self.rate_per_s)
            offsets.append(at)
        scale = number / self.rate_per_s / at if number else 1.0
        return [offset * scale for offset in offsets]


def make(
    kind: str,
    *,
    seed: int,
    vocab_size: int | None,
    num_prompts: int,
    input_len: int,
    output_len: int,
    arrivals: Arrivals,
    max_concurrency: int | None,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    turns: int = 1,
    num_streams: int = 4,
    stream_input_len: int = 64,
    dataset: Path | None = None,
) -> Workload:
    """A workload by its name.

    Args:
        kind: random: prompts of `input_len` random ids. shared-prefix: `prefix_len` more in front, one of
            `num_prefixes`. multi-turn: `turns` requests, each adds `input_len` ids to all before. mixed: streams of
            `stream_input_len` ids and `output_len` output tokens, and, once all of them stream, `num_prompts` prompts
            of `input_len` ids that want one token. jsonl, sharegpt: from `dataset`.
        output_len: tokens of each answer.
        vocab_size: how many ids random ones are drawn from; None: not known, for workloads that need none.

    Raises:
        UsageError: such a workload cannot be.
    """
    # Of its kind, too: two workloads of one seed have no prompt, or beginning of one, in common.
    source = random.Random(f"{kind} {seed}")

    def ids(number: int) -> tuple[int, ...]:
        if vocab_size is None:
            raise UsageError(
                f"--workload {kind}: asks random token ids, and the server does not tell its vocabulary",
                hint="--vocab-size N, as in the model's config.json",
            )
        return tuple(source.randrange(vocab_size) for _ in range(number))

    configuration: dict[str, Any] = {
        "workload": kind,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "arrivals": arrivals.kind,
        "request_rate_per_s": None if math.isinf(arrivals.rate_per_s) else arrivals.rate_per_s,
        "burst_size": arrivals.burst_size if arrivals.kind == "burst" else None,
        "max_concurrency": max_concurrency,
        "seed": seed,
        "vocab_size": vocab_size,
    }
    talks: list[tuple[Request, ...]]
    if kind == "mixed":
        streams = tuple(
            Conversation(
                requests=(Request(index=index, group=STREAM, token_ids=ids(stream_input_len), max_tokens=output_len),)
            )
            for index in range(num_streams)
        )
        talks = [
            (Request(index=num_streams + index, group=PROMPT, token_ids=ids(input_len), max_tokens=1),)
            for index in range(num_prompts)
        ]
        configuration |= {"num_streams": num_streams, "stream_input_len": stream_input_len}
        later = Stage(conversations=_due(talks, arrivals, source), max_concurrency=max_concurrency)
        return Workload(kind=kind, stages=(Stage(conversations=streams), later), configuration=configuration)
    if kind == "random":
        talks = [
            (Request(index=index, token_ids=ids(input_len), max_tokens=output_len),) for index in range(num_prompts)
        ]
    elif kind == "shared-prefix":
        prefixes = [ids(prefix_len) for _ in range(num_prefixes)]
        talks = [
            (Request(index=index, token_ids=prefixes[index % num_prefixes] + ids(input_len), max_tokens=output_len),)
            for index in range(num_prompts)
        ]
        configuration |= {"prefix_len": prefix_len, "num_prefixes": num_prefixes}
    elif kind == "multi-turn":
        talks = [
            tuple(
                Request(index=index * turns + turn, token_ids=ids(input_len), max_tokens=output_len)
                for turn in range(turns)
            )
            for index in range(num_prompts)
        ]
        configuration |= {"turns": turns}
    elif kind in _DATASETS:
        if dataset is None:
            raise UsageError(f"--workload {kind}: needs --dataset FILE")
        found = _DATASETS[kind](dataset, output_len)
        chosen = source.sample(found, num_prompts) if num_prompts < len(found) else found
        talks = [(Request(**{**vars(one), "index": index}),) for index, one in enumerate(chosen)]
        configuration |= {"dataset": str(dataset), "num_prompts": len(talks)}
    else:
        raise UsageError(f"--workload {kind}: expected one of {', '.join(KINDS)}")
    stage = Stage(conversations=_due(talks, arrivals, source), max_concurrency=max_concurrency)
    return Workload(kind=kind, stages=(stage,), configuration=configuration)


def _due(talks: list[tuple[Request, ...]], arrivals: Arrivals, source: random.Random) -> tuple[Conversation, ...]:
    offsets = arrivals.offsets_s(len(talks), source)
    return tuple(Conversation(requests=talk, due_s=due) for talk, due in zip(talks, offsets, strict=True))


def _from_jsonl(path: Path, output_len: int) -> list[Request]:
    """One object a line: "prompt" (a string or token ids) or "messages", and "max_tokens" if it is to differ."""
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt, messages, limit = value.get("prompt"), value.get("messages"), value.get("max_tokens", output_len)
            if type(limit) is not int or limit < 1:
                raise ValueError(f"max_tokens {limit!r}: expected a number from 1")
            if isinstance(prompt, str) and prompt:
                found.append(Request(index=0, text=prompt, max_tokens=limit))
            elif isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
                found.append(Request(index=0, token_ids=tuple(prompt), max_tokens=limit))
            elif isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
                found.append(Request(index=0, messages=tuple(messages), max_tokens=limit))
            else:
                raise ValueError('expected "prompt" (a string or token ids) or "messages"')
        except (ValueError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
    if not found:
        raise UsageError(f"{path}: no requests in it")
    return found


def _from_sharegpt(path: Path, output_len: int) -> list[Request]:
    """A list of {"conversations": [{"from": "human", "value": ...}, ...]}: the first question of each."""
    try:
        entries = json.loads(_read(path))
        asked = [
            next((turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user")), None)
            for entry in entries
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: not in the ShareGPT format ({type(error).__name__}: {error})") from error
    found = [Request(index=0, text=text, max_tokens=output_len) for text in asked if isinstance(text, str) and text]
    if not found:
        raise UsageError(f"{path}: no question in it")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset {path}: {error}") from error


_DATASETS: dict[str, Callable[[Path, int], list[Request]]] = {"jsonl": _from_jsonl, "sharegpt": _from_sharegpt}
KINDS = ("random", "shared-prefix", "multi-turn", "mixed", *_DATASETS)
