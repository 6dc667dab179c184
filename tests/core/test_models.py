"""Finding models by what the user wrote, and the cache's list: without torch and without a network."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from model_files import CONFIG, make_model, shard_model

from pdctl.cli import models as cli_models
from pdctl.core import models
from pdctl.transport.errors import NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("cache")

HOLD_S = 60  # of helpers that wait to be ended; a watchdog, not an expectation


def test_import_is_light() -> None:
    code = (
        "import sys, pdctl.core.checkpoint, pdctl.core.models, pdctl.core.pull, pdctl.cli.models\n"
        "print({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HOLD_S)
    assert (done.returncode, done.stdout) == (0, "set()\n")


def test_resolve_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "my model")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(path), f"{path}/", "my model", "./my model//", "~/my model", "link", "link/", "."):
        monkeypatch.chdir(path if text == "." else tmp_path)
        found = models.resolve(text)
        assert (found.path, found.name) == (path, "my model")
        assert found.config.num_layers == 2


def test_an_existing_directory_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/name").path == path


@pytest.mark.parametrize(
    "text",
    [
        "/no/such",
        "./no",
        "../no",
        "~/no",
        "a/b/c",
        "no/",
        "",
        "nope",
        "~nobodyatall/x",
        "\0",
        "/a\0b",
        "/" + "a" * 300,
    ],
)
def test_resolve_refuses(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        models.resolve(text)
    assert text.replace("\0", "\\x00") in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["smollm", "SmolLM2", "smolm2", "smollm2-135m-instruct", "SmolLM2-135M"])
def test_a_misspelt_name_of_the_embedded_model(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.resolve(text)
    assert caught.value.hint == "did you mean --model smollm2?"


@pytest.mark.parametrize("text", ["models/tinny-llama", "./models/tinny-llama", "models/tinny-llama/"])
def test_a_mistyped_path_is_no_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is asked for it: the directory that it begins with is here."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "models" / "tiny-llama")
    with pytest.raises(UsageError) as caught:
        models.resolve(text)
    assert caught.value.message.startswith(f"model directory {text} does not exist")
    assert caught.value.hint == "did you mean --model models/tiny-llama/?"
    monkeypatch.chdir(tmp_path / "models")
    with pytest.raises(UsageError) as caught:
        models.resolve("tinny-llama")
    assert caught.value.hint == "did you mean --model tiny-llama/?"


def test_resolve_refuses_a_file(tmp_path: Path) -> None:
    file = make_model(tmp_path / "m") / "model.safetensors"
    with pytest.raises(UsageError, match=r"model\.safetensors is a file; expected a directory"):
        models.resolve(str(file))


def test_resolve_embedded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError) as caught:
        models.resolve("smollm2", allow_pull=False)
    assert caught.value.hint == "pdctl models pull smollm2"
    assert not cache.exists()
    make_model(cache / "models" / "smollm2")
    found = models.resolve("smollm2", allow_pull=False)
    assert (found.path, found.name) == (cache / "models" / "smollm2", "SmolLM2-135M-Instruct")


# ---- Hugging Face ids -------------------------------------------------------------------------------


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def in_hub_environment(code: str, **env: str) -> list[str]:
    """Runs code in a child: the hub's library reads its environment when it is imported."""
    code = "from pdctl.core import models\nfrom pdctl.transport.errors import *\n" + textwrap.dedent(code)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    clean = {key: value for key, value in clean.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, timeout=HOLD_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hub_cache(home: Path) -> Path:
    repository = home / "hub" / "models--org--name"
    make_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def test_offline_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        found = models.resolve("org/name")
        print(found.path, found.name, found.config.num_layers)
        try:
            models.resolve("org/other")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert lines[0] == f"{snapshot} org/name 2"
    assert lines[1].startswith("model org/other: not (completely) in the Hugging Face cache")
    assert "HF_HUB_OFFLINE" in lines[1]
    assert len(lines) == 2


def test_hub_is_not_asked_without_leave(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        print(models.resolve("org/name", allow_pull=False).path)
        try:
            models.resolve("org/other", allow_pull=False)
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert lines[0] == str(snapshot)
    assert "org/other" in lines[1]


def test_hub_out_of_reach_falls_back_on_the_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        def report(phase, done, total):
            if phase != "hub":  # on a machine that is too busy to refuse at once
                print(phase, done, total)
        print(models.resolve("org/name", report).path)
        try:
            models.resolve("org/other")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert lines[:2] == ["cached 0 0", str(snapshot)]  # not without a word
    assert "org/other" in lines[2]
    assert "http://127.0.0.1:9 was not reached: ConnectError" in lines[2]
    assert len(lines) == 3


class HubHandler(http.server.BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download asks for."""

    files: dict[str, bytes]
    served: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        url = self.path.split("?")[0]
        name = url.rpartition("/")[2]
        if url.startswith("/org/name/resolve/") and name in self.files:
            body = self.files[name]
            if self.command == "GET":
                self.served.append(name)
            self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)
        elif url.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": key, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for key, body in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif url.startswith("/api/models/org/name"):
            info = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": key} for key in self.files]}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET  # noqa: N815 (the name http.server calls)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[HubHandler]]]:
    """A hub on a free local port, with the sharded model and files nobody should fetch."""
    source = shard_model(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice", "code.py": b"exit(1)"}
    handler = type("Handler", (HubHandler,), {"files": files, "served": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_download(hub: tuple[str, type[HubHandler]], tmp_path: Path) -> None:
    url, handler = hub
    lines = in_hub_environment(
        """
        found = models.resolve("org/name", lambda phase, done, total: print(phase, done, total))
        print(found.path, found.name)
        try:
            models.resolve("org/absent")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path / "home"),
        HF_ENDPOINT=url,
        HF_HUB_DISABLE_XET="1",
    )
    assert any(line.startswith("download ") for line in lines)
    snapshot = tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert lines[-2] == f"{snapshot} org/name"
    assert "org/absent" in lines[-1]
    assert "no such repository" in lines[-1]
    assert sorted(set(handler.served)) == sorted(file.name for file in (tmp_path / "source").iterdir())


def test_hub_model_is_refused_before_its_weights(hub: tuple[str, type[HubHandler]], tmp_path: Path) -> None:
    url, handler = hub
    handler.files["config.json"] = json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}).encode()
    lines = in_hub_environment(
        """
        try:
            models.resolve("org/name")
        except IncompatibleError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path / "home"),
        HF_ENDPOINT=url,
    )
    assert lines[0].startswith("GPT2LMHeadModel")
    assert "config.json" in handler.served
    assert not any(name.endswith(".safetensors") for name in handler.served)


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """A hub that takes every connection and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_a_hub_that_never_answers(tmp_path: Path, silent_hub: str) -> None:
    """The wait has an end and is told; a cached model is served nevertheless, which is told as well."""
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        models._HUB_DEADLINE_S, models._SILENT_S = 0.5, 0.1
        print(models.resolve("org/name", print).path)
        try:
            models.resolve("org/other", print)
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_ENDPOINT=silent_hub,
    )
    assert lines[:3] == ["hub 0 0", "cached 0 0", str(snapshot)]
    assert lines[3] == "hub 0 0"
    assert lines[4].startswith("model org/other: not (completely) in the Hugging Face cache")
    assert lines[4].endswith(f"and the hub {silent_hub} did not answer within 0.5 s")
    assert len(lines) == 5


