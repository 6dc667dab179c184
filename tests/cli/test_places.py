"""One cluster, and shells that look for it in other places: they find it, say where, and start no second one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli import up
from pdctl.cli.main import app
from pdctl.core import cluster as clusters
from pdctl.core.cluster import command
from pdctl.transport.errors import AlreadyRunningError, NotFoundError
from pdctl.transport.layout import P
from pdctl.transport.segment import Role

Cluster = Any


@pytest.fixture
def elsewhere(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another default state directory than that of the cluster, which runs."""
    cluster.run(dataclasses.replace(cluster.state(), url="http://127.0.0.1:1"))
    cluster.lock.sign()
    monkeypatch.setenv("PDCTL_STATE_DIR", str(tmp_path / "default"))
    return tmp_path / "default"


def run(*arguments: str, name: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--name", name])


def test_a_cluster_is_found_where_it_runs(cluster: Cluster, elsewhere: Path) -> None:
    for arguments in (["status"], ["status", "--json"], ["inspect", "shm"]):
        ended = run(*arguments, name=cluster.name)
        assert ended.exit_code == 0, (arguments, ended.exception)
        said = f"cluster {cluster.name!r}: nothing of it in {elsewhere}; it runs in {cluster.state_dir}\n"
        assert ended.stderr == said
    assert not elsewhere.exists()
    # Nobody answers: but it is asked where it runs, and hints lead there.
    ended = run("generate", "hello", name=cluster.name)
    assert isinstance(ended.exception, NotFoundError)
    assert ended.exception.message == "http://127.0.0.1:1: nobody listens"
    assert ended.exception.hint == command("status", cluster.name, cluster.state_dir)
    for arguments in (["scale", "decode=2"], ["drain", "decode-0"], ["restart"]):
        ended = run(*arguments, name=cluster.name)
        assert str(cluster.state_dir / cluster.name / "control") in str(ended.exception)


def test_a_place_that_was_given_is_meant(cluster: Cluster, elsewhere: Path) -> None:
    """`down --state-dir X` takes nothing down that runs in Y; but it is said that one does."""
    place = ["--state-dir", str(elsewhere)]
    for arguments in (["status"], ["generate", "hello"], ["scale", "decode=2"]):
        ended = run(*arguments, *place, name=cluster.name)
        assert isinstance(ended.exception, NotFoundError)
        assert f"not running in {elsewhere}" in ended.exception.message
        assert f"runs in {cluster.state_dir}" in ended.exception.message
        assert ended.exception.hint == command("status", cluster.name, cluster.state_dir)
    ended = run("down", *place, name=cluster.name)
    assert (ended.exit_code, ended.stderr) == (0, f"cluster {cluster.name!r}: nothing running\n")
    assert clusters.is_locked(cluster.state_dir, cluster.name)


def test_what_is_here_comes_first(cluster: Cluster, elsewhere: Path) -> None:
    """A crashed one of this place is what `down` tidies, whatever runs elsewhere."""
    (elsewhere / cluster.name).mkdir(parents=True, mode=0o700)
    (elsewhere / cluster.name / "lock").touch()
    ended = run("status", name=cluster.name)
    assert isinstance(ended.exception, NotFoundError) and "crashed" in ended.exception.message
    ended = run("down", name=cluster.name)
    assert "had crashed" in ended.stderr
    assert not (elsewhere / cluster.name).exists()
    assert clusters.is_locked(cluster.state_dir, cluster.name)
    assert cluster.path.exists()


def test_no_second_one_is_started_unasked(
    cluster: Cluster, elsewhere: Path, tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(up, "_supervise", lambda spec, **_: started.append(spec))
    options = ["--model", str(tiny_dir), "--kv-blocks", "64", "--max-context", "512"]
    ended = run("up", *options, name=cluster.name)
    assert isinstance(ended.exception, AlreadyRunningError) and not started
    assert str(cluster.state_dir) in ended.exception.message and str(elsewhere) in ended.exception.message
    assert command("status", cluster.name, cluster.state_dir) in (ended.exception.hint or "")
    assert f"--state-dir {elsewhere}" in (ended.exception.hint or "")
    ended = run("up", *options, "--state-dir", str(tmp_path / "given"), name=cluster.name)
    assert ended.exit_code == 0, ended.exception
    assert f"one of this name runs in {cluster.state_dir}; this one is another" in ended.stderr
    assert [spec.state_dir for spec in started] == [tmp_path / "given"]
    # And where it runs already, as before.
    monkeypatch.setenv("PDCTL_STATE_DIR", str(cluster.state_dir))
    ended = run("up", *options, name=cluster.name)
    assert isinstance(ended.exception, AlreadyRunningError) and "already running at" in ended.exception.message
    assert len(started) == 1


def test_a_place_that_nobody_tells_is_said_to_be_unknown(cluster: Cluster, elsewhere: Path) -> None:
    """The supervisor is in another PID namespace, so that its number is none, or a stranger's."""
    slot = cluster.segment.slots(Role.SUPERVISOR)[0]
    words, base = cluster.segment.words, cluster.segment.layout.participant(slot)
    words[base + P.PID] = os.getppid()
    assert clusters.places_in_use(cluster.name) == [None]
    ended = run("status", name=cluster.name)
    assert isinstance(ended.exception, NotFoundError) and "do not tell" in ended.exception.message
    assert ended.exception.hint is None
    ended = run("up", "--model", "/nowhere", name=cluster.name)
    assert isinstance(ended.exception, AlreadyRunningError) and "do not tell" in ended.exception.message
