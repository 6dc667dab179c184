"""`pdctl bench handoff`: how long the KV of a prompt takes from one process to another, by way and length.

Every transport has two processes of its own (endpoint.py) and the same number of bytes. Time runs from the sender's
stamp before it begins to the receiver's stamp when it has all, both CLOCK_MONOTONIC; afterwards the receiver compares
every byte. Rounds are interleaved: whatever else the machine does meets all transports alike. Holds no cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from pdctl.core.bench.figures import Series
from pdctl.core.bench.helper import Helper, HelperError
from pdctl.transport.errors import CapacityError, DeadlineError, NotFoundError, PdctlError, UsageError
from pdctl.transport.layout import DType, Geometry, Layout
from pdctl.transport.mapping import available_bytes
from pdctl.transport.names import new_segment_name

_ENDPOINT = "pdctl.core.bench.endpoint"
_LOAD = "pdctl.core.bench.memory_load"
# Starting, registering memory, touching it.
_PREPARE_S = 60.0
# A hand-over's bytes are written before and compared after: that takes its time, too.
_FILL_S = 60.0
_LOAD_BYTES = 512 << 20
_WARM_UP_ROUNDS = 1
# A socket's path has at most 107 characters; below the directory there are a transport and a socket.
_LONGEST_DIRECTORY = 80


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A transport that can be measured.

    Attributes:
        modules: any of them must be installed; none: it is part of pdctl.
        copies: of a hand-over's bytes that lie in memory.
        one_process: the sender receives, too.
        endpoint: the module that is an end's process.
    """

    name: str
    modules: tuple[str, ...] = ()
    install: str = ""
    copies: int = 2
    one_process: bool = False
    endpoint: str = _ENDPOINT

    @property
    def is_installed(self) -> bool:
        return not self.modules or any(importlib.util.find_spec(module) for module in self.modules)


