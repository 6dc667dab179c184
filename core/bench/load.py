"""Send a workload to a server and watch: warm-up, stages, arrivals, concurrency.

A request that fails is a sample like any other; the load always ends, at the latest when its last request has used up
its own time. One thread, one event loop. Called by the commands and by sweep.py and compare.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from pdctl.core.bench import descriptors
from pdctl.core.bench.client import Clock, Server, ask, session
from pdctl.core.bench.samples import Sample
from pdctl.core.bench.workloads import Conversation, Request, Stage, Workload
from pdctl.transport.errors import IncompatibleError, PdctlError

DEFAULT_TIMEOUT_S = 600.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Load:
    """What was measured.

    Attributes:
        samples: of all requests sent, in the workload's order.
        duration_s: from the begin of the first stage to the end of the last request.
        client_cpu_share: of one core, what this client used: near 1, it measured itself.
    """

    samples: tuple[Sample, ...]
    duration_s: float
    client_cpu_share: float


def run(
    server: Server,
    workload: Workload,
    *,
    num_warmups: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Load:
    """Send all of it.

    Args:
        num_warmups: requests like the first of each group, one after another, before the clock starts; with other
            prompts: a warm-up must not put what is to be measured into a prefix cache.
        timeout_s: of each request, from its begin to its last byte.
        on_sample: called at the end of each request, in the order they end.

    Raises:
        CapacityError: more requests at once than this process may have connections.
        IncompatibleError: the workload goes on from its answers' token ids, which this server does not tell.
        PdctlError: a warm-up failed: there is nothing to measure.
    """
    descriptors.allow(workload.num_at_once)
    if workload.needs_token_ids and not server.tells_token_ids:
        raise IncompatibleError(
            f"{server.url}: tells no token ids (return_token_ids), which the next turn of a conversation is made of",
            hint="pdctl bench serve --workload shared-prefix",
        )
    return asyncio.run(
        _Runner(server, timeout_s, workload.ignores_eos, on_sample).run(workload, _warmups(workload, num_warmups))
    )


def _warmups(workload: Workload, number: int) -> list[Request]:
    firsts = {request.group: request for request in reversed(workload.requests)}
    return [_another(request, workload.configuration["vocab_size"]) for request in firsts.values()] * number


def _another(request: Request, vocab_size: int | None) -> Request:
    """A prompt as long, with a beginning that no other has, and a short answer."""
    source = random.SystemRandom()
    request = dataclasses.replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))
    if request.token_ids is not None:
        # Where nobody knows the vocabulary, its own ids in another order.
        ids = tuple(
            source.choices(request.token_ids if vocab_size is None else range(vocab_size), k=len(request.token_ids))
        )
        return dataclasses.replace(request, token_ids=ids)
    number = source.getrandbits(32)
    if request.text is not None:
        return dataclasses.replace(request, text=f"{number} {request.text}")
    return dataclasses.replace(request, messages=({"role": "user", "content": str(number)},))


class _Runner:
    def __init__(
        self, server: Server, timeout_s: float, ignore_eos: bool, on_sample: Callable[[Sample], None]
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._ignore_eos = ignore_eos
        self._on_sample = on_sample
        self._samples: list[Sample] = []
        self._http: aiohttp.ClientSession
        self._clock: Clock

    async def run(self, workload: Workload, warmups: list[Request]) -> Load:
        async with session(self._timeout_s) as self._http:
            self._clock = Clock(began_ns=time.monotonic_ns())
            for request in warmups:
                warm = await self._ask(request, 0.0)
                if warm.error is not None:
                    raise PdctlError(f"{self._server.url}: the warm-up failed: {warm.error}")
            cpu_s = time.process_time()
            self._clock = Clock(began_ns=time.monotonic_ns())
            async with asyncio.TaskGroup() as tasks:
                for stage in workload.stages:
                    await self._begin(stage, tasks)
            duration_s = self._clock.ms() / 1e3
        return Load(
            samples=tuple(sorted(self._samples, key=lambda sample: sample.index)),
            duration_s=duration_s,
            client_cpu_share=(time.process_time() - cpu_s) / duration_s,
        )

    async def _begin(self, stage: Stage, tasks: asyncio.TaskGroup) -> None:
        """Start a stage; returns once every conversation of it has its first token, or is over."""
        places = None if stage.max_concurrency is None else asyncio.Semaphore(stage.max_concurrency)
        began_ms = self._clock.ms()
        firsts = []
        for conversation in stage.conversations:
            firsts.append(first := asyncio.Event())
            due_ms = began_ms + conversation.due_s * 1e3
            tasks.create_task(self._talk(conversation, due_ms, places, first))
        for first in firsts:
            await first.wait()

    async def _talk(
        self, conversation: Conversation, due_ms: float, places: asyncio.Semaphore | None, first: asyncio.Event
    ) -> None:
        await asyncio.sleep((due_ms - self._clock.ms()) / 1e3)
        if places is not None:
            await places.acquire()
        try:
            history: tuple[int, ...] = ()
            for request in conversation.requests:
                sample = await self._ask(request, due_ms, history, first)
                if len(conversation.requests) > 1 and sample.ok and sample.token_ids is None:
                    kind, why = "no_token_ids", "the answer came without the ids that the next turn continues"
                    sample = dataclasses.replace(sample, error_kind=kind, error=why)
                self._samples.append(sample)
                self._on_sample(sample)
                if sample.error is not None:
                    return  # what it would have continued is not there
                if len(conversation.requests) > 1:
                    history += (request.token_ids or ()) + (sample.token_ids or ())
                due_ms = self._clock.ms()
        finally:
            first.set()
            if places is not None:
                places.release()

    async def _ask(
        self, request: Request, due_ms: float, history: tuple[int, ...] = (), first: asyncio.Event | None = None
    ) -> Sample:
        return await ask(
            self._http,
            self._server,
            request,
            self._clock,
            due_ms,
            history=history,
            ignore_eos=self._ignore_eos,
            on_first=first,
        )
