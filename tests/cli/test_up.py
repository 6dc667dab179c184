"""What `pdctl up` decides and says before anything starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import make_model
from typer.testing import CliRunner

from pdctl.cli import up
from pdctl.cli.main import app
from pdctl.cli.up import _Deadline, _spec, _Stages, exposure_of
from pdctl.core.config import ClusterSpec
from pdctl.core.keys import ApiKey
from pdctl.core.models import resolve
from pdctl.core.weights.fingerprint import fingerprint, model_files
from pdctl.core.weights.generation import SamplingDefaults
from pdctl.transport import machine, names
from pdctl.transport.errors import CapacityError, DeadlineError, NotFoundError
from pdctl.transport.machine import CpuShare


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.168.0.7", None, True),
        ("llm.example", None, True),
        ("0.0.0.0", ApiKey("key"), False),
    ],
)
def test_who_serves_everybody_is_warned(host: str, key: ApiKey | None, warned: bool) -> None:
    spec = ClusterSpec(
        name="c",
        state_dir=Path("/tmp/c"),
        model_path=Path("/models/tiny"),
        model_name="tiny",
        fingerprint=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=9,
        eos_token_ids=(),
        host=host,
        api_key=key,
    )
    warning = exposure_of(spec)
    assert (warning is not None) is warned
    assert warning is None or (f"--host {host}" in warning and "--api-key-file" in warning)


def test_what_the_model_asks_for_is_decided_once_and_what_is_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m")
    asked = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.3, "num_beams": 4, "min_p": "some"}
    (path / "generation_config.json").write_text(json.dumps({**asked, "eos_token_id": [2, 99]}))
    files = model_files(path)
    spec = _spec(
        resolve(str(path)),
        files,
        name="c",
        state_dir=tmp_path / "state",
        dtype="float32",
        kv_gib=None,
        kv_blocks=8,
        max_context=None,
        threads=1,
    )
    assert spec.sampling == SamplingDefaults(temperature=0.0, repetition_penalty=1.3)
    assert spec.eos_token_ids == (2,)
    assert (spec.model_files, spec.fingerprint) == (files, fingerprint(files))
    said = capsys.readouterr().err
    for words in (
        'min_p "some" is ignored: expected a number from 0 to 1',
        "temperature 0.6 is ignored: do_sample is false",
        "not supported, and not followed: num_beams 4",
        "eos_token_id 99 is ignored: the vocabulary has ids 0 to 31",
    ):
        assert f"generation_config.json: {words}" in said


# --- the deadline ------------------------------------------------------------------------------------------


def test_a_wait_that_can_be_interrupted_ends_with_what_is_under_way() -> None:
    read, write = os.pipe()
    try:
        words = r"not up after 0\.05 s; under way: reading the model x"
        with pytest.raises(DeadlineError, match=words) as caught, _Deadline(0.05) as deadline:
            deadline.stage = "reading the model x"
            os.read(read, 1)
        assert caught.value.exit_code == 6
        assert "--timeout 0.1" in (caught.value.hint or "")
    finally:
        os.close(read)
        os.close(write)


def test_what_ends_in_time_is_not_disturbed() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with _Deadline(3600) as deadline:
        assert signal.getsignal(signal.SIGALRM) != before
        deadline.stop()
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_model_that_arrives_does_not_run_out_of_time() -> None:
    """Each report of progress starts the time anew."""
    told: list[tuple[str, int, int]] = []
    with _Deadline(3600) as deadline:
        report = deadline.restarted_by(lambda phase, done, total: told.append((phase, done, total)))
        before = deadline._at
        report("download", 1, 2)
        assert deadline._at > before and told == [("download", 1, 2)]


def test_a_wait_that_hears_no_signal_ends_as_well() -> None:
    """As on a file of a server that does not answer: the process ends, and what it started is taken back before."""
    code = (
        "import ctypes, sys\n"
        "from pdctl.cli import up\n"
        "up._NOTICE_S = 0.05\n"
        "libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()\n"
        "with up._Deadline(0.05) as deadline:\n"
        "    deadline.stage, deadline.abandon = 'reading the model y', lambda: print('taken back', flush=True)\n"
        "    libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)  # never comes back\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (6, "taken back\n"), done
    assert done.stderr.startswith("pdctl: not up after 0.05 s; under way: reading the model y\n  try: --timeout")


def test_stages_under_way_are_named() -> None:
    with _Stages() as stages:
        stages.show({"event": "stage", "name": "segment", "state": "start", "detail": "x"})
        assert stages.under_way() == "segment"
        stages.show({"event": "stage", "name": "segment", "state": "done", "detail": "9 MiB"})
        stages.show({"event": "stage", "name": "router", "state": "start"})
        stages.show({"event": "stage", "name": "weights", "state": "start"})
        stages.show({"event": "progress", "name": "weights", "done": 3, "total": 5})
        assert stages.under_way() == "router, weights (3 of 5)"
        stages.show({"event": "stage", "name": "router", "state": "done"})
        assert stages.under_way() == "weights (3 of 5)"


# --- the machine -------------------------------------------------------------------------------------------


def test_more_threads_than_cores_are_warned_of(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota bounds the threads; who asks for more gets them, with a word."""
    started: list[ClusterSpec] = []
    monkeypatch.setattr(up, "_supervise", lambda spec, **_: started.append(spec))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cpu_share", lambda *_, **__: CpuShare(num_cores=64, quota=2.5))
    place = ["--state-dir", str(tmp_path / "s"), "--name", f"quota-{os.getpid()}", "--kv-blocks", "64"]
    given = ["up", "--model", str(tiny_dir), "--max-context", "512", *place]
    quiet, loud = CliRunner().invoke(app, given), CliRunner().invoke(app, [*given, "--threads", "64"])
    assert (quiet.exit_code, loud.exit_code) == (0, 0), (quiet.exception, loud.exception)
    assert [spec.threads_prefill for spec in started] == [2, 64]
    assert "quota" not in quiet.stderr
    assert "64 threads for prefill, but 64 cores, with a CPU quota of 2.5" in loud.stderr


