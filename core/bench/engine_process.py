"""The process that `pdctl bench engine` measures in: the daemons' own engines over a segment of its own.

    {"spec", "decode", "prefill", "profile", "rounds"} -> {"done", "total"}..., {"shape", "limits", "decode_ms", ...}

Rows are made as the router makes them; where only decode is timed, their KV is said to be computed, and is not: how
long a step takes does not depend on what the numbers are. Run with the environment of a daemon, see numerics.py.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pdctl.core.bench.engine import STEPS
from pdctl.core.bench.helper import Wire, run
from pdctl.core.bench.probe import Probe
from pdctl.core.config import ClusterSpec
from pdctl.core.daemon import map_pages
from pdctl.core.decode import DecodeEngine
from pdctl.core.model import Model, WidenedLinear, load
from pdctl.core.numerics import numerics
from pdctl.core.prefill import PrefillEngine
from pdctl.core.sampler import RowSampler
from pdctl.core.wake import Wake
from pdctl.transport.doorbell import Bell
from pdctl.transport.layout import P
from pdctl.transport.rows import Claim, RowParams, RowState
from pdctl.transport.segment import Participant, ParticipantState, Role, Segment

# A cell whose steps take longer is timed once a round.
_LONG_STEP_MS = 500.0
_PROFILED_STEPS = 7
_LINEAR = (nn.Linear, WidenedLinear)
PHASES = ("embedding", "attention", "linear layers", "output layer", "norms, rope, rest", "sampling", "engine")


class Bench:
    """A router, a prefill and a decode engine over one anonymous segment, stepped by hand."""

    def __init__(self, spec: ClusterSpec, model: Model) -> None:
        self._spec = spec
        self._segment = Segment.anonymous(spec.geometry)
        self._rows = self._segment.rows
        pages = map_pages(self._segment)
        # Touched, and no denormals: nothing is slow but what is slow in a daemon.
        pages.fill_(0.01)
        model.use_pages(pages)
        self._random = random.Random(0)
        self._router = self._segment.attach(Role.ROUTER)
        self._prefiller, prefill_wake = self._join(Role.PREFILL)
        self._prefill = PrefillEngine(self._segment, self._prefiller, model, spec, prefill_wake)
        decoder, decode_wake = self._join(Role.DECODE)
        self._decode = DecodeEngine(self._segment, decoder, model, spec, decode_wake)

    def _join(self, role: Role) -> tuple[Participant, Wake]:
        me = self._segment.attach(role)
        me.put(P.STATE, ParticipantState.READY)
        return me, Wake(self._segment, me.slot, Bell(self._spec.state_dir, me.slot))

    def _submit(self, num_tokens: int, limit_tokens: int) -> Claim:
        claim = self._rows.submit(
            self._router,
            request_id="bench",
            tokens=[self._random.randrange(self._spec.vocab_size) for _ in range(num_tokens)],
            limit_tokens=limit_tokens,
            params=RowParams(ignore_eos=True),
            local_prefill_tokens=0,
        )
        assert claim is not None
        return claim

    def _ready(self, num_tokens: int, limit_tokens: int) -> Claim:
        """A row that decode may claim, with the KV of all tokens but the last."""
        claim = self._submit(num_tokens, limit_tokens)
        if self._rows.state(claim.row) is RowState.QUEUED:
            claimed = self._rows.claim(self._prefiller, claim.row, alone=True)
            assert claimed is not None
            self._rows.commit_kv(claim.row, num_tokens - 1)
            self._rows.publish(claim.row)
            self._rows.hand_over(claim.row)
        return claim

    def decode_ms(self, batch: int, context: int, steps: int, timed: Any = contextlib.nullcontext) -> list[float]:
        """Time steps of a batch; the first of them sees `context` keys a row.

        Args:
            timed: a context manager around what is timed.
        """
        torch.set_num_threads(self._spec.threads_decode)
        claims = [self._ready(context - 1, context + STEPS + 1) for _ in range(batch)]
        self._decode.step()  # they are claimed
        took_ms = []
        with timed():
            for _ in range(steps):
                began = time.perf_counter_ns()
                self._decode.step()
                took_ms.append((time.perf_counter_ns() - began) / 1e6)
        for claim in claims:
            self._rows.cancel(claim.row, claim.generation)
        self._decode.step()
        self._recycle(claims)
        return took_ms

    def prefill_ms(self, num_tokens: int) -> float:
        """Time the KV of so many tokens, in chunks, until decode could have the row."""
        torch.set_num_threads(self._spec.threads_prefill)
        claim = self._submit(num_tokens + 1, num_tokens + 2)
        began = time.perf_counter_ns()
        while self._rows.state(claim.row) is not RowState.READY:
            if not self._prefill.step():
                raise RuntimeError(f"prefill of {num_tokens} tokens stands still")
        took_ms = (time.perf_counter_ns() - began) / 1e6
        self._rows.cancel(claim.row, claim.generation)
        self._recycle([claim])
        return took_ms

    def _recycle(self, claims: list[Claim]) -> None:
        for claim in claims:
            if not self._rows.recycle(claim.row, claim.generation):
                raise RuntimeError(f"row {claim.row} has not ended: {self._rows.state(claim.row).name}")


class Timers:
    """Time by phase, from hooks and wrappers that stand only inside `on`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ns: dict[str, int] = {}

    def take_ms(self, step_ms: float) -> dict[str, float]:
        """The phases of one step that took so long; what nobody timed is the engine's own Python."""
        ms = {phase: self._ns.get(phase, 0) / 1e6 for phase in (*PHASES, "forward")}
        self._ns = {}
        inside = sum(ms[phase] for phase in PHASES[:4])
        ms["norms, rope, rest"] = ms.pop("forward") - inside
        ms["engine"] = step_ms - sum(ms.values())
        return ms

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        decoder, head = self._model._decoder, self._model._head
        with contextlib.ExitStack() as stack:
            self._hook(stack, "embedding", decoder.embed_tokens)
            self._hook(stack, "output layer", head)
            for module in decoder.modules():
                if isinstance(module, _LINEAR):
                    self._hook(stack, "linear layers", module)
            self._wrap(stack, "attention", self._model.paged, "attend")
            self._wrap(stack, "forward", self._model, "forward")
            self._wrap(stack, "sampling", RowSampler, "sample")
            yield

    def _add(self, phase: str, began: int) -> None:
        self._ns[phase] = self._ns.get(phase, 0) + time.perf_counter_ns() - began

    def _hook(self, stack: contextlib.ExitStack, phase: str, module: nn.Module) -> None:
        began = 0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter_ns()

        def after(*_: Any) -> None:
            self._add(phase, began)

        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def _wrap(self, stack: contextlib.ExitStack, phase: str, owner: Any, name: str) -> None:
        inner, own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                self._add(phase, began)

        setattr(owner, name, timed)
        stack.callback((lambda: setattr(owner, name, inner)) if own else (lambda: delattr(owner, name)))


