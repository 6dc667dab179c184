"""`pdctl status` and `pdctl inspect shm` as a person and a program meet them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.cli.tables import block_map, count, pool_bar, seconds, segment_view, status_view
from pdctl.core.status import ClusterStatus, PoolStatus, SegmentStatus, cluster_status_of, describe, look
from pdctl.transport.layout import B, H, P

Cluster = Any
WIDTH = 80


def segment_of(cluster: Cluster) -> SegmentStatus:
    return describe(look(cluster.segment_name), cluster.path)


def cluster_of(cluster: Cluster, **changes: Any) -> ClusterStatus:
    return cluster_status_of(cluster.state(**changes), segment_of(cluster))


def rendered(view: Any, *, width: int = WIDTH, terminal: bool = False) -> str:
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
        highlight=False,
    )
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pdctl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, its output a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "pdctl.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def inspect(cluster: Cluster, *arguments: str) -> Any:
    given = ["inspect", "shm", "--name", cluster.name, "--state-dir", str(cluster.state_dir)]
    return CliRunner().invoke(app, [*given, *arguments])


def status(cluster: Cluster, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["status", "--name", cluster.name, "--state-dir", str(cluster.state_dir), *arguments]
    )


# --- the views ---------------------------------------------------------------------------------------------


def test_both_views_fit_80_columns(cluster: Cluster) -> None:
    colocated = replace(cluster_of(cluster), colocated=True)
    assert "one process" in rendered(status_view(colocated, WIDTH))
    for view in (status_view(colocated, WIDTH), segment_view(segment_of(cluster), WIDTH, "today")):
        lines = rendered(view).splitlines()
        assert max(map(len, lines)) <= WIDTH


def test_full_columns_fit_80_and_no_number_is_cut(cluster: Cluster) -> None:
    """The longest of everything."""
    for member in (cluster.prefill, cluster.decode):
        for name in (P.CLAIMS, P.PREFILL_TOKENS, P.DECODE_TOKENS, P.STEPS, P.LOAD, P.THREADS):
            member.me.put(name, 4_567_890_123)
        member.me.put(P.PID, 4_194_304)
        member.me.put(P.STATE, 2)
    text = rendered(status_view(cluster_of(cluster), WIDTH))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert "4194304" in text and "stopping" in text and "4.57G" in text


def test_markup_and_control_characters_in_request_ids_do_nothing(cluster: Cluster) -> None:
    text = rendered(segment_view(segment_of(cluster), 140, "today"), width=140)
    assert "req-[red]decoding?[0m" in text
    assert "out of ?[31mluck [bold]" in text
    assert "\x1b" not in text


def test_the_dead_are_named(cluster: Cluster) -> None:
    text = rendered(segment_view(segment_of(cluster), WIDTH, "today"))
    assert f"dead {cluster.dead_pid}" in text
    assert "3 decode" in text
    assert re.search(rf"4 +decode-1 +{cluster.dead_pid} +dead", text)


def test_a_wide_terminal_shows_the_phases(cluster: Cluster) -> None:
    narrow = rendered(segment_view(segment_of(cluster), WIDTH, "today"))
    wide = rendered(segment_view(segment_of(cluster), 140, "today"), width=140)
    assert "queued  prefill" not in narrow
    assert re.search(r"queued +prefill +ready +first", wide)


def test_colours_only_on_a_terminal(cluster: Cluster) -> None:
    view = segment_view(segment_of(cluster), WIDTH, "today")
    assert "\x1b[" in rendered(view, terminal=True)
    assert "\x1b" not in rendered(view)


def test_no_prompt_is_shown(cluster: Cluster) -> None:
    assert "98765" not in rendered(segment_view(segment_of(cluster), 200, "today"), width=200)


def test_a_small_map_has_one_character_a_block() -> None:
    kinds = ".#o@" * 40
    shown, step = block_map(kinds, WIDTH)
    assert step == 1
    lines = shown.plain.splitlines()
    assert "".join(line.split()[1] for line in lines) == kinds
    assert [int(line.split()[0]) for line in lines] == [0, 72, 144]


@pytest.mark.parametrize("number", [1, 7, 79, 80, 1440, 1441, 20_000, 1_000_000])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_maps_of_all_sizes_fit(number: int, width: int) -> None:
    shown, step = block_map("#" * number, width)
    lines = shown.plain.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width
    assert sum(len(line.split()[1]) for line in lines) == -(-number // step)


def test_a_character_for_several_blocks_shows_the_most_frequent_kind() -> None:
    kinds = ("#" * 3 + "." * 5) * 10_000
    shown, step = block_map(kinds, WIDTH)
    assert step > 8
    assert set("".join(line.split()[1] for line in shown.plain.splitlines())) <= {".", "#"}
    assert block_map("#.", 20)[0].plain.split()[1] == "#."


def _pool(**changes: int) -> PoolStatus:
    names = "num_private num_cached num_referenced num_reusable num_free num_broken num_unknown"
    values = dict.fromkeys(names.split(), 0)
    return PoolStatus(
        **{**values, "num_blocks": 1000, "block_tokens": 16, "block_bytes": 64, "token_bytes": 4, **changes}
    )


def test_the_bar_shows_even_one_block_and_is_always_full() -> None:
    bar = pool_bar(_pool(num_private=1, num_reusable=1, num_cached=1, num_free=998), 40).plain
    assert bar == "[#o" + "." * 38 + "]"
    assert pool_bar(_pool(num_free=1000), 10).plain == "[..........]"
    assert pool_bar(_pool(num_private=1000), 10).plain == "[##########]"


def test_numbers_stay_short() -> None:
    numbers = [0, 9_999, 10_000, 99_949, 99_950, 999_499, 999_500, 12_345_678, 10**12, 2**64 - 1]
    assert [count(number) for number in numbers[:4]] == ["0", "9999", "10k", "99.9k"]
    assert all(len(count(number)) <= 5 for number in numbers), [count(number) for number in numbers]
    times = [0, 0.0004, 0.9994, 0.9996, 59.94, 60, 3599, 3600, 359_999, 360_000, 8_640_000]
    assert all(len(seconds(time)) <= 6 for time in times), [seconds(time) for time in times]
    assert (seconds(None), seconds(0.25), seconds(125), seconds(7260)) == ("-", "250 ms", "2m05s", "2h01m")


# --- pdctl inspect shm -------------------------------------------------------------------------------------


def test_inspect_a_running_cluster(cluster: Cluster) -> None:
    cluster.run()
    result = inspect(cluster)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert str(cluster.path) in result.stdout
    assert "float32" in result.stdout and "0000000000abcdef" in result.stdout
    assert result.stderr == ""


def test_inspect_what_a_crashed_cluster_left(cluster: Cluster) -> None:
    cluster.supervisor.segment.detach(cluster.supervisor.me)
    result = inspect(cluster)
    assert result.exit_code == 0
    assert "crashed: its supervisor is gone" in result.stderr
    assert f"dead {cluster.dead_pid}" in result.stdout


def test_inspect_json(cluster: Cluster) -> None:
    cluster.run()
    result = inspect(cluster, "--json", "--verify")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["verification"]["problems"] == []
    assert values["note"] is None
    assert values["rows_by_state"]["decoding"] == 2
    assert "98765" not in result.stdout


def test_verify_says_clean(cluster: Cluster) -> None:
    result = inspect(cluster, "--verify")
    assert result.exit_code == 0
    assert "32 blocks, 12 rows verified: clean" in result.stdout


def test_verify_finds_a_wrong_reference_count(cluster: Cluster) -> None:
    block = cluster.segment.rows.block_table(cluster.rows["ready"])[0]
    cluster.segment.words[cluster.segment.layout.block(block) + B.REFS] += 1
    result = inspect(cluster, "--verify")
    assert result.exit_code == 4
    assert f"problem: block {block}: 2 references counted, 1 found" in result.stdout
    assert inspect(cluster).exit_code == 0


def test_verify_undoes_what_a_death_cut_off(cluster: Cluster) -> None:
    cluster.die_in_a_section()
    result = inspect(cluster, "--verify")
    assert result.exit_code == 0
    assert "an operation was cut off: grow" in result.stdout
    assert "in the copy only: GROW" in result.stdout and "clean" in result.stdout


def test_a_copied_file_needs_no_cluster(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "copied segment"
    shutil.copy(cluster.path, copy)
    result = pdctl("inspect", "shm", "--verify", "--file", str(copy))
    assert result.returncode == 0, result.stderr
    assert "no participant is alive" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= WIDTH or str(copy) in result.stdout


def test_errors_are_one_line_and_an_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"x" * 10_000)
    result = pdctl("inspect", "shm", "--file", str(garbage))
    assert result.returncode == 4
    assert result.stderr.startswith(f"pdctl: segment {garbage}: not a pdctl segment")
    assert "Traceback" not in result.stderr
    result = pdctl("inspect", "shm", "--name", "no-such-cluster", "--state-dir", str(tmp_path))
    assert result.returncode == 3
    assert "not running" in result.stderr


def test_any_time_of_creation_is_shown(cluster: Cluster) -> None:
    cluster.segment.words[H.CREATED_UNIX_NS] = (1 << 64) - 1
    assert inspect(cluster).exit_code == 0


# --- pdctl status ------------------------------------------------------------------------------------------


def test_status_of_a_healthy_cluster(cluster: Cluster) -> None:
    cluster.run()
    result = status(cluster)
    assert result.exit_code == 0, result.output
    assert f"{cluster.name}: healthy, up 1m" in result.stdout
    assert "torch (gathers blocks; no native kernel)" in result.stdout
    assert "bit-exact" in result.stdout and "http://127.0.0.1:8000" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    assert "2 of at most 256 requests wait for a daemon" in result.stdout
    assert "9 taken: 1 finished, 1 failed, 1 cancelled; 0 rejected" in result.stdout
    values = json.loads(status(cluster, "--json").stdout)
    assert (values["num_queued"], values["max_queue"], values["counters"]["num_rejected"]) == (2, 256, 0)


def test_status_of_a_degraded_cluster(cluster: Cluster) -> None:
    pid = cluster.child(lambda: None)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    cluster.run(cluster.state(supervisor_pid=pid, num_prefill=2))
    result = status(cluster)
    assert result.exit_code == 8
    text = " ".join(result.stdout.split())
    assert "degraded: the supervisor" in text and "recovery is off" in text
    assert "degraded: 1 of 2 prefill daemons are ready" in text
    values = json.loads(status(cluster, "--json").stdout)
    assert values["health"] == "degraded" and len(values["causes"]) == 2


def test_status_of_a_cluster_that_does_not_run(tmp_path: Path) -> None:
    result = pdctl("status", "--name", "no-such-cluster", PDCTL_STATE_DIR=str(tmp_path))
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.startswith("pdctl: cluster 'no-such-cluster': not running\n")


def test_the_slower_linear_path_is_explained(cluster: Cluster) -> None:
    text = rendered(status_view(replace(cluster_of(cluster), linear="widened"), WIDTH))
    assert "widened (this CPU has no bfloat16 kernels" in text


# --- weight ------------------------------------------------------------------------------------------------


def test_looking_loads_no_torch(cluster: Cluster) -> None:
    """Neither the modules nor a run of the commands."""
    cluster.run()
    code = (
        "import sys\n"
        "from pdctl.cli.main import app\n"
        "import pdctl.core.status, pdctl.cli.tables, pdctl.cli.completions\n"
        f"for command in (['status'], ['inspect', 'shm', '--verify']):\n"
        f"    app([*command, '--name', {cluster.name!r}, '--state-dir', {str(cluster.state_dir)!r}],\n"
        "        standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'uvicorn', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
