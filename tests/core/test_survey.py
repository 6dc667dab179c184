"""What `pdctl ls` lists and `pdctl gc` removes: all that is dead, and nothing else."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.cli.tables import clusters_view
from pdctl.core import survey
from pdctl.core.cluster import is_cluster_directory
from pdctl.core.survey import collect, leftovers
from pdctl.transport.errors import AlreadyRunningError
from pdctl.transport.layout import P
from pdctl.transport.names import all_segments, cluster_dir, log_dir
from pdctl.transport.segment import ParticipantState

Cluster = Any


@pytest.fixture(autouse=True)
def _only_ours(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests on this machine may have dead clusters that they still need."""
    monkeypatch.setattr(
        survey, "all_segments", lambda: [one for one in all_segments() if one.cluster == cluster.name]
    )


@pytest.fixture
def dead(cluster: Cluster) -> Iterator[Cluster]:
    """What is left of a cluster when all its processes were killed."""
    cluster.run()
    directory = cluster_dir(cluster.state_dir, cluster.name)
    (directory / "bell-3").touch()
    (directory / "spec.json").write_text("{}")
    logs = log_dir(cluster.state_dir, cluster.name)
    logs.mkdir(parents=True)
    (logs / "decode-0.log").write_text("last words\n")
    (logs / "decode-0.log.1").write_text("earlier words\n")
    for member in (cluster.supervisor, cluster.router, cluster.prefill, cluster.decode):
        member.segment.close()
    cluster.segment.close()
    cluster.lock.release(remove=False)
    yield cluster


