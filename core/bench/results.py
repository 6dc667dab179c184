"""What a benchmark leaves behind: one JSON document that holds all that its figures depend on, raw samples included.

    {"schema", "kind", "date_utc", "command", "machine": {...}, "configuration": {...}, "results": {...}}

kind, and what `results` holds:
    serve      {"server": {...}, "summary": {figures.summarize}, "groups": {figures.summarize_groups},
               "under_prompts": {...} | null, "client_cpu_share", "samples": [Sample.to_json]}
    sweep      {"server", "objectives", "target_attainment", "best_rate_per_s" | null, "is_bound",
               "points": [{"rate_per_s" | null, "summary", "meets", "samples"}]}
    compare    {"systems": [{"name", "server", "configuration", "workloads": {kind: {"rounds": [as of serve]}}}],
               "chunk_sweep": [{"chunk_tokens", figures of "mixed" in compare.py, "chosen"}],
               "token_equality": {"systems", "compared", "equal", "first_difference" | null},
               "ratios": {kind: {system: {figure: {"median", "lowest", "highest", "num_rounds"} | null}}},
               "busy_share": [of all cores before each turn], "verdict": [text]}
    handoff    see handoff.py; and "busy_share": [of all cores, before it began]
    engine     see engine.py; and "busy_share"
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdctl.transport.errors import IncompatibleError, NotFoundError, UsageError

SCHEMA = "pdctl-bench-1"
KINDS = ("serve", "sweep", "compare", "handoff", "engine")


def document(
    kind: str, configuration: dict[str, Any], results: dict[str, Any], machine: dict[str, Any]
) -> dict[str, Any]:
    """A benchmark's results with everything that they depend on.

    Args:
        machine: `describe()`, from before the benchmark: its load is not to be the benchmark's own.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "machine": machine,
        "configuration": configuration,
        "results": results,
    }


def save(document: dict[str, Any], path: Path) -> None:
    """Write it whole or not at all.

    Raises:
        UsageError: it cannot be written there.
    """
    write_whole(json.dumps(document, indent=1, ensure_ascii=False) + "\n", path, "--output")


def write_whole(text: str, path: Path, flag: str) -> None:
    """Write a file that is seen whole or not at all.

    Args:
        flag: the option that named the path, for the message.

    Raises:
        UsageError: it cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{flag} {path}: {error.strerror}") from error


def check_writable(path: Path | None) -> None:
    """Before minutes of measuring: whether `save` could write there.

    Raises:
        UsageError: it could not.
    """
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UsageError(f"--output {path}: expected a file in a directory that can be written")


def load(path: Path) -> dict[str, Any]:
    """A document that `save` wrote.

    Raises:
        NotFoundError: there is no such file.
        IncompatibleError: it holds something else.
    """
    try:
        found: Any = json.loads(path.read_text())
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise IncompatibleError(f"{path}: expected an object, found {type(found).__name__}")
    schema = found.get("schema")
    if schema != SCHEMA:
        raise IncompatibleError(f"{path}: schema {schema!r}, expected {SCHEMA!r}: no results of pdctl bench")
    if found.get("kind") not in KINDS or not isinstance(found.get("results"), dict):
        raise IncompatibleError(f"{path}: kind {found.get('kind')!r}, expected one of {', '.join(KINDS)}")
    return found


def _command() -> str:
    """As it was typed; a value of --api-key-file is a path, and no option takes a key."""
    return shlex.join(["pdctl", *sys.argv[1:]])