# ---- list, remove, and the commands -----------------------------------------------------------------


def test_list_and_remove(cache: Path) -> None:
    assert models.list_models() == []
    path = make_model(cache / "models" / "smollm2")
    damaged = make_model(cache / "models" / "broken", weights=b"12")
    (cache / "models" / "stray file").write_text("")
    listed = {model.name: model for model in models.list_models()}
    assert set(listed) == {"broken", "smollm2"}
    assert (listed["smollm2"].complete, listed["broken"].complete) == (True, False)
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert listed["smollm2"].size_bytes == size_bytes
    assert models.remove("smollm2") == size_bytes
    assert not path.exists()
    assert damaged.exists()
    with pytest.raises(NotFoundError, match="model smollm2 is not in"):
        models.remove("smollm2")


def test_remove_takes_what_a_killed_pull_left(cache: Path) -> None:
    left = cache / "models" / ".smollm2.tmp-abcd"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"xyz")
    assert models.remove("smollm2") == 3
    assert models.list_models() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\nb", ".smollm2.lock", "-x"])
def test_remove_takes_names_only(name: str, cache: Path) -> None:
    make_model(cache / "models" / "smollm2")
    with pytest.raises(UsageError) as caught:
        models.remove(name)
    assert repr(name) in caught.value.message
    assert (cache / "models" / "smollm2").exists()


def run(*arguments: str) -> tuple[str, str, BaseException | None]:
    result = typer.testing.CliRunner().invoke(cli_models.app, arguments)
    error = None if isinstance(result.exception, SystemExit) else result.exception
    return result.stdout, result.stderr, error


def test_command_list(cache: Path) -> None:
    out, err, _ = run("list")
    assert (out, "pdctl models pull" in err) == ("", True)
    assert json.loads(run("list", "--json")[0]) == {"models": []}
    path = make_model(cache / "models" / "smollm2")
    (row,) = json.loads(run("list", "--json")[0])["models"]
    assert (row["name"], row["path"], row["complete"]) == ("smollm2", str(path), True)
    assert row["size_bytes"] > 0
    header, line = run("list")[0].splitlines()
    assert header.split() == ["NAME", "SIZE", "COMPLETE", "PATH"]
    assert line.split()[0] == "smollm2"
    assert line.endswith(str(path))


def test_command_rm(cache: Path) -> None:
    make_model(cache / "models" / "smollm2")
    assert run("rm", "smollm2")[0].startswith("Removed smollm2 (")
    assert isinstance(run("rm", "smollm2")[2], NotFoundError)
