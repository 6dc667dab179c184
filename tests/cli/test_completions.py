"""The scripts in completions/ are what typer makes today, and they complete what there is to complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdctl.cli import completions
from pdctl.cli.options import complete_cluster
from pdctl.core.cluster import write_state

DIRECTORY = Path(__file__).parent.parent.parent / "completions"
Cluster = Any


def test_the_scripts_are_not_outdated() -> None:
    """`python -m pdctl.cli.completions completions` renews them."""
    assert {
        file.name: file.read_text() for file in DIRECTORY.iterdir() if file.suffix != ".md"
    } == completions.scripts()


def test_the_generator_writes_all_scripts(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pdctl.cli.completions", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["_pdctl", "pdctl.bash", "pdctl.fish"]


@pytest.mark.parametrize(("shell", "file"), completions.FILES.items())
def test_the_scripts_parse(shell: str, file: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    result = subprocess.run([program, "-n", str(DIRECTORY / file)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def complete(words: str, **environment: str) -> list[str]:
    """What bash is offered after these words, through the script itself."""
    script = (
        'source "$1"; COMP_WORDS=($2); [ "${2: -1}" = " " ] && COMP_WORDS+=(""); '
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _pdctl_completion "$3"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    program = str(Path(sys.executable).parent / "pdctl")
    result = subprocess.run(
        ["bash", "-c", script, "bash", str(DIRECTORY / "pdctl.bash"), words, program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


needs_the_script = pytest.mark.skipif(
    shutil.which("bash") is None or not (Path(sys.executable).parent / "pdctl").exists(),
    reason="needs bash and an installed pdctl",
)


@needs_the_script
def test_commands_are_completed() -> None:
    assert {"up", "down", "status", "inspect"} <= set(complete("pdctl "))
    assert complete("pdctl stat") == ["status"]
    assert "--verify" in complete("pdctl inspect shm --")


@needs_the_script
def test_names_of_clusters_are_completed(cluster: Cluster) -> None:
    cluster.run()
    state_dir = str(cluster.state_dir)
    assert complete("pdctl status --name ", PDCTL_STATE_DIR=state_dir) == [cluster.name]
    assert complete("pdctl status --name zzz", PDCTL_STATE_DIR=state_dir) == []


@needs_the_script
def test_names_of_processes_are_completed(cluster: Cluster) -> None:
    cluster.run(cluster.state(num_decode=2))
    state_dir = str(cluster.state_dir)
    ask = f"pdctl restart --name {cluster.name} --state-dir {state_dir} "
    assert complete(ask) == ["router", "prefill-0", "decode-0", "decode-1"]
    assert complete(f"pdctl drain --name {cluster.name} dec", PDCTL_STATE_DIR=state_dir) == ["decode-0", "decode-1"]
    assert complete("pdctl drain --name nobody dec", PDCTL_STATE_DIR=state_dir) == []
    write_state(cluster.state(colocated=True, local_prefill_tokens=0))
    assert complete(ask) == ["router", "colocated-0"]
    assert complete("pdctl scale pre", PDCTL_STATE_DIR=state_dir) == ["prefill="]


def test_completing_names_loads_little(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pdctl.cli.options import complete_cluster\ncomplete_cluster('')\n"
        "heavy = {'torch', 'transformers', 'rich', 'psutil', 'fastapi'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_state_directory_that_is_not_there_completes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PDCTL_STATE_DIR", str(tmp_path / "none"))
    assert complete_cluster("") == []
