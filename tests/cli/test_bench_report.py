"""`pdctl bench report`: the page it writes, what it says on a terminal and in a pipe, and what it refuses."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import bench_documents as made
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from pdctl.cli.bench_plots import draw
from pdctl.cli.main import app
from pdctl.core.bench.plots import Draws, Line, Plot, Trace
from pdctl.core.bench.report import Document, sections

WATCHDOG_S = 120
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
KINDS = sorted(made.documents())


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """One of each kind, as `--output` keeps it."""
    paths = {kind: tmp_path / f"{kind}.json" for kind in KINDS}
    for kind, document in made.documents().items():
        paths[kind].write_text(json.dumps(document))
    return paths


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "report", *map(str, arguments)])


def refused(result: Result) -> tuple[int, str]:
    """As main() would end: exit code and message."""
    error: Any = result.exception
    return error.exit_code, error.message


def test_all_kinds_come_on_one_page_and_into_a_pipe_as_words_alone(files: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = report(*files.values(), "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.count("<section ") == len(files) + 1, "one a file, and the loads over each other"
    for kind in KINDS:
        assert f'<p class="source">{kind}</p>' in text
    assert "\x1b" not in result.output
    assert "┤" not in result.stdout, "no plots"
    assert max(map(len, result.stdout.splitlines())) <= 80
    for words in ("6 of 6 requests succeeded", "up to 2.00 requests/s", "mixed: 9.1x lower.", "memcpy", "GFLOP/s"):
        assert words in result.stdout
    assert f"{page}: all plots" in result.stderr
    assert list(tmp_path.glob(".*")) == [], "nothing half-written stays"


def test_the_page_lies_where_the_command_ran(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report(files["plain"]).exit_code == 0
    assert (tmp_path / "pdctl-bench.html").read_text().startswith("<!DOCTYPE html>")


def test_files_of_one_name_are_told_apart(files: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "plain.json"
    other.parent.mkdir()
    other.write_bytes(files["plain"].read_bytes())
    result = report(files["plain"], other, other, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for label in (str(files["plain"]), f"{other} (2)", f"{other} (3)"):
        assert f'<p class="source">{label}</p>' in text, result.output


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (None, 3, "No such file"),
        (b"", 4, "no JSON"),
        (b"\xff\xfe\x00", 4, "no JSON"),
        (b"[" * 100_000, 4, "no JSON"),
        (b"[]", 4, "expected an object"),
        (b"{}", 4, "schema None, expected 'pdctl-bench-1'"),
        (b'{"schema": "pdctl-bench-0"}', 4, "schema 'pdctl-bench-0'"),
        (
            b'{"schema": "pdctl-bench-1", "kind": "serve", "results": {}}',
            4,
            "it.json: results.samples: expected a list, found nothing",
        ),
        (b'{"schema": "pdctl-bench-1", "kind": "x", "results": {}}', 4, "kind 'x'"),
    ],
    ids=["missing", "empty", "binary", "deep", "list", "bare", "old", "hollow", "unknown"],
)
def test_a_file_that_holds_no_results_is_named(tmp_path: Path, content: bytes | None, code: int, says: str) -> None:
    path, page = tmp_path / "it.json", tmp_path / "page.html"
    if content is not None:
        path.write_bytes(content)
    found = refused(report(path, "--html", page))
    assert found[0] == code
    assert says in found[1] and str(path) in found[1]
    assert not page.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_off_is_named(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    whole = files[kind].read_bytes()
    for length in (1, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        files[kind].write_bytes(whole[:length])
        code, message = refused(report(files[kind], "--html", tmp_path / "page.html"))
        assert (code, str(files[kind]) in message) == (4, True), message


def test_a_page_that_cannot_be_written_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    assert refused(report(files["plain"], "--html", tmp_path)) == (
        2,
        f"--html {tmp_path}: expected a file, found a directory",
    )
    nowhere = tmp_path / "nowhere" / "page.html"
    assert refused(report(files["plain"], "--html", nowhere)) == (2, f"--html {nowhere}: No such file or directory")
    before = files["plain"].read_bytes()
    code, message = refused(report(files["plain"], "--html", files["plain"]))
    assert (code, "is one of the results" in message) == (2, True)
    assert files["plain"].read_bytes() == before


def test_texts_of_a_file_do_nothing_to_a_terminal(files: dict[str, Path], tmp_path: Path) -> None:
    document = made.documents()["plain"]
    document["results"]["server"]["model_id"] = "\x1b]0;title\x07\x1b[2J[bold]tiny[/bold]"
    files["plain"].write_text(json.dumps(document))
    result = report(files["plain"], "--html", tmp_path / "page.html")
    assert "\x1b" not in result.output and "\x07" not in result.output
    assert "[bold]tiny[/bold]" in result.stdout


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("flags", [[], ["--no-plots"]], ids=["plots", "no-plots"])
def test_a_terminal_shows_plots_within_its_columns(
    files: dict[str, Path], tmp_path: Path, columns: int, flags: list[str]
) -> None:
    text = _on_a_terminal([*map(str, files.values()), "--html", str(tmp_path / "page.html"), *flags], columns)
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= columns
    titles = {"Inter-token latency over the run: gap between two tokens, ms", "Decode step: step, ms"}
    assert titles <= set(lines) if not flags else not titles & set(lines)
    assert ("┤" in text) == (not flags)


def test_a_terminal_without_colours_tells_series_apart_by_letters(files: dict[str, Path], tmp_path: Path) -> None:
    arguments = [str(files["mixed"]), "--html", str(tmp_path / "page.html")]
    assert "o stream 0   x stream 1   + stream 2   # stream 3" in _on_a_terminal(arguments, 100, NO_COLOR="1")
    coloured = ESCAPE.sub("", _on_a_terminal(arguments, 100))
    assert "• stream 0   • stream 1   • stream 2   • stream 3" in coloured


def _on_a_terminal(arguments: list[str], columns: int, **variables: str) -> str:
    """What the command writes to stdout if that is a terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl.cli", "bench", "report", *arguments],
        stdout=its,
        stderr=subprocess.PIPE,
        stdin=its,
        env={**env, "TERM": "xterm-256color", **variables},
    ) as process:
        os.close(its)
        read = b""
        try:
            while part := os.read(ours, 1 << 16):
                read += part
        except OSError:  # a terminal without anybody at its other end
            pass
        os.close(ours)
        _, error = process.communicate(timeout=WATCHDOG_S)
    assert process.returncode == 0, error
    return read.decode()


