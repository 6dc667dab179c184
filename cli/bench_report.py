"""`pdctl bench report`: results that were kept, as a page and on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdctl.cli.output import remark, stdout_console
from pdctl.transport.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from pdctl.core.bench.plots import Section, Table


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What `pdctl bench ... --output FILE` wrote; of any kind.")
    ],
    html: Annotated[Path, typer.Option("--html", help="The page to write; it needs no network.")] = Path(
        "pdctl-bench.html"
    ),
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw on the terminal, too.", show_default="on a terminal")
    ] = True,
) -> None:
    """Draw the results of benchmarks: one page of HTML for all files, and the main plots on the terminal."""
    from pdctl.core.bench import report as reporting
    from pdctl.core.bench import results
    from pdctl.core.bench.page import render

    _check_writable(html, files)
    labels = _labels(files)
    documents = [
        reporting.Document(label=label, path=str(path), content=results.load(path))
        for label, path in zip(labels, files, strict=True)
    ]
    sections = reporting.sections(documents)
    results.write_whole(render(sections, "pdctl bench: " + ", ".join(labels)), html, "--html")
    console = stdout_console()
    colors = console.color_system is not None and not console.no_color
    for section in sections:
        console.print(_words(section))
        if plots and sys.stdout.isatty():
            from pdctl.cli.bench_plots import draw

            for plot in section.plots:
                if plot.principal:
                    console.print(draw(plot, console.width, colors=colors))
    remark(f"{html}: all plots; open it in a browser")


def _labels(files: Sequence[Path]) -> list[str]:
    """Names short enough for a legend: file names, or whole paths where those are the same."""
    names = [path.stem for path in files]
    unique = [path.stem if names.count(path.stem) == 1 else str(path) for path in files]
    return [label if unique.count(label) == 1 else f"{label} ({number + 1})" for number, label in enumerate(unique)]


def _check_writable(html: Path, files: Sequence[Path]) -> None:
    if html.is_dir():
        raise UsageError(f"--html {html}: expected a file, found a directory")
    if any(html.exists() and path.exists() and html.samefile(path) for path in files):
        raise UsageError(f"--html {html}: is one of the results", hint="--html report.html")


def _words(section: Section) -> RenderableType:
    """Title, result and tables."""
    from rich.console import Group
    from rich.text import Text

    head = Text(section.title, style="bold").append(f" ({section.source})", style="not bold dim")
    tables = [part for table in section.tables for part in (Text(table.title), _table(table)) if str(part)]
    return Group(head, *(Text(words) for words in section.words), *tables, "")


def _table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(table.headings):
        made.add_column(Text(heading), justify="right" if number else "left", no_wrap=number == 0)
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
