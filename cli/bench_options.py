"""What the load-making bench commands have in common: which server, which workload."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl.transport.errors import UsageError

if TYPE_CHECKING:
    from pdctl.core.bench.workloads import Workload

# Of each workload, where nothing is given: (prompts, input tokens, output tokens).
_DEFAULTS = {
    "random": (32, 256, 64),
    "shared-prefix": (32, 64, 64),
    "multi-turn": (8, 128, 64),
    "mixed": (6, 1024, 128),
    "jsonl": (1000, 0, 128),
    "sharegpt": (100, 0, 128),
}

WorkloadOption = Annotated[
    str, typer.Option("--workload", "-w", help=f"One of {', '.join(_DEFAULTS)}.", autocompletion=lambda: [*_DEFAULTS])
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts", "-n", min=1, max=1_000_000, help="Conversations, for multi-turn.", show_default="by workload"
    ),
]
InputLenOption = Annotated[
    int | None,
    typer.Option("--input-len", min=1, max=1 << 20, help="Prompt tokens.", show_default="by workload"),
]
OutputLenOption = Annotated[
    int | None,
    typer.Option(
        "--output-len", min=1, max=1 << 20, help="Tokens of each answer, of a stream.", show_default="by workload"
    ),
]
PrefixLenOption = Annotated[int, typer.Option("--prefix-len", min=1, max=1 << 20, help="shared-prefix: its tokens.")]
NumPrefixesOption = Annotated[int, typer.Option("--num-prefixes", min=1, max=10_000, help="shared-prefix: how many.")]
TurnsOption = Annotated[int, typer.Option("--turns", min=1, max=1000, help="multi-turn: requests of a conversation.")]
StreamsOption = Annotated[int, typer.Option("--streams", min=1, max=4096, help="mixed: streams under way.")]
StreamInputLenOption = Annotated[
    int, typer.Option("--stream-input-len", min=1, max=1 << 20, help="mixed: prompt tokens of a stream.")
]
DatasetOption = Annotated[
    Path | None, typer.Option("--dataset", help="File of jsonl or sharegpt.", show_default=False)
]
RequestRateOption = Annotated[
    float, typer.Option("--request-rate", "-r", help="Arrivals a second; inf: all at once.")
]
ArrivalsOption = Annotated[
    str,
    typer.Option(
        "--arrivals", help="poisson, constant or burst.", autocompletion=lambda: ["poisson", "constant", "burst"]
    ),
]
BurstSizeOption = Annotated[int, typer.Option("--burst-size", min=1, max=10_000, help="burst: arrivals at once.")]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency", "-c", min=1, max=100_000, help="At once; the rest waits.", show_default="no limit"
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=(1 << 32) - 1,
        help="Same seed, same requests: cached the second time.",
        show_default="a new one",
    ),
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option("--goodput", help="Objective: ttft:MS, tpot:MS or e2el:MS. Repeat for more.", show_default=False),
]
WarmupsOption = Annotated[
    int, typer.Option("--num-warmups", min=0, max=1000, help="Requests before the clock starts.")
]
RequestTimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds until a request has failed.")
]


def workload_of(kind: str, given: dict[str, Any], *, vocab_size: int | None) -> Workload:
    """The workload that a command's options (by parameter name) ask for."""
    from pdctl.core.bench.workloads import Arrivals, make

    if kind not in _DEFAULTS:
        raise UsageError(f"--workload {kind}: expected one of {', '.join(_DEFAULTS)}")
    num_prompts, input_len, output_len = _DEFAULTS[kind]
    return make(
        kind,
        seed=secrets.randbits(32) if given["seed"] is None else given["seed"],
        vocab_size=vocab_size,
        num_prompts=given["num_prompts"] or num_prompts,
        input_len=given["input_len"] or input_len,
        output_len=given["output_len"] or output_len,
        arrivals=Arrivals(kind=given["arrivals"], rate_per_s=given["request_rate"], burst_size=given["burst_size"]),
        max_concurrency=given["max_concurrency"],
        prefix_len=given["prefix_len"],
        num_prefixes=given["num_prefixes"],
        turns=given["turns"],
        num_streams=given["streams"],
        stream_input_len=given["stream_input_len"],
        dataset=given["dataset"],
    )