KINDS = (
    Kind(name="pdctl", copies=1),
    Kind(name="memcpy", one_process=True),
    Kind(name="pipe"),
    Kind(name="unix"),
    Kind(name="nixl", modules=("nixl_cu12", "nixl_cu13", "nixl"), install="pip install nixl-cu12"),
    Kind(name="mooncake", modules=("mooncake",), install="pip install mooncake-transfer-engine-non-cuda"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        geometry: of the KV; num_blocks and max_context are set from the lengths.
        tokens: lengths, whole blocks.
        load: whether everything is measured beside a memory load, too.
        timeout_s: of one hand-over.
    """

    geometry: Geometry
    tokens: tuple[int, ...]
    kinds: tuple[Kind, ...] = KINDS
    rounds: int = 7
    load: bool = True
    timeout_s: float = 30.0

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(number // self.geometry.block_tokens for number in self.tokens)

    @property
    def num_steps(self) -> int:
        """How often `advance` is called if nothing fails."""
        installed = sum(kind.is_installed for kind in self.kinds)
        return len(self.tokens) * (1 + self.load) * (self.rounds + _WARM_UP_ROUNDS) * installed


@dataclass(kw_only=True)
class Cell:
    """One transport at one length, with or without load. Ratio: median against pdctl's in the same run."""

    transport: str
    tokens: int
    num_bytes: int
    load: bool
    samples_ms: list[float] = field(default_factory=list)
    ratio: float | None = None

    @property
    def series(self) -> Series | None:
        return Series.of(self.samples_ms)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Cells of transports that were measured to the end; the others are in `failed` or `not_installed`."""

    geometry: Geometry
    rounds: int
    cells: tuple[Cell, ...]
    failed: dict[str, str]
    not_installed: dict[str, str]
    load_gb_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        g = self.geometry
        return {
            "geometry": {
                "num_layers": g.num_layers,
                "num_kv_heads": g.num_kv_heads,
                "head_dim": g.head_dim,
                "dtype": g.dtype.label,
                "block_tokens": g.block_tokens,
                "token_bytes": g.token_bytes,
            },
            "rounds": self.rounds,
            "load_gb_per_s": self.load_gb_per_s,
            "cells": [
                {
                    "transport": cell.transport,
                    "kv_tokens": cell.tokens,
                    "bytes": cell.num_bytes,
                    "load": cell.load,
                    "p50_ms": None if cell.series is None else cell.series.p50,
                    "p99_ms": None if cell.series is None else cell.series.p99,
                    "ratio_to_pdctl": cell.ratio,
                    "samples_ms": cell.samples_ms,
                }
                for cell in self.cells
            ],
            "failed": [{"transport": name, "error": error} for name, error in self.failed.items()],
            "not_installed": [{"transport": name, "install": how} for name, how in self.not_installed.items()],
        }


def whole_blocks(tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Lengths in whole blocks, ascending: what is handed over is blocks."""
    return tuple(sorted({-(-number // block_tokens) * block_tokens for number in tokens}))


def geometry_for(token_bytes: int, block_tokens: int = 16) -> Geometry:
    """A geometry with so many bytes a token, the shape of a small model.

    Raises:
        UsageError: no whole number of bfloat16 values for a key and a value.
    """
    for layers in (30, 32, 28, 24, 16, 12, 8, 4, 2, 1):
        if token_bytes > 0 and token_bytes % (layers * 4) == 0:
            return Geometry(
                num_blocks=1,
                block_tokens=block_tokens,
                num_layers=layers,
                num_kv_heads=1,
                head_dim=token_bytes // (layers * 4),
                dtype=DType.BFLOAT16,
            )
    raise UsageError(f"--kv-bytes-per-token {token_bytes}: expected a multiple of 4 above 0")


def geometry_of(model: str, dtype: str, block_tokens: int = 16) -> Geometry:
    """A model's geometry, from its config.json; nothing is downloaded.

    Raises:
        PdctlError: as `models.resolve`.
    """
    from pdctl.core.models import resolve
    from pdctl.core.numerics import default_dtype

    config = resolve(model, allow_pull=False).config
    wanted = default_dtype(config.dtype) if dtype == "auto" else dtype
    return Geometry(
        num_blocks=1,
        block_tokens=block_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=DType[wanted.upper()],
    )


def embedded_geometry(dtype: str) -> Geometry:
    """That of the embedded model, whether or not it is on this disk."""
    try:
        return geometry_of("smollm2", dtype)
    except NotFoundError:
        return Geometry(
            num_blocks=1,
            block_tokens=16,
            num_layers=30,
            num_kv_heads=3,
            head_dim=64,
            dtype=DType.BFLOAT16 if dtype == "auto" else DType[dtype.upper()],
        )


class _Pair:
    """The two ends of one transport, and the next hand-over between them."""

    def __init__(self, kind: Kind, plan: Plan, geometry: Geometry, directory: Path) -> None:
        self._plan = plan
        self._name = new_segment_name("bench")
        self._helpers: list[Helper] = []
        own = directory / kind.name
        own.mkdir(mode=0o700)
        try:
            sender = self._start(kind, "sender", own, geometry)
            card = sender.ask(_PREPARE_S, "its start", do="prepare", card={})["card"]
            receiver = sender
            if not kind.one_process:
                receiver = self._start(kind, "receiver", own, geometry)
                answer = receiver.ask(_PREPARE_S, "its start", do="prepare", card=card)
                sender.ask(_PREPARE_S, "connecting", do="connect", card=answer["card"])
            self._sender, self._receiver = sender, receiver
        except BaseException:
            self.close()
            raise

    def _start(self, kind: Kind, role: str, directory: Path, geometry: Geometry) -> Helper:
        helper = Helper(f"{kind.name} {role}", kind.endpoint, directory)
        self._helpers.append(helper)
        setup = {
            "sends": role == "sender",
            "directory": str(directory),
            "segment": str(self._name),
            "geometry": geometry.to_words(),
            "max_blocks": max(self._plan.blocks),
            "timeout_s": self._plan.timeout_s,
        }
        helper.tell(transport=kind.name, setup=setup)
        return helper

    def hand_over(self, num_blocks: int) -> float:
        """Milliseconds of one hand-over whose bytes all came.

        Raises:
            PdctlError: it failed, took too long, or other bytes came.
        """
        seed, timeout_s = secrets.randbits(32), self._plan.timeout_s
        asked: dict[str, Any] = {"num_blocks": num_blocks, "seed": seed}
        self._sender.ask(_FILL_S, "writing the bytes", do="fill", **asked)
        if self._sender is self._receiver:
            began = self._sender.ask(timeout_s, "the copy", do="send", **asked)
            self._receiver.ask(timeout_s, "its start", do="receive", **asked)
        else:
            self._receiver.ask(timeout_s, "getting ready", do="receive", **asked)
            self._sender.tell(do="send", **asked)
            try:
                began = self._sender.hear(timeout_s, "sending")
            except PdctlError:
                # The sender may have failed over a receiver that has failed: that one knows why.
                with contextlib.suppress(DeadlineError):
                    self._receiver.hear(1.0, "receiving")
                raise
        ended = self._receiver.hear(timeout_s, "receiving")
        fault = self._receiver.hear(_FILL_S, "comparing the bytes")["fault"]
        if fault is not None:
            raise HelperError(f"{self._receiver.name}: {fault}")
        return float(ended["ended_ns"] - began["began_ns"]) / 1e6

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
        self._name.path.unlink(missing_ok=True)


class _Load:
    """Another process that keeps the memory busy; off until it is switched on."""

    def __init__(self, directory: Path) -> None:
        self._helper = Helper("load", _LOAD, directory)
        self._num_bytes, self._s = 0, 0.0
        try:
            self._helper.hear(_PREPARE_S, "its start")
        except BaseException:
            self._helper.close()
            raise

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._helper.ask(_PREPARE_S, "its start", do="go")
        try:
            yield
        finally:
            done = self._helper.ask(_PREPARE_S, "its end", do="stop")
            self._num_bytes += done["bytes"]
            self._s += done["s"]

    @property
    def gb_per_s(self) -> float:
        return self._num_bytes / self._s / 1e9

    def close(self) -> None:
        self._helper.close()


def run(plan: Plan, advance: Callable[[], None]) -> Result:
    """Measure all transports that are installed; one that fails is left out of the rounds that remain.

    Args:
        advance: called after every hand-over.

    Raises:
        CapacityError: the bytes of the largest hand-over do not fit in memory, in all processes.
    """
    geometry = _pool_for(plan)
    _check_room(plan, geometry)
    failed: dict[str, str] = {}
    not_installed = {kind.name: kind.install for kind in plan.kinds if not kind.is_installed}
    cells = {
        (kind.name, number, load): Cell(
            transport=kind.name, tokens=number, num_bytes=number * geometry.token_bytes, load=load
        )
        for load in ((False, True) if plan.load else (False,))
        for number in plan.tokens
        for kind in plan.kinds
        if kind.is_installed
    }
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdctl-bench-")))
        if len(str(directory)) > _LONGEST_DIRECTORY:
            raise UsageError(
                f"TMPDIR {directory.parent}: too long for the names of sockets in it", hint="TMPDIR=/tmp"
            )
        load = _Load(directory) if plan.load else None
        if load is not None:
            stack.callback(load.close)
        pairs: dict[str, _Pair] = {}
        for kind in plan.kinds:
            if kind.is_installed:
                with _noting(failed, kind.name):
                    pairs[kind.name] = _Pair(kind, plan, geometry, directory)
                    stack.callback(pairs[kind.name].close)
        for index in range(plan.rounds + _WARM_UP_ROUNDS):
            for loaded in (False, True) if load is not None else (False,):
                with load.on() if load is not None and loaded else contextlib.nullcontext():
                    for name, number, took_ms in _round(plan, pairs, failed, advance):
                        if index >= _WARM_UP_ROUNDS:
                            cells[name, number, loaded].samples_ms.append(took_ms)
        gb_per_s = None if load is None else load.gb_per_s
    for cell in cells.values():
        own = cells.get(("pdctl", cell.tokens, cell.load))
        if own is not None and own.series is not None and cell.series is not None and "pdctl" not in failed:
            cell.ratio = cell.series.p50 / own.series.p50
    return Result(
        geometry=geometry,
        rounds=plan.rounds,
        # Half of the samples would be no fair figure.
        cells=tuple(cell for cell in cells.values() if cell.transport not in failed),
        failed=failed,
        not_installed=not_installed,
        load_gb_per_s=gb_per_s,
    )


def _round(
    plan: Plan, pairs: dict[str, _Pair], failed: dict[str, str], advance: Callable[[], None]
) -> Iterator[tuple[str, int, float]]:
    """Every length by every transport that has not failed: (transport, tokens, ms)."""
    for number in plan.tokens:
        for name, pair in pairs.items():
            if name in failed:
                continue
            with _noting(failed, name):
                yield name, number, pair.hand_over(number // plan.geometry.block_tokens)
            if name in failed:
                pair.close()
            advance()


@contextlib.contextmanager
def _noting(failed: dict[str, str], name: str) -> Iterator[None]:
    """One transport's failure is its own."""
    try:
        yield
    except PdctlError as error:
        failed[name] = error.message


def _pool_for(plan: Plan) -> Geometry:
    """The geometry with room for the largest hand-over, its prompt's last token and one more."""
    largest = max(plan.tokens)
    size = plan.geometry.block_tokens
    return replace(plan.geometry, num_blocks=largest // size + 1, max_rows=4, max_context=largest + size)


def _check_room(plan: Plan, geometry: Geometry) -> None:
    largest = max(plan.tokens) * geometry.token_bytes
    segment = Layout(geometry).total_bytes
    copies = sum(kind.copies for kind in plan.kinds if kind.is_installed)
    wanted = copies * largest + segment - largest + (_LOAD_BYTES if plan.load else 0)
    memory = psutil.virtual_memory().available
    for need, (available, limit) in ((segment, available_bytes()), (wanted, (memory, "memory"))):
        if need > available:
            raise CapacityError(
                f"hand-overs of {max(plan.tokens)} tokens: want {need} bytes, {limit} has {max(0, available)} bytes",
                hint=f"pdctl bench handoff --tokens {max(1, int(max(plan.tokens) * max(0, available) / need / 2))}",
            )