def shown(plot: Plot, columns: int, *, colors: bool = True) -> str:
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=colors, color_system="standard", no_color=False
    )
    console.print(draw(plot, columns, colors=colors))
    out: Any = console.file
    return str(out.getvalue())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_plot_of_characters_fits(kind: str, columns: int) -> None:
    for section in sections([Document(label="it", path="it.json", content=made.documents()[kind])]):
        for plot in section.plots:
            if plot.principal:
                lines = ESCAPE.sub("", shown(plot, columns)).splitlines()
                assert max(len(line.rstrip()) for line in lines) <= min(columns, 120)


def test_dots_stand_where_the_values_are() -> None:
    plot = Plot(
        title="t",
        x_title="x",
        y_title="y",
        traces=(Trace(name="a", x=[0.0, 10.0], y=[0.0, 10.0]), Trace(name="b", x=[10.0], y=[0.0], color=1)),
        levels=(Line(at=5.0, label="limit"),),
    )
    lines = shown(plot, 60, colors=False).splitlines()
    rows = [line.partition("│")[2] or line.partition("┤")[2] or line.partition("┼")[2] for line in lines]
    (first,) = [row for row in rows if row.rstrip(" │").endswith("o")]
    last = [row for row in rows if "x" in row and "o" in row]
    assert rows.index(first) < rows.index(last[0]), "ten is above zero"
    assert last[0].index("o") < last[0].index("x"), "zero is left of ten"
    assert "o a   x b" in "\n".join(lines), "without colours by letters"
    assert "┄ limit" in "\n".join(lines)


def test_logarithmic_axes_have_equal_steps_for_equal_ratios() -> None:
    plot = Plot(
        title="t",
        x_title="x",
        y_title="y",
        traces=(Trace(name="a", x=[1.0, 10.0, 100.0], y=[1.0, 10.0, 100.0]),),
        x_log=True,
        y_log=True,
    )
    lines = shown(plot, 80, colors=False).splitlines()
    found = [(number, line.index("o", 4)) for number, line in enumerate(lines) if "o" in line[4:] and number < 16]
    (top, right), (middle, centre), (bottom, left) = found
    assert abs((right - centre) - (centre - left)) <= 1
    assert abs((bottom - middle) - (middle - top)) <= 1


@pytest.mark.parametrize(
    "plot",
    [
        Plot(title="t", x_title="x", y_title="y", traces=(Trace(name="a", x=[0.0], y=[0.0]),)),
        Plot(title="t", x_title="x", y_title="y", traces=(Trace(name="a", x=[5.0], y=[-1e15]),)),
        Plot(title="t", x_title="x", y_title="y", traces=(Trace(name="a", x=[1e-9, 1e15], y=[1e15, 1e-9]),)),
        Plot(
            title="t", x_title="x", y_title="y", traces=(Trace(name="a", x=[3.0], y=[3.0]),), x_log=True, y_log=True
        ),
        Plot(title="t", x_title="x", y_title="y", traces=(), levels=(Line(at=3.0),)),
        Plot(title="t", x_title="x", y_title="y", traces=(Trace(name="a", x=[1e-9, 1e15], y=[1, 0]),), x_log=True),
        Plot(
            title="t",
            x_title="x",
            y_title="y",
            traces=(Trace(name="a", x=[1.0, 1.0], y=[2.0, 2.0], draws=Draws.BOTH),),
        ),
    ],
    ids=["zero", "negative", "far", "one", "level", "decades", "same"],
)
def test_extremes_are_drawn(plot: Plot) -> None:
    text = ESCAPE.sub("", shown(plot, 80, colors=False))
    assert "┌" in text and "┘" in text
    assert max(map(len, text.splitlines())) <= 80
