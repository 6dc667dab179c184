"""`pdctl bench serve` as a person runs it: exit codes, the table, JSON, the file it leaves."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import DONE, WATCHDOG_S, FakeServer, good, running, usage

from pdctl.core.bench import results
from pdctl.core.bench.machine import describe
from pdctl.transport.errors import IncompatibleError, NotFoundError, UsageError

SMALL = ["-n", "4", "--input-len", "5", "--output-len", "3"]


def bench(*arguments: str, open_files: tuple[int, int] | None = None) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `open_files`: its soft and hard limit."""
    limit = None if open_files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    return subprocess.run(
        [sys.executable, "-m", "pdctl.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )


async def every_second(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    # The first is the warm-up.
    if number and number % 2:
        yield {"error": {"message": "it died"}}
        return
    async for part in good(number, body):
        yield part


def test_a_good_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with running(FakeServer(good)) as server:
        done = bench(
            "serve", "--base-url", server.url, *SMALL, "--seed", "7", "--goodput", "ttft:60000", "-o", str(file)
        )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for word in ("TTFT ms", "ITL ms", "4 ok, 0 failed", "100.0% within ttft 60000 ms"):
        assert word in done.stdout
    assert "--seed 7" in done.stderr
    document = results.load(file)
    assert document["kind"] == "serve"
    assert (
        document["configuration"] | {"seed": 7, "input_len": 5, "goodput_ms": {"ttft": 60000.0}}
        == (document["configuration"])
    )
    assert len(document["results"]["samples"]) == 4
    assert document["machine"]["usable_cores"] >= 1
    assert "bench serve" in document["command"]


def test_json_has_vllms_keys() -> None:
    with running(FakeServer(good)) as server:
        done = bench("serve", "--base-url", server.url, *SMALL, "--json")
    document = json.loads(done.stdout)
    summary = document["results"]["summary"]
    keys = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    keys |= {"request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"}
    keys |= {"max_concurrent_requests"}
    keys |= {
        f"{key}_{metric}_ms" for key in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")
    }
    assert keys <= summary.keys()
    assert "samples" not in document["results"]
    assert done.stderr == ""


def test_texts_need_no_vocabulary(tmp_path: Path) -> None:
    """Of a server that does not tell it, only where random ids are asked."""
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "a text"}\n{"prompt": [5, 6, 7]}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    other = FakeServer(texts, owner="somebody")
    with running(other) as server:
        done = bench("serve", "--base-url", server.url, "-w", "jsonl", "--dataset", str(file))
        random = bench("serve", "--base-url", server.url, *SMALL)
        told = bench("serve", "--base-url", server.url, *SMALL, "--vocab-size", "9")
    assert done.returncode == 0, done.stderr
    assert "3 ok, 0 failed" in done.stdout
    assert (random.returncode, random.stdout) == (2, "")
    assert "does not tell its vocabulary" in random.stderr and "--vocab-size N" in random.stderr
    assert told.returncode == 0, told.stderr
    assert all(token < 9 for body in other.bodies[-4:] for token in body["prompt"])


async def texts(number: int, body: dict[str, Any]) -> AsyncIterator[Any]:
    piece = {"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}
    yield {"choices": [{"index": 0, **piece}]}
    yield usage(3, 1)
    yield DONE


def all_at_once(number: int) -> FakeServer:
    """It answers nobody before so many have asked."""
    begun, met = [0], asyncio.Event()

    async def answer(_: int, body: dict[str, Any]) -> AsyncIterator[Any]:
        begun[0] += 1
        if begun[0] == number:
            met.set()
        await asyncio.wait_for(met.wait(), WATCHDOG_S)
        async for part in good(0, body):
            yield part

    return FakeServer(answer)


MANY = ["-n", "100", "--input-len", "2", "--output-len", "2", "--num-warmups", "0"]


def test_as_many_connections_as_the_system_allows() -> None:
    """The limit that a shell sets is no limit: only the hard one is."""
    with running(all_at_once(100)) as server:
        done = bench("serve", "--base-url", server.url, *MANY, open_files=(80, 400))
    assert done.returncode == 0, done.stderr
    assert "100 ok, 0 failed" in done.stdout


def test_too_few_open_files_are_named() -> None:
    with running(FakeServer(good)) as server:
        refused = bench("serve", "--base-url", server.url, *MANY, open_files=(80, 80))
        compared = bench("compare", "-n", "100", open_files=(80, 80))
        advised = bench("serve", "--base-url", server.url, *MANY, "-c", "16", open_files=(80, 80))
    for done in (refused, compared):
        assert (done.returncode, done.stdout) == (5, "")
        assert "at once: want" in done.stderr and "open files, this process may have 80 (ulimit -Hn)" in done.stderr
    assert "--max-concurrency 16" in refused.stderr
    assert "100 ok, 0 failed" in advised.stdout, advised.stderr
    # At a rate nobody knows before how many there will be; here all of them, since none is answered.
    with running(all_at_once(100)) as server:
        late = bench(
            "serve", "--base-url", server.url, *MANY, "-r", "500", "--timeout", "3", "--json", open_files=(80, 80)
        )
    assert late.returncode == 1
    told = {one["kind"]: one["first"] for one in json.loads(late.stdout)["results"]["summary"]["errors_by_kind"]}
    assert told["open_files"] == "this client may have 80 open files (ulimit -n): lower --max-concurrency"


def test_failed_requests_end_it_with_1() -> None:
    """S60: what failed is counted, and no zero stands for it."""
    with running(FakeServer(every_second)) as server:
        done = bench("serve", "--base-url", server.url, *SMALL, "-c", "1")
        empty = bench("serve", "--base-url", server.url, *SMALL, "--output-len", "1", "--num-warmups", "0")
    assert done.returncode == 1
    assert "2 ok, 2 failed" in done.stdout
    assert "2 x event" in done.stdout
    assert "2 of 4 requests failed; event: it died" in done.stderr
    assert empty.returncode == 1
    assert "n/a" in empty.stdout  # one token has neither TPOT nor ITL


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--base-url", "http://127.0.0.1:1"], 3, "nobody answers"),
        (["--base-url", "nonsense"], 2, "expected http://"),
        (["--name", "nobody-here"], 3, "not running"),
        (["--find-rate"], 2, "needs an objective"),
        (["--find-rate", "--goodput", "ttft:5", "-r", "3"], 2, "chooses the rates"),
        (["--find-rate", "--goodput", "ttft:5", "-c", "3"], 2, "what waits in the client"),
        (["--find-rate", "--goodput", "ttft:5", "-w", "mixed"], 2, "new at every rate"),
        (["--goodput", "fast"], 2, "expected ttft:MS"),
        (["--output", "/nowhere/at/all"], 2, "directory that can be written"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = bench("serve", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-w", "other"], "expected one of random"),
        (["-w", "jsonl"], "needs --dataset"),
        (["--request-rate", "0"], "expected more than 0"),
        (["--request-rate", "nan"], "expected more than 0"),
        (["--arrivals", "never", "-r", "1"], "expected one of poisson"),
    ],
)
def test_what_is_no_workload(arguments: list[str], says: str) -> None:
    with running(FakeServer(good)) as server:
        done = bench("serve", "--base-url", server.url, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_options_before_a_sub_command_are_refused() -> None:
    done = bench("--seed", "3", "serve")
    assert done.returncode == 2
    assert "--seed before serve" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-w", "jsonl"], "expected some of mixed"),
        (["--url", "x"], "expected NAME=http"),
        (["--request-rate", "-1"], "expected more than 0"),
        (["-o", "/nowhere/at/all"], "can be written"),
        (["--", "--chunk-tokens", "3"], "--chunk-tokens after --"),
        (["--", "--name=x"], "--name after --"),
        (["--", "--prefill", "2"], "before the --"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_starts(arguments: list[str], says: str) -> None:
    done = bench("compare", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_the_same_name_twice_is_refused() -> None:
    with running(FakeServer(good)) as server:
        done = bench("compare", "--url", f"colocated={server.url}")
    assert done.returncode == 2
    assert "that name is taken" in done.stderr


def test_the_highest_rate(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    with running(FakeServer(good)) as server:
        done = bench(
            "serve", "--base-url", server.url, *SMALL, "--find-rate", "--goodput", "e2el:60000", "-o", str(file)
        )
    assert done.returncode == 0, done.stderr
    assert "all at once" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    document = results.load(file)
    assert document["kind"] == "sweep"
    assert document["results"]["best_rate_per_s"] > 0


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, NotFoundError),
        ("", IncompatibleError),
        ("[]", IncompatibleError),
        ("{}", IncompatibleError),
        ('{"schema": "pdctl-bench-0"}', IncompatibleError),
        ('{"schema": "pdctl-bench-1", "kind": "x", "results": {}}', IncompatibleError),
        ('{"schema": "pdctl-bench-1", "kind": "serve"}', IncompatibleError),
        ("[" * 100_000, IncompatibleError),
        ("\xff\x00", IncompatibleError),
    ],
)
def test_a_file_that_holds_no_results(tmp_path: Path, content: str | None, error: type[Exception]) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(error, match=str(file)):
        results.load(file)


def test_results_are_written_whole_or_not(tmp_path: Path) -> None:
    document = results.document("serve", {}, {"samples": []}, describe())
    results.save(document, tmp_path / "a.json")
    assert results.load(tmp_path / "a.json") == document
    with pytest.raises(UsageError, match="--output"):
        results.save(document, tmp_path / "missing" / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
