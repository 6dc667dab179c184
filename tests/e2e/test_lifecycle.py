"""From `up` to `down` and everything that may happen between: what runs is known, what ended leaves nothing.

Tests of one running cluster share it; each leaves it serving.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.core import cluster as clusters
from pdctl.transport.layout import LOGPROB_RING, DType, R
from pdctl.transport.names import segments_of
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, take_snapshot

pytestmark = pytest.mark.e2e

DEADLINE_S = 120
OUTPUT_TOKENS = 400


def options(model: Path | str, *more: str) -> list[str]:
    small = ["--kv-blocks", "64", "--threads", "1", "--max-context", "512", "--dtype", "float32"]
    return ["--model", str(model), "--port", "0", *small, *more]


def named(start: Any) -> Any:
    """A cluster that was not started: its name, and taken down at the end all the same."""
    return start("--dtype", "none", expect_up=False)


def command(cluster: Any, *arguments: str) -> list[str]:
    place = ["--name", cluster.name, "--state-dir", str(cluster.state_dir)]
    return [sys.executable, "-m", "pdctl.cli", *arguments, *place]


def spawn(cluster: Any, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(cluster, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err.decode()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not in {timeout_s} s")


def processes(cluster: Any) -> dict[str, int]:
    """PIDs of a cluster's supervisor, router, zygote and daemons, by the names that `ps` shows."""
    found: dict[str, int] = {}
    mark = f"{cluster.state_dir / cluster.name}/".encode()
    state = clusters.read_state(cluster.state_dir, cluster.name)
    if state is not None and is_alive(state.supervisor_pid):
        found["pdctl-supervisor"] = state.supervisor_pid
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark in (entry / "cmdline").read_bytes() and is_alive(int(entry.name)):
                    found[(entry / "comm").read_text().strip()] = int(entry.name)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return process_state(pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def kill_all(cluster: Any) -> None:
    """kill -9 everything, the supervisor first."""
    pids = processes(cluster)
    assert len(pids) == 5, pids
    for pid in sorted(pids.values(), key=lambda pid: pid != pids["pdctl-supervisor"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids.values())), "the end of all processes")


def shm_bytes(cluster: Any) -> int:
    return sum(segment.path.stat().st_size for segment in segments_of(cluster.name))


def assert_serves(cluster: Any) -> None:
    assert cluster.complete("hello", 4)["usage"]["completion_tokens"] == 4


def assert_clean(cluster: Any) -> None:
    cluster.assert_clean()
    assert not clusters.is_locked(cluster.state_dir, cluster.name)


def assert_gone(pids: dict[str, int]) -> None:
    """None of them runs; the supervisor has collected its children, and itself waits for init at most."""
    states = {name: process_state(pid) for name, pid in pids.items()}
    assert states.pop("pdctl-supervisor") in ("", "Z", "X")
    assert set(states.values()) == {""}, states


def status_of(url: str, body: bytes | None = None) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


# --- one cycle ---------------------------------------------------------------------------------------------


