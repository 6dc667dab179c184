"""What a cluster is made of: one frozen record, validated once, passed on as JSON.

Flag > environment (`PDCTL_*`) > default. Knows the segment's geometry; no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdctl.core.hosts import check_host_name
from pdctl.core.keys import ApiKey, parse_key
from pdctl.core.numerics import numerics
from pdctl.core.weights.fingerprint import ModelFile
from pdctl.core.weights.generation import SamplingDefaults
from pdctl.transport.errors import CapacityError, IncompatibleError, UsageError
from pdctl.transport.layout import DType, Geometry, VerifyKv
from pdctl.transport.machine import usable_cores
from pdctl.transport.names import check_cluster
from pdctl.transport.segment import Expected

if TYPE_CHECKING:
    from pdctl.core.checkpoint import ModelConfig

BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("float32", "bfloat16")
ON_FAILURE = ("resume", "fail")
VERIFY_KV = tuple(mode.name.lower() for mode in VerifyKv)
MAX_DAEMONS = 16
DEFAULT_LOCAL_PREFILL_TOKENS = 32
DEFAULT_KV_GIB = 1.0
DEFAULT_MAX_CONTEXT = 8192
DEFAULT_MAX_QUEUE = 256
# Enough for as many prefill daemons as there may be, and four decode daemons of the default batch: a cluster can be
# scaled so far without a new start.
MIN_ROWS = 144
# A restarted daemon must find room for two: one prompt and one answer.
MIN_BLOCKS = 2
MAX_BLOCKS = 1 << 32


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """One cluster, fully decided.

    Attributes:
        model_path: directory with config.json, tokenizer and safetensors.
        model_name: the name it is served under.
        model_files: what it is made of; what is loaded later must be the same. Empty: nothing is compared.
        fingerprint: 64 bits that tell these files from others.
        block_tokens, num_blocks: the pool.
        max_context: tokens of one request, prompt and output together.
        colocated: one daemon does the work of a prefill and of a decode daemon: see colocated.py.
        local_prefill_tokens: uncached prompt tokens that a decode daemon computes itself; 0: none.
        chunk_tokens: prompt tokens of one prefill forward; of a colocated daemon's, less one for each running answer.
        max_batch: rows that one decode daemon runs at once.
        verify_kv: off, recompute or fail: see `VerifyKv`.
        on_failure: whether a dead daemon's requests resume elsewhere or fail with the cause.
        sampling: what a request gets that does not say.
        max_queue: requests that may wait for a daemon; 0: none, all daemons busy is a refusal.
        allowed_hosts: names that the Host header may have beside those of `host`.
        api_key: what clients must send; None: nothing. Of all that a spec holds, the one secret.
    """

    name: str
    state_dir: Path
    model_path: Path
    model_name: str
    fingerprint: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    colocated: bool = False
    dtype: str = "bfloat16"
    block_tokens: int = 16
    num_blocks: int = 1024
    max_context: int = DEFAULT_MAX_CONTEXT
    max_rows: int = MIN_ROWS
    threads_prefill: int = 1
    threads_decode: int = 1
    local_prefill_tokens: int = DEFAULT_LOCAL_PREFILL_TOKENS
    chunk_tokens: int = 256
    max_batch: int = 32
    verify_kv: str = "off"
    on_failure: str = "resume"
    max_queue: int = DEFAULT_MAX_QUEUE
    allowed_hosts: tuple[str, ...] = ()
    api_key: ApiKey | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    model_files: tuple[ModelFile, ...] = ()

    def __post_init__(self) -> None:
        check_cluster(self.name)
        _check_choice("--dtype", self.dtype, DTYPES)
        _check_choice("--verify-kv", self.verify_kv, VERIFY_KV)
        _check_choice("--on-failure", self.on_failure, ON_FAILURE)
        _check_choice("--block-size", self.block_tokens, BLOCK_SIZES)
        _check_range("--port", self.port, 0, 65535)
        _check_range("--prefill", self.num_prefill, 1, MAX_DAEMONS)
        _check_range("--decode", self.num_decode, 1, MAX_DAEMONS)
        _check_range("--kv-blocks", self.num_blocks, MIN_BLOCKS, MAX_BLOCKS)
        _check_range("--max-context", self.max_context, 2, 1 << 24)
        _check_range("--threads", self.threads_prefill, 1, 1024)
        _check_range("--threads", self.threads_decode, 1, 1024)
        _check_range("--local-prefill-tokens", self.local_prefill_tokens, 0, 1 << 24)
        _check_range("--chunk-tokens", self.chunk_tokens, 1, 1 << 16)
        _check_range("--max-batch", self.max_batch, 1, 1024)
        _check_range("--max-queue", self.max_queue, 0, 1 << 20)
        if self.colocated:
            self._check_colocated()
        for name in self.allowed_hosts:
            check_host_name(name)

    def _check_colocated(self) -> None:
        for flag, value, only, why in (
            ("--prefill", self.num_prefill, 1, "its one process is all there is"),
            ("--decode", self.num_decode, 1, "its one process is all there is"),
            ("--local-prefill-tokens", self.local_prefill_tokens, 0, "prompts and answers share every step anyway"),
        ):
            if value != only:
                raise UsageError(f"{flag} {value} with --colocated: {why}", hint=f"leave out {flag} or --colocated")

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=DType.FLOAT32 if self.dtype == "float32" else DType.BFLOAT16,
            max_rows=self.max_rows,
            max_context=self.max_context,
        )

    @property
    def expected(self) -> Expected:
        """What a daemon built for this cluster must find in the segment."""
        geometry = self.geometry
        return Expected(
            fingerprint=self.fingerprint,
            numerics_id=numerics(self.dtype).id,
            dtype=geometry.dtype,
            block_tokens=self.block_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def to_json(self) -> str:
        """All of it, the API key too: for files that only this user can read."""
        values = dataclasses.asdict(self)
        if self.api_key is not None:
            values["api_key"] = self.api_key.reveal()
        return json.dumps({key: str(v) if isinstance(v, Path) else v for key, v in values.items()})

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """The record that `to_json` wrote.

        Raises:
            IncompatibleError: not such a record.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise TypeError(f"expected an object, found {type(values).__name__}")
            return _read_record(cls, values)
        except (ValueError, TypeError, RecursionError) as error:
            raise IncompatibleError(f"cluster specification: {error}") from error