def run(cluster: Cluster, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--state-dir", str(cluster.state_dir)])
    assert result.exit_code == 0, result
    return result.output


def everything(cluster: Cluster) -> list[Path]:
    return sorted([*cluster.state_dir.rglob("*"), *(one.path for one in survey.all_segments())])


def test_a_running_cluster_is_listed_and_not_touched(cluster: Cluster) -> None:
    cluster.run()
    (found,) = survey.survey(cluster.state_dir)
    assert (found.name, found.phase, found.state_dir) == (cluster.name, "running", str(cluster.state_dir))
    assert (found.url, found.model, found.supervisor_pid) == ("http://127.0.0.1:8000", "tiny", os.getpid())
    assert found.ready == found.wanted == {"prefill": 1, "decode": 1}
    assert found.uptime_s is not None and 60 < found.uptime_s < 3600
    assert (found.segments, found.segment_bytes) == ((str(cluster.segment_name),), cluster.path.stat().st_size)
    before = everything(cluster)
    assert leftovers(cluster.state_dir, logs=True) == collect(cluster.state_dir, logs=True) == []
    assert everything(cluster) == before


def test_a_cluster_of_another_state_directory_is_foreign_and_not_touched(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run()
    (found,) = survey.survey(tmp_path / "mine")
    assert (found.name, found.phase) == (cluster.name, "foreign")
    # Its supervisor is this process, which has its lock open there.
    assert (found.state_dir, found.url) == (str(cluster.state_dir), "http://127.0.0.1:8000")
    assert collect(tmp_path / "mine", logs=True) == []
    assert cluster.path.exists()
    assert not (tmp_path / "mine").exists()


def test_a_dead_cluster_is_removed_whole_but_its_logs_only_when_asked(dead: Cluster) -> None:
    (found,) = survey.survey(dead.state_dir)
    assert (found.name, found.phase, found.segments) == (dead.name, "crashed", (str(dead.segment_name),))
    before = everything(dead)
    wanted = leftovers(dead.state_dir, logs=False)
    assert [(one.kind, one.path, one.removed) for one in wanted] == [
        ("segment", dead.path, False),
        ("state", cluster_dir(dead.state_dir, dead.name), False),
    ]
    assert everything(dead) == before
    removed = collect(dead.state_dir, logs=False)
    assert [(one.kind, one.num_bytes, one.removed) for one in removed] == [
        (one.kind, one.num_bytes, True) for one in wanted
    ]
    assert min(one.num_bytes for one in removed) > 0
    logs = log_dir(dead.state_dir, dead.name)
    assert everything(dead) == [logs.parent, logs, logs / "decode-0.log", logs / "decode-0.log.1"]
    assert survey.survey(dead.state_dir) == []
    (one,) = collect(dead.state_dir, logs=True)
    assert (one.kind, one.removed, one.num_bytes) == ("logs", True, 25)
    assert everything(dead) == [logs.parent]


def test_only_a_segment_is_left(dead: Cluster, tmp_path: Path) -> None:
    """Its state directory was another one, or was removed by hand."""
    (found,) = survey.survey(tmp_path / "mine")
    assert (found.phase, found.state_dir) == ("crashed", None)
    (one,) = collect(tmp_path / "mine", logs=False)
    assert (one.kind, one.path, one.removed) == ("segment", dead.path, True)
    assert not dead.path.exists()
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_a_process_still_holds_is_kept(dead: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that outlives its supervisor for a moment, or is stopped in the middle of dying."""
    from pdctl.core import cluster as clusters
    from pdctl.transport.segment import Role, Segment

    pid = dead.child(lambda: Segment.open(dead.segment_name).attach(Role.DECODE))
    real = clusters.remove_stale
    monkeypatch.setattr(clusters, "remove_stale", lambda *arguments: real(*arguments, wait_s=0.05))
    kept = collect(dead.state_dir, logs=False)
    segment = next(one for one in kept if one.kind == "segment")
    assert not segment.removed
    assert segment.kept_because is not None and "still holds it" in segment.kept_because
    assert dead.path.exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    dead._children.remove(pid)
    assert [one.removed for one in collect(dead.state_dir, logs=False) if one.kind == "segment"] == [True]


def test_a_directory_of_somebody_else_is_not_emptied(dead: Cluster) -> None:
    """A lock file alone makes no cluster: other programs have them too."""
    project = dead.state_dir / "project"
    project.mkdir()
    for name in ("lock", "thesis.txt"):
        (project / name).write_text("mine")
    assert not is_cluster_directory(project)
    assert is_cluster_directory(cluster_dir(dead.state_dir, dead.name))
    assert {one.cluster for one in collect(dead.state_dir, logs=True)} == {dead.name}
    assert sorted(path.name for path in project.iterdir()) == ["lock", "thesis.txt"]
    for name in ("lock", "thesis.txt"):
        (project / name).unlink()


def test_ls_and_gc_for_people(dead: Cluster) -> None:
    listed = run(dead, "ls")
    assert f"{dead.name} " in listed and "crashed" in listed
    # Folded at 80 columns: the command, with this state directory, is one line of the note.
    assert f"pdctl gc --state-dir {dead.state_dir} removes" in " ".join(listed.split())
    before = everything(dead)
    dry = run(dead, "gc", "--dry-run", "--logs")
    assert everything(dead) == before
    done = run(dead, "gc", "--logs")
    assert done == dry.replace("would remove", "removed").replace("would free", "freed")
    assert f"removed segment {dead.path}, " in done
    assert run(dead, "gc").strip() == "nothing is left of dead clusters"
    assert "no clusters in" in run(dead, "ls")


def test_ls_of_a_running_cluster_fits_80_columns(cluster: Cluster) -> None:
    cluster.run(cluster.state(num_decode=16, model_name="a-model-with-a-rather-long-name"))
    lines = run(cluster, "ls").splitlines()
    assert max(map(len, lines)) <= 80
    assert "http://127.0.0.1:8000" in lines[1] and "1P1/16D" in lines[1] and "1m05s" in lines[1]
    assert [line.rstrip() for line in lines] == lines
    wide = Console(width=110, file=io.StringIO())
    wide.print(clusters_view(survey.survey(cluster.state_dir), wide.width, "pdctl gc"))
    assert "a-model-with-a-rather-long-name" not in lines[1]
    assert "a-model-with-a-rather-long-name" in wide.file.getvalue()  # type: ignore[attr-defined]


def test_logs_say_when_nothing_matches(cluster: Cluster) -> None:
    """On stderr, with grep's exit code; a text that is there is no error."""
    logs = log_dir(cluster.state_dir, "one")
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "router.log").write_text("2026-01-01 00:00:00.000Z I x abc\n")
    place = ["--name", "one", "--state-dir", str(cluster.state_dir)]
    found = CliRunner().invoke(app, ["logs", "--grep", "abc", *place])
    assert (found.exit_code, found.stdout, found.stderr) == (0, "router | 2026-01-01 00:00:00.000Z I x abc\n", "")
    missed = CliRunner().invoke(app, ["logs", "--grep", "abd", *place])
    assert (missed.exit_code, missed.stdout, missed.stderr) == (
        1,
        "",
        "no line of router has 'abd' in this run (with --all: in any)\n",
    )


def test_one_process_for_both_is_listed_as_one(cluster: Cluster) -> None:
    cluster.run(cluster.state(colocated=True, local_prefill_tokens=0))
    listed = json.loads(run(cluster, "ls", "--json"))["clusters"]
    assert [one["colocated"] for one in listed if one["name"] == cluster.name] == [True]
    (line,) = [line for line in run(cluster, "ls").splitlines() if line.startswith(cluster.name[:14])]
    assert " 1PD " in line
    cluster.decode.me.put(P.STATE, ParticipantState.STARTING)
    (line,) = [line for line in run(cluster, "ls").splitlines() if line.startswith(cluster.name[:14])]
    assert " 0/1PD " in line


# --- a model that is served --------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_model_that_is_served_is_not_removed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Nor if the cluster's state directory is another one, as far as its processes tell which."""
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "cache"))
    served, other = (tmp_path / "cache" / "models" / name for name in ("served", "other"))
    for path in (served, other):
        path.mkdir(parents=True)
    (tmp_path / "link").symlink_to(served)
    cluster.run(cluster.state(model_path=tmp_path / "link"))
    monkeypatch.setattr(survey, "state_dir_of_segment", lambda name: cluster.state_dir)
    directory = tmp_path / "mine" if elsewhere else cluster.state_dir
    refused = CliRunner().invoke(app, ["models", "rm", "served", "--state-dir", str(directory)])
    error = refused.exception
    assert isinstance(error, AlreadyRunningError)
    assert error.message == f"{served} is being served by cluster {cluster.name!r} at http://127.0.0.1:8000"
    assert error.hint == f"pdctl down --name {cluster.name} --state-dir {cluster.state_dir}"
    assert served.exists()
    assert "Removed other" in run_in(directory, "models", "rm", "other")
    cluster.lock.release(remove=False)
    cluster.supervisor.segment.close()
    assert "Removed served" in run_in(directory, "models", "rm", "served")


def run_in(directory: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--state-dir", str(directory)])
    assert result.exit_code == 0, result
    return result.output
