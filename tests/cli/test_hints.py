"""The command to run next names the cluster it is about: one place makes such lines, and no text spells one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli import options
from pdctl.cli.main import app
from pdctl.core.cluster import advice, command
from pdctl.transport.errors import NoRoomError, NotFoundError, OtherSegmentError

Cluster = Any

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for layer in ("cli", "core", "transport") for path in (ROOT / layer).rglob("*.py"))
# Commands about one cluster. `models`, `bench` without one, `completions` and --help are the same everywhere.
OF_A_CLUSTER = "up|generate|status|inspect|logs|scale|drain|restart|down|ls|gc"
SPELT = re.compile(rf"\bpdctl (?:{OF_A_CLUSTER})\b(?! --help)")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """All strings of a module that are no docstrings, with those inside f-strings."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_spells_a_command_for_the_default_cluster(path: Path) -> None:
    assert [(line, text) for line, text in texts(path) if SPELT.search(text)] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name == "transport"], ids=lambda p: p.stem)
def test_the_transport_knows_no_command(path: Path) -> None:
    commands = re.compile(rf"\bpdctl (?:{OF_A_CLUSTER}|models|bench)\b|\btry: ")
    assert [(line, text) for line, text in texts(path) if commands.search(text)] == []


@pytest.mark.parametrize(
    "line", ['hint = "pdctl status"', 'f"{x}; pdctl down && pdctl up"', '"see pdctl logs of it"']
)
def test_spelt_commands_are_seen(line: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f'"""pdctl up"""\nx = 1\n{line}\n')
    assert [number for number, text in texts(module) if SPELT.search(text)] == [3]
    assert not SPELT.search("pdctl models pull") and not SPELT.search("pdctl up --help")


def test_an_error_of_the_transport_gets_its_command_from_the_cluster() -> None:
    here = Path("/s")
    room = NoRoomError("full", fitting_blocks=77)
    assert advice(room, "two", here) == "pdctl up --kv-blocks 77 --name two --state-dir /s"
    assert "pdctl" not in str(advice(NoRoomError("full", fitting_blocks=1), "two", here))
    assert advice(OtherSegmentError("other"), "two", here) == (
        "pdctl down --name two --state-dir /s; pdctl up --name two --state-dir /s"
    )
    assert advice(NotFoundError("gone"), "two", here) is None
    assert advice(NotFoundError("gone", hint="this"), "two", here) == "this"


def test_what_is_tried_next_is_about_the_cluster_that_was_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of another layout: both commands name this cluster."""
    from pdctl.transport.layout import H

    monkeypatch.setattr(options, "_concerned", None)
    cluster.run()
    cluster.segment.words[H.VERSION] += 1
    ended = CliRunner().invoke(app, ["status", "--name", cluster.name, "--state-dir", str(cluster.state_dir)])
    cluster.segment.words[H.VERSION] -= 1
    assert isinstance(ended.exception, OtherSegmentError) and ended.exception.hint is None
    down, up = (command(verb, cluster.name, cluster.state_dir) for verb in ("down", "up"))
    assert options.hint_of(ended.exception) == f"{down}; {up}"