_Record = TypeVar("_Record")
_RECORDS = {"SamplingDefaults": SamplingDefaults, "ModelFile": ModelFile}


def _read_record(record: type[_Record], values: dict[str, object]) -> _Record:
    kinds = {one.name: str(one.type) for one in dataclasses.fields(record)}  # type: ignore[arg-type]
    return record(**{key: _read(key, kinds.get(key), value) for key, value in values.items()})


def _read(name: str, kind: str | None, value: object) -> Any:
    """A field's value from its JSON, by the field's type as it is written in the record's class.

    Raises:
        TypeError: it has another type, or there is no such field.
    """
    if (kind, type(value)) in (("int", int), ("bool", bool), ("float", float), ("float", int)):
        return float(value) if kind == "float" and isinstance(value, int) else value
    if kind == "int | None" and (value is None or type(value) is int):
        return value
    if kind in _RECORDS and isinstance(value, dict):
        return _read_record(_RECORDS[kind], value)
    if kind in ("str", "Path") and isinstance(value, str) and "\0" not in value:
        return Path(value) if kind == "Path" else value
    if kind is not None and kind.startswith("tuple[") and isinstance(value, list):
        return tuple(_read(name, kind.removeprefix("tuple[").removesuffix(", ...]"), one) for one in value)
    if kind == "ApiKey | None" and (value is None or isinstance(value, str)):
        return None if value is None else parse_key(value, name)
    raise TypeError(f"{name}: expected {kind}, found {type(value).__name__}")


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{flag} {value}: expected {low} to {high}", hint="pdctl up --help")


def _check_choice(flag: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise UsageError(f"{flag} {value}: expected one of {listed}", hint="pdctl up --help")


def context_of(of_model: ModelConfig, given: int | None) -> int:
    """Tokens of one request: `--max-context`, else as many as the model can have, at most DEFAULT_MAX_CONTEXT.

    Raises:
        UsageError: the model cannot have so many, and why.
    """
    limit = of_model.max_context
    if given is None:
        return min(DEFAULT_MAX_CONTEXT, limit)
    if not 2 <= given <= limit:
        raise UsageError(
            f"--max-context {given}: expected 2 to {limit}, {context_limit_words(of_model)}",
            hint=f"--max-context {limit}",
        )
    return given


def context_limit_words(of_model: ModelConfig) -> str:
    """What sets the longest context of a model."""
    if of_model.context_rope is None:
        return "the model's own limit"
    return (
        f"beyond which the angles of its rope ({of_model.context_rope}) change with the length of each request, "
        "so that no KV could be shared or computed in a batch"
    )


def default_threads(total: int | None) -> tuple[int, int]:
    """(prefill, decode) threads: prefill may use every core, decode leaves it one.

    Args:
        total: --threads; None: OMP_NUM_THREADS if set, else all cores that affinity and CPU quotas leave.
    """
    if total is None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        total = int(given) if given.isdecimal() and int(given) > 0 else usable_cores()
    return total, max(1, total - 1)


def rows_for(num_prefill: int, num_decode: int, max_batch: int) -> int:
    """Rows of a segment: a place for all that daemons may work on at once. Whoever finds none waits for one."""
    return max(MIN_ROWS, _rows_at_work(num_prefill, num_decode, max_batch))


def _rows_at_work(num_prefill: int, num_decode: int, max_batch: int) -> int:
    return num_prefill + num_decode * max_batch


def check_scale(spec: ClusterSpec, num_prefill: int, num_decode: int, *, hint: str) -> None:
    """Raise CapacityError if so many daemons could work on more requests than the segment has rows for."""
    wanted = _rows_at_work(num_prefill, num_decode, spec.max_batch)
    if wanted > max(spec.max_rows, _rows_at_work(spec.num_prefill, spec.num_decode, spec.max_batch)):
        most = (spec.max_rows - num_prefill) // spec.max_batch
        raise CapacityError(
            f"scale prefill={num_prefill} decode={num_decode}: they may work on {wanted} requests at once "
            f"(--max-batch {spec.max_batch}), this cluster's segment was made for {spec.max_rows}: at most "
            f"decode={most} beside prefill={num_prefill}",
            hint=hint,
        )


def blocks_for(kv_gib: float, block_bytes: int) -> int:
    """Blocks of a pool of `kv_gib` GiB."""
    if not 0 < kv_gib <= 1 << 20:
        raise UsageError(f"--kv-gib {kv_gib:g}: expected more than 0, at most 1048576", hint="pdctl up --help")
    number = int(kv_gib * (1 << 30)) // block_bytes
    if number > MAX_BLOCKS:
        raise UsageError(
            f"--kv-gib {kv_gib:g}: {number} blocks of {block_bytes} bytes; at most {MAX_BLOCKS} are possible",
            hint="pdctl up --help",
        )
    return number