def profile(bench: Bench, timers: Timers, batch: int, context: int) -> dict[str, Any]:
    """Steps with and without timers in them, by turns."""
    plain, phases = [], []
    for _ in range(_PROFILED_STEPS):
        plain += bench.decode_ms(batch, context, 1)
        (timed_ms,) = bench.decode_ms(batch, context, 1, timers.on)
        phases.append(timers.take_ms(timed_ms))
    return {
        "batch": batch,
        "context": context,
        "step_ms": statistics.median(plain),
        "phases_ms": {phase: statistics.median(one[phase] for one in phases) for phase in PHASES},
    }


def shape_of(model: Model, spec: ClusterSpec) -> dict[str, int]:
    """The fields of limits.Shape. A sliding window counts as if all keys were read."""
    decoder, head = model._decoder, model._head
    own = {id(parameter) for parameter in (*decoder.embed_tokens.parameters(), *head.parameters())}
    layers = [parameter for parameter in decoder.parameters() if id(parameter) not in own]
    linears = [module for module in decoder.modules() if isinstance(module, _LINEAR) and module is not head]
    return {
        "layer_weight_bytes": sum(parameter.nbytes for parameter in layers),
        "layer_weights": sum(module.weight.numel() for module in linears),
        "head_weight_bytes": sum(parameter.nbytes for parameter in head.parameters()),
        "head_weights": head.weight.numel(),
        "token_bytes": spec.geometry.token_bytes,
        "num_layers": spec.num_layers,
        "num_heads": model._decoder.config.num_attention_heads,
        "head_dim": spec.head_dim,
    }


def measure(
    bench: Bench, asked: dict[str, Any], probe: Callable[[], None], advance: Callable[[], None]
) -> tuple[list[list[float]], list[list[float]]]:
    """Rounds over all cells: (samples of each decode cell, of each prefill cell), in ms. The first warms up."""
    decode: list[list[float]] = [[] for _ in asked["decode"]]
    prefill: list[list[float]] = [[] for _ in asked["prefill"]]
    steps = [1] * len(decode)
    for index in range(asked["rounds"] + 1):
        probe()
        for place, (batch, context) in enumerate(asked["decode"]):
            took_ms = bench.decode_ms(batch, context, steps[place])
            if index:
                decode[place] += took_ms
            elif max(took_ms) < _LONG_STEP_MS:
                steps[place] = STEPS
            advance()
        for place, num_tokens in enumerate(asked["prefill"]):
            one_ms = bench.prefill_ms(num_tokens)
            if index:
                prefill[place].append(one_ms)
            advance()
        gc.collect()
    return decode, prefill


def serve(wire: Wire) -> None:
    asked = wire.hear()
    if asked is None:
        return
    spec = ClusterSpec.from_json(asked["spec"])
    model = load(spec.model_path, numerics(spec.dtype))
    gc.collect()
    gc.freeze()
    gc.disable()
    bench = Bench(spec, model)
    linear_dtype = torch.float32 if model.numerics.linear == "widened" else model.dtype
    probe = Probe(linear_dtype)
    threads = {"decode": spec.threads_decode, "prefill": spec.threads_prefill}
    best = {number: {"threads": number, "read_bytes_per_s": 0.0, "flops_per_s": 0.0} for number in threads.values()}
    done = 0
    total = (asked["rounds"] + 1) * (len(asked["decode"]) + len(asked["prefill"])) + len(asked["profile"])

    def advance() -> None:
        nonlocal done
        done += 1
        wire.say(done=done, total=total)

    def look() -> None:
        for number in best:
            torch.set_num_threads(number)
            bandwidth, speed = probe.read_bytes_per_s(), probe.flops_per_s()
            # More threads can do what fewer have done, even if the machine was busy just now.
            for limits in (best[more] for more in best if more >= number):
                limits["read_bytes_per_s"] = max(limits["read_bytes_per_s"], bandwidth)
                limits["flops_per_s"] = max(limits["flops_per_s"], speed)

    wire.say(done=0, total=total)
    decode_ms, prefill_ms = measure(bench, asked, look, advance)
    timers, profiles = Timers(model), []
    for batch, context in asked["profile"]:
        profiles.append(profile(bench, timers, batch, context))
        advance()
    wire.say(
        shape=shape_of(model, spec),
        limits={name: best[number] for name, number in threads.items()},
        decode_ms=decode_ms,
        prefill_ms=prefill_ms,
        profiles=profiles,
    )


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