def test_ready_is_told_when_it_is_true_and_nothing_is_open_to_others(
    start: Any, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """S38, S57: 503 while loading, 200 from the moment that `up` returns; private under any umask."""
    cluster = named(start)
    cluster.state_dir = tmp_path_factory.mktemp("d") / "e" / "r"
    up = spawn(cluster, "up", *options(tiny_dir), umask=0)
    state = wait_for(lambda: clusters.read_state(cluster.state_dir, cluster.name), "state.json")
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    health, completions = [], []
    while up.poll() is None:
        health.append(status_of(state.url + "/health/ready"))
        completions.append(status_of(state.url + "/v1/completions", body))
        if health[-1] == completions[-1] == 200:
            break
    code, out, err = ended(up)
    assert (code, out) == (0, b""), err
    assert status_of(state.url + "/v1/completions", body) == 200
    for statuses in (health, completions):
        assert statuses[0] == 503
        assert statuses == sorted(statuses, reverse=True)
        assert set(statuses) <= {200, 503}
    assert cluster.get("/health") == cluster.get("/health/ready") == 200

    result = cluster.cli("generate", "hello", "--max-tokens", "3")
    assert result.code == 0, result.err
    directory = cluster.state_dir
    assert directory.parent.stat().st_mode & 0o777 == 0o700
    for path in [directory, *directory.rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISSOCK(mode):
            assert mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    segment = cluster.state.segment_name
    assert segment.path.stat().st_mode & 0o777 == 0o600
    pids = processes(cluster)
    assert len(pids) == 5
    address = address_of(state.url)
    following = spawn(cluster, "logs", "--follow")
    assert following.stdout is not None and following.stdout.readline()

    cluster.down()
    code, out, err = ended(following)
    assert (code, err) == (0, f"cluster {cluster.name!r} does not run: its logs end here\n")
    assert b"daemon stopped" in out
    assert_clean(cluster)
    assert_gone(pids)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)
    left = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    logs = {"supervisor", "router", "zygote", "prefill-0", "decode-0"}
    assert left == {f"logs/{cluster.name}/{process}.log" for process in logs}
    assert "ready" in cluster.cli("logs", "decode-0").out
    again = cluster.cli("down")
    assert again.code == 0
    assert "nothing running" in again.err


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_down_and_up_again_and_again(start: Any, tiny_dir: Path, tmp_path: Path) -> None:
    """S33, S37: without a pause, by every way to write a directory, every other `up` while `down` is under way."""
    spaced = tmp_path / "a model" / "of mine"
    shutil.copytree(tiny_dir, spaced)
    link = tmp_path / "link"
    link.symlink_to(tiny_dir)
    forms: list[tuple[str, Path]] = [
        (f"./{tiny_dir.name}", tiny_dir.parent),
        (str(spaced), Path("/")),
        (f"{tiny_dir}/", Path("/")),
        (str(link), tmp_path),
        ("..", _subdirectory(tiny_dir, tmp_path)),
    ]
    cluster = named(start)
    seen: set[int] = set()
    for turn, (model, cwd) in enumerate(forms):
        down = None
        if turn:
            before = processes(cluster)
            if turn % 2 == 1:
                down = spawn(cluster, "down")
                # Not before `down` has told the supervisor: until then the cluster runs, and `up` says so.
                wait_for(lambda: not _runs(cluster), "the beginning of down")
            else:
                cluster.down()
                assert_clean(cluster)
                assert_gone(before)
            seen |= set(before.values())
        result = cluster.cli("up", *options(model), cwd=cwd)
        assert result.code == 0, f"turn {turn}: {result.err}"
        if down is not None:
            code, _, err = ended(down)
            assert code == 0, err
        generated = cluster.cli("generate", "hello", "--max-tokens", "2", cwd=Path("/"))
        assert generated.code == 0, f"turn {turn}: {generated.err}"
        assert len(processes(cluster)) == 5
        assert len(segments_of(cluster.name)) == 1
    assert not seen & set(processes(cluster).values())


def _subdirectory(tiny_dir: Path, tmp_path: Path) -> Path:
    inner = tmp_path / "copy" / "inner"
    shutil.copytree(tiny_dir, inner.parent)
    inner.mkdir()
    return inner


def _runs(cluster: Any) -> bool:
    state = clusters.read_state(cluster.state_dir, cluster.name)
    return state is not None and state.phase == "running"


# --- start that does not come to its end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "after_s", "code"),
    [
        (signal.SIGINT, 0.2, 130),
        (signal.SIGINT, 1.0, 130),
        (signal.SIGINT, 2.0, 130),
        (signal.SIGTERM, 1.5, 143),
        (signal.SIGHUP, 2.5, 129),
    ],
)
def test_an_interrupted_up_takes_everything_back(
    start: Any, tiny_dir: Path, number: signal.Signals, after_s: float, code: int
) -> None:
    """S36. A machine so fast that it is up by then has a running cluster."""
    cluster = named(start)
    up = spawn(cluster, "up", *options(tiny_dir), start_new_session=True)
    time.sleep(after_s)
    up.send_signal(number)
    found, _, err = ended(up)
    if found == 0:
        assert_serves(cluster)
        return
    # Before Python runs our first line, the signal ends it as it ends any program.
    assert found in (code, -number), err
    if found == code:
        assert "Traceback" not in err
    assert_clean(cluster)


@pytest.mark.parametrize("module", ["pdctl.cli.main", "typer", "pdctl.cli.up"])
def test_ctrl_c_while_modules_load_is_quiet(module: str) -> None:
    """S36: in the first tenths of a second."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['pdctl', 'up']\n"
        "from pdctl.cli.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_port_that_another_program_has(start: Any, tiny_dir: Path) -> None:
    """S30 a."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        cluster = named(start)
        result = cluster.cli("up", *options(tiny_dir), "--port", port)
        assert result.code == 7
        assert f"port {port} on 127.0.0.1: another program" in result.err
        assert f"pid {server.pid}" in result.err
        assert "python" in result.err
        assert_clean(cluster)
        assert server.poll() is None
    finally:
        server.kill()
        server.communicate(timeout=DEADLINE_S)