@pytest.mark.parametrize(
    "command", [["down"], ["ls"], ["status"], ["gc"], ["generate", "x"], ["up"]], ids=lambda c: c[0]
)
def test_without_shared_memory(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """In a container without /dev/shm: one line with the remedy from whoever needs it; the others work."""
    for module in (names, machine):
        monkeypatch.setattr(module, "SHM_DIR", tmp_path / "none")
    place = ["--state-dir", str(tmp_path / "s")]
    if command[0] not in ("ls", "gc"):
        place += ["--name", f"no-shm-{os.getpid()}"]
    if command[0] == "up":
        command = ["up", "--model", str(tiny_dir), "--max-context", "512"]
    ended = CliRunner().invoke(app, [*command, *place])
    if command[0] in ("down", "ls", "gc"):
        assert ended.exit_code == 0, ended.exception
    elif command[0] == "up":
        assert isinstance(ended.exception, CapacityError) and "mount -t tmpfs" in (ended.exception.hint or "")
        assert f"{tmp_path / 'none'}: No such file" in ended.exception.message
    else:
        assert isinstance(ended.exception, NotFoundError) and "not running" in ended.exception.message


def test_a_file_that_never_comes_has_a_deadline(tmp_path: Path) -> None:
    """A FIFO that nobody writes into, as the key's file."""
    os.mkfifo(tmp_path / "key", 0o600)
    given = ["up", "--model", "/nowhere", "--state-dir", str(tmp_path / "s"), "--timeout", "0.2"]
    ended = CliRunner().invoke(app, [*given, "--api-key-file", str(tmp_path / "key")])
    assert isinstance(ended.exception, DeadlineError)
    assert f"under way: reading the API key of {tmp_path / 'key'}" in ended.exception.message
