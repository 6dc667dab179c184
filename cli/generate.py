"""`pdctl generate`: one request to a running cluster, printed as it comes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pdctl.cli.options import DEFAULT_CLUSTER, JsonOption, NameOption, StateDirOption, place_of
from pdctl.cli.output import print_json, remark
from pdctl.transport.errors import UsageError

# What generation_config.json says, else what changes nothing.
_MODELS_OWN = "the model's own"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing: standard input.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message of the chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", show_default="256")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", show_default=_MODELS_OWN)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="0: all.", show_default=_MODELS_OWN)] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help="Drop what is less likely than this share of the top.", show_default=_MODELS_OWN
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="Above 1: avoid what prompt or answer has; 1: do not.",
            show_default=_MODELS_OWN,
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Above 0: avoid what the answer has.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, for each time it is there.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.", show_default="random")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; up to 4.")] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="No end before so many tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    as_json: JsonOption = False,
    timings: Annotated[bool, typer.Option("--timings", help="Where the time went, on stderr.")] = False,
    name: NameOption = DEFAULT_CLUSTER,
    state_dir: StateDirOption = None,
) -> None:
    """Ask the model."""
    from pdctl.core.client import Client
    from pdctl.core.cluster import command, running
    from pdctl.core.keys import given_key

    directory = place_of(state_dir, name)
    state = running(directory, name)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            remark("reading the prompt from the terminal; end it with Ctrl-D")
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not prompt.strip():
        raise UsageError(
            "the prompt is empty", hint=f'{command("generate", name, directory)} "What is the capital of France?"'
        )
    body: dict[str, Any] = {
        "max_tokens": 256 if max_tokens is None else max_tokens,
        "temperature": temperature,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "timings": timings or as_json,
    }
    for parameter, value in (
        ("top_p", top_p),
        ("top_k", top_k),
        ("min_p", min_p),
        ("repetition_penalty", repetition_penalty),
        ("seed", seed),
    ):
        if value is not None:
            body[parameter] = value
    if stop:
        body["stop"] = stop
    # Surrogates stand for bytes of the command line that are no UTF-8.
    prompt = prompt.encode("utf-8", "replace").decode()
    if raw:
        path, body = "/v1/completions", {**body, "prompt": prompt}
    else:
        messages = [{"role": "system", "content": system}] if system else []
        path, body = (
            "/v1/chat/completions",
            {**body, "messages": [*messages, {"role": "user", "content": prompt}]},
        )
    key = given_key(None) or state.spec.api_key
    client = Client(state.url, key, command=lambda verb: command(verb, name, directory))
    if as_json:
        print_json(client.post(path, body))
        return
    final = _print_stream(client, path, body)
    if timings:
        _print_timings(final)


def _print_stream(client: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Print text as it arrives; returns usage and timings."""
    out = sys.stdout.buffer
    final: dict[str, Any] = {}
    begun = False
    try:
        for _, chunk in client.stream(path, {**body, "stream_options": {"include_usage": True}}):
            for choice in chunk.get("choices", []):
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if text:
                    begun = True
                    out.write(text.encode())
                    out.flush()
            final.update({key: chunk[key] for key in ("usage", "timings") if chunk.get(key)})
        begun = True
    finally:
        # What comes after a broken answer stands on a line of its own.
        if begun:
            out.write(b"\n")
            out.flush()
    return final


def _print_timings(final: dict[str, Any]) -> None:
    usage, timings = final.get("usage") or {}, final.get("timings") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    remark(
        f"{usage.get('prompt_tokens')} prompt tokens ({cached} cached), {usage.get('completion_tokens')} generated"
    )
    for key, value in timings.items():
        if value is not None and key.endswith(("_ms", "_us")):
            remark(f"  {key:<16} {value:>10.1f}")