# --- kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", ["", "{", "no json", "[]", '{"schema": 0}', "\0\xff"], ids=repr)
def test_a_state_file_of_garbage_is_no_obstacle(start: Any, garbage: str) -> None:
    """S31: what a crash or another version left; nothing runs."""
    cluster = named(start)
    directory = cluster.state_dir / cluster.name
    directory.mkdir(mode=0o700, parents=True)
    (directory / "lock").write_text("4194304 1\n")
    (directory / "state.json").write_text(garbage)
    for arguments in (["status"], ["generate", "hello"], ["inspect", "shm"])[: 1 if garbage else 3]:
        result = cluster.cli(*arguments)
        assert result.code == 3, result
        assert "crashed" in result.err
        assert "Traceback" not in result.err
    result = cluster.cli("down")
    assert result.code == 0, result.err
    assert "had crashed" in result.err
    assert_clean(cluster)


# --- one cluster for all that it survives ------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(start_shared: Any, tiny_dir: Path) -> Any:
    return start_shared(*options(tiny_dir, "--local-prefill-tokens", "0", "--chunk-tokens", "8"))


@pytest.fixture(autouse=True)
def _still_well(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "shared" in request.fixturenames:
        assert_serves(request.getfixturevalue("shared"))


def _long_prompt(cluster: Any, beginning: str, letters: int) -> str:
    """A prompt whose greedy answer does not end by itself before OUTPUT_TOKENS, or as far as there is room."""
    for number in range(50):
        prompt = f"{beginning}{number} ".ljust(letters, "x")
        body = {"prompt": prompt, "max_tokens": min(OUTPUT_TOKENS, 500 - letters), "temperature": 0}
        status, answer = cluster.post("/v1/completions", body)
        assert status == 200, answer
        if answer["choices"][0]["finish_reason"] == "length":
            return prompt
    raise AssertionError("every answer ends early")


@pytest.fixture(scope="module")
def prompt(shared: Any) -> str:
    return _long_prompt(shared, "A", 10)


def _generate(prompt: str) -> list[str]:
    return ["generate", prompt, "--raw", "--max-tokens", str(OUTPUT_TOKENS)]


def _rows(cluster: Any) -> list[int]:
    return take_snapshot(cluster.state.segment_name).segment.rows.states()


def test_up_of_a_running_cluster_says_so_and_disturbs_nothing(shared: Any, tiny_dir: Path, prompt: str) -> None:
    """S30 b."""
    expected = shared.cli(*_generate(prompt)).out
    before, state = processes(shared), shared.state
    stream = spawn(shared, *_generate(prompt))
    wait_for(lambda: RowState.DECODING in _rows(shared), "a stream")
    result = shared.cli("up", *options(tiny_dir))
    assert result.code == 7
    assert str(state.supervisor_pid) in result.err
    assert state.url in result.err
    code, out, err = ended(stream)
    assert (code, out.decode(), err) == (0, expected, "")
    assert (processes(shared), shared.state) == (before, state)


def test_a_killed_decode_daemon_is_not_seen_in_the_text(shared: Any, prompt: str) -> None:
    expected = shared.cli(*_generate(prompt)).out
    assert len(expected) > 100
    pid = shared.pid(Role.DECODE)
    stream = spawn(shared, *_generate(prompt))
    wait_for(lambda: _in_the_middle(shared), "a stream under way")
    os.kill(pid, signal.SIGKILL)
    assert stream.poll() is None
    code, out, err = ended(stream)
    assert (code, out.decode(), err) == (0, expected, "")
    assert shared.pid(Role.DECODE) != pid


def test_sampled_answers_and_their_logprobs_are_whole_after_a_kill(shared: Any, prompt: str) -> None:
    """More tokens than a row keeps log-probabilities of: they went out while the answer was made."""
    body = {
        "prompt": prompt,
        "n": 2,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": 7,
        "frequency_penalty": 0.2,
        "logprobs": 2,
    }
    status, expected = shared.post("/v1/completions", body)
    assert status == 200, expected
    assert [len(choice["logprobs"]["tokens"]) for choice in expected["choices"]] == [OUTPUT_TOKENS] * 2
    assert OUTPUT_TOKENS > LOGPROB_RING
    assert expected["choices"][0]["text"] != expected["choices"][1]["text"]
    pid = shared.pid(Role.DECODE)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(shared.post, "/v1/completions", body)
        wait_for(lambda: _in_the_middle(shared), "an answer under way")
        os.kill(pid, signal.SIGKILL)
        status, found = answer.result()
    assert (status, found["choices"]) == (200, expected["choices"])


def _in_the_middle(cluster: Any) -> bool:
    rows = take_snapshot(cluster.state.segment_name).segment.rows
    return any(
        state == RowState.DECODING and rows.get(row, R.NUM_TOKENS) > rows.get(row, R.NUM_PROMPT) + 5
        for row, state in enumerate(rows.states())
    )


def test_a_killed_prefill_daemon_is_not_seen_in_the_text(shared: Any) -> None:
    hits = 0
    for turn in range(20):
        text = f"{turn} ".ljust(440, chr(ord("a") + turn))
        arguments = ["generate", text, "--raw", "--max-tokens", "16"]
        pid = shared.pid(Role.PREFILL)
        stream = spawn(shared, *arguments)
        wait_for(lambda stream=stream: _rows_moved(shared, stream), "a row")
        hit = RowState.PREFILLING in _rows(shared)
        os.kill(pid, signal.SIGKILL)
        code, out, err = ended(stream)
        assert (code, err) == (0, "")
        assert out.decode() == shared.cli(*arguments).out
        wait_for(lambda pid=pid: shared.slots(Role.PREFILL) and shared.pid(Role.PREFILL) != pid, "its successor")
        hits += hit
        if hits:
            break
    assert hits, "no prefill was under way at any kill"


def _rows_moved(cluster: Any, stream: subprocess.Popen[bytes]) -> bool:
    return bool({RowState.PREFILLING, RowState.DECODING} & set(_rows(cluster))) or stream.poll() is not None


def test_a_killed_router_comes_back_on_its_port(shared: Any) -> None:
    """S32."""
    before, url = processes(shared), shared.state.url
    os.kill(before["pdctl-router"], signal.SIGKILL)
    wait_for(lambda: processes(shared).get("pdctl-router", 0) not in (0, before["pdctl-router"]), "another router")
    assert_serves(shared)
    assert shared.state.url == url
    after = processes(shared)
    assert {**after, "pdctl-router": 0} == {**before, "pdctl-router": 0}
    assert shared.cli("generate", "hello", "--max-tokens", "2").code == 0


def test_daemons_outlive_the_zygote_and_the_next_one_makes_more(shared: Any) -> None:
    before = processes(shared)
    os.kill(before["pdctl-zygote"], signal.SIGKILL)
    assert_serves(shared)
    assert processes(shared)["pdctl-decode-0"] == before["pdctl-decode-0"]
    # At once, while no zygote can fork: it is made as soon as there is one.
    shared.kill(Role.DECODE)
    assert_serves(shared)
    after = processes(shared)
    assert set(after) == set(before)
    same = {name for name in before if before[name] == after[name]}
    assert same == {"pdctl-supervisor", "pdctl-router", "pdctl-prefill-0"}
    assert len(shared.slots(Role.DECODE)) == 1


def test_who_looks_takes_nothing_away(shared: Any) -> None:
    """S20: neither viewers, nor another program's mapping, nor a daemon's end unlink the segment."""
    segment = shared.state.segment_name
    for _ in range(5):
        looked = shared.cli("inspect", "shm")
        assert (looked.code, looked.err) == (0, "")
    look = "import mmap, os, sys; mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)[:8]"
    done = subprocess.run(
        [sys.executable, "-c", look, str(segment.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid = shared.kill(Role.DECODE, signal.SIGTERM)
    wait_for(lambda: not is_alive(pid), "the end of a decode daemon")
    assert segments_of(shared.name) == [segment]
    assert_serves(shared)
    assert segments_of(shared.name) == [segment]
    logs = shared.cli("logs", "--tail", "100000").out
    assert "stopped" in logs
    assert "resource_tracker" not in logs
    assert "Exception ignored" not in logs


def test_a_daemon_made_for_another_segment_refuses(shared: Any, tmp_path: Path) -> None:
    """S07."""
    spec = json.loads(clusters.spec_path(shared.state_dir, shared.name).read_text())
    wrong = {
        "dtype": ("bfloat16", [DType.FLOAT32.label, DType.BFLOAT16.label]),
        "block_tokens": (32, ["16", "32"]),
        "fingerprint": (spec["fingerprint"] ^ 1, [f"{spec['fingerprint']:016x}", f"{spec['fingerprint'] ^ 1:016x}"]),
    }
    before = processes(shared)
    daemons = {}
    for field, (value, _) in wrong.items():
        edited = tmp_path / f"{field}.json"
        edited.write_text(json.dumps({**spec, field: value}))
        arguments = ["decode", "--spec", str(edited), "--segment", shared.state.segment]
        daemons[field] = subprocess.Popen(
            [sys.executable, "-m", "pdctl.core.daemon", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    for field, daemon in daemons.items():
        code, out, err = ended(daemon)
        assert (code, out) == (4, b""), err
        assert f"the segment's {field} is {wrong[field][1][0]}, this daemon's is {wrong[field][1][1]}" in err
        assert len(err.splitlines()) == 1
    assert_serves(shared)
    assert processes(shared) == before


def test_of_several_ups_at_once_one_wins(shared: Any, start: Any, tiny_dir: Path) -> None:
    """And clusters of other names go on beside it, in the same state directory."""
    cluster = named(start)
    cluster.state_dir = shared.state_dir
    others = processes(shared)
    ups = [spawn(cluster, "up", *options(tiny_dir)) for _ in range(3)]
    results = [ended(up) for up in ups]
    codes = sorted(code for code, _, _ in results)
    assert codes == [0, 7, 7], results
    assert all("already" in err for code, _, err in results if code == 7), results
    assert len(processes(cluster)) == 5
    assert_serves(cluster)
    assert_serves(shared)
    assert cluster.state.url != shared.state.url
    cluster.down()
    assert_clean(cluster)
    assert processes(shared) == others


def test_the_same_name_in_another_state_directory_is_another_cluster(shared: Any, tmp_path: Path) -> None:
    elsewhere = type(shared)(shared.name, tmp_path / "elsewhere")
    for arguments, code in ((["status"], 3), (["generate", "hello"], 3), (["down"], 0)):
        result = elsewhere.cli(*arguments)
        assert result.code == code, result
        assert "crashed" not in result.err
    assert len(segments_of(shared.name)) == 1


def test_a_lock_that_does_not_come_free_delays_recovery_and_ends_nothing(shared: Any) -> None:
    pids = processes(shared)
    with shared.state.segment_name.path.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        os.kill(pids["pdctl-prefill-0"], signal.SIGKILL)
        # Longer than anybody waits for the lock.
        wait_for(lambda: "recovery waits" in shared.cli("logs", "supervisor").out, "the supervisor's complaint")
        assert is_alive(pids["pdctl-supervisor"])
    wait_for(lambda: shared.cli("status").code == 0, "recovery")
    assert_serves(shared)


def test_after_a_crash_of_everything(shared: Any, tiny_dir: Path) -> None:
    """S31, S21, S32: the kernel ends the children of a dead supervisor; `up` needs no help to start again.

    Of a state that can be read: test_wrong_input.py, where there is no room for a second segment.
    """
    cluster = shared
    size = shm_bytes(cluster)
    for turn in range(2):
        pids = processes(cluster)
        assert len(pids) == 5, pids
        left = cluster.state.segment
        if turn == 0:
            os.kill(pids["pdctl-supervisor"], signal.SIGKILL)
            wait_for(lambda pids=pids: not any(map(is_alive, pids.values())), "the end of the supervisor's children")
        else:
            kill_all(cluster)
        status = cluster.cli("status")
        assert (status.code, "crashed" in status.err) == (3, True), status
        generated = cluster.cli("generate", "hello")
        assert (generated.code, "crashed" in generated.err) == (3, True), generated
        if turn == 0:
            down = cluster.cli("down")
            assert down.code == 0, down.err
            assert left in down.err
            assert_clean(cluster)
        else:
            (cluster.state_dir / cluster.name / "state.json").write_text('{"schema": 1, "name": "')
        up = cluster.cli("up", *options(tiny_dir))
        assert up.code == 0, up.err
        assert ("stale segment" in up.err and left in up.err) == (turn == 1), up.err
        assert_serves(cluster)
        assert len(segments_of(cluster.name)) == 1
        assert shm_bytes(cluster) == size
