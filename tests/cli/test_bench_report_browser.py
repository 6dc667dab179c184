"""The page of `pdctl bench report` in a real browser: everything is drawn, nothing is asked of a network, nothing
that a document says is run."""

from __future__ import annotations

import html.parser
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_documents as made
import pytest

from pdctl.core.bench import page
from pdctl.core.bench.plots import Section
from pdctl.core.bench.report import Document, sections

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
WATCHDOG_S = 180
LIGHT, DARK = 1, 0

Browse = Callable[..., "Seen"]


class Seen(html.parser.HTMLParser):
    """What the browser made of a page, and what it complained of."""

    def __init__(self, dom: str, log: str) -> None:
        super().__init__()
        self.dom = dom
        self.complaints = [line for line in log.splitlines() if ":CONSOLE" in line]
        self.plots: list[dict[str, int]] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self._group: list[str] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        known = {name: value or "" for name, value in attrs}
        self.attributes += known.items()
        classes = known.get("class", "").split()
        if known.get("id", "").startswith("plot-"):
            self.plots.append({"traces": 0, "points": 0, "lines": 0, "canvases": 0})
        if self.plots:
            self.plots[-1]["traces"] += tag == "g" and "trace" in classes
            self.plots[-1]["points"] += tag == "path" and "point" in classes
            # Those of the legend lie in groups of another name.
            self.plots[-1]["lines"] += tag == "path" and "js-line" in classes and self._group == ["lines"]
            self.plots[-1]["canvases"] += tag == "canvas"
        if tag == "g":
            self._group = classes


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Open a page from its file; no name of a host is known, so that nothing can be fetched."""

    def open_(
        text: str, *, scheme: int = LIGHT, size: tuple[int, int] = (1280, 1600), picture: Path | None = None
    ) -> Seen:
        path = tmp_path / "page.html"
        path.write_bytes(text.encode())
        done = subprocess.run(
            [
                CHROMIUM or "",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                # Enough for the graphics card's plots where there is none.
                "--enable-unsafe-swiftshader",
                "--disable-dev-shm-usage",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={size[0]},{size[1]}",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--enable-logging=stderr",
                "--virtual-time-budget=20000",
                f"--screenshot={picture}" if picture else "--dump-dom",
                path.as_uri(),
            ],
            capture_output=True,
            timeout=WATCHDOG_S,
            check=True,
        )
        return Seen(done.stdout.decode(), done.stderr.decode(errors="replace"))

    return open_


def everything(*documents: dict[str, Any]) -> tuple[Section, ...]:
    return sections(
        [
            Document(label=f"file{number}", path=f"file{number}.json", content=one)
            for number, one in enumerate(documents)
        ]
    )


def test_every_trace_of_every_plot_is_drawn_and_nobody_complains(browse: Browse) -> None:
    found = everything(*made.documents().values())
    seen = browse(page.render(found, "everything"))
    plots = [plot for section in found for plot in section.plots]
    assert seen.complaints == []
    assert [one["traces"] for one in seen.plots] == [len(plot.traces) for plot in plots]
    for one, plot in zip(seen.plots, plots, strict=True):
        dots = sum(len(trace.x) for trace in plot.traces if "markers" in trace.draws.value)
        lines = sum("lines" in trace.draws.value for trace in plot.traces)
        assert (one["points"], one["lines"]) == (dots, lines), plot.title
    assert set(re.findall(r'class="xtitle"[^>]*fill: ([^;]+);', seen.dom)) == {"rgb(31, 35, 40)"}
    assert [value for name, value in seen.attributes if name == "style" and "--" in value] == [], (
        "all names looked up"
    )
    assert "could not be drawn" not in re.sub(r"<script.*?</script>", "", seen.dom, flags=re.DOTALL)


def test_many_dots_are_drawn_by_the_graphics_card(browse: Browse) -> None:
    document = made.serve_document([made.sample(0, 0.0, [20.0 + step % 7 for step in range(6000)])])
    seen = browse(page.render(everything(document), "a title"))
    assert seen.plots[0]["canvases"] >= 1
    # What has nothing to do with the page: this machine draws without a card, and plotly measures what it drew.
    assert [
        line for line in seen.complaints if "GL Driver" not in line and "Canvas2D: Multiple readback" not in line
    ] == []


HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\">"
    "</script><script>document.title='pwned'</script>"
    "<svg onload=\"document.title='pwned'\"><a href=\"javascript:document.title='pwned'\">click</a>"
)


def test_texts_of_a_document_are_shown_and_not_run(browse: Browse) -> None:
    text = HOSTILE
    documents = made.documents()
    for document in documents.values():
        _fill(document["results"], text)
        document["command"] = text
        document["configuration"]["workload"] = text
    seen = browse(page.render(everything(*documents.values()), text))
    assert seen.complaints == [], "the page's policy had nothing to forbid"
    assert not {"img", "iframe", "object"} & seen.tags
    assert [name for name, _ in seen.attributes if name.startswith("on")] == []
    links = [value for name, value in seen.attributes if name in ("href", "xlink:href", "src")]
    assert [one for one in links if not one.startswith(("#", "data:,"))] == []
    assert "<title>&lt;img" in seen.dom
    # In labels of plots, too, it stands as it is written.
    assert re.search(r'class="ytick"><text[^>]*>&lt;img src=x', seen.dom)


def _fill(value: Any, text: str) -> None:
    """Names that plots show, errors, verdicts."""
    for key, inner in list(value.items()) if isinstance(value, dict) else []:
        if isinstance(inner, str) and key not in ("group", "kind"):
            value[key] = text
        if key == "ratios":
            value[key] = {text: {text: {text: {"median": 1.0, "lowest": 0.5, "highest": 2.0}}}}
        _fill(inner, text)
    for place, inner in enumerate(value) if isinstance(value, list) else ():
        if isinstance(inner, str):
            value[place] = text
        _fill(inner, text)


def test_a_script_that_gets_into_the_page_is_forbidden_and_the_browser_says_so(browse: Browse) -> None:
    """The policy holds even where escaping failed; and what the other tests look for is seen when it is there."""
    text = page.render(everything(made.documents()["plain"]), "a title")
    seen = browse(text.replace("</main>", HOSTILE.replace("</script>", "", 1) + "</main>", 1))
    assert "<title>a title</title>" in seen.dom
    assert any("Content Security Policy" in line for line in seen.complaints)
    assert "img" in seen.tags


def test_a_picture_of_the_dark_page_is_no_blank(browse: Browse, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(
        page.render(everything(made.documents()["mixed"]), "a title"), scheme=DARK, size=(800, 900), picture=picture
    )
    colors = _colors(picture.read_bytes())
    assert colors[(15, 20, 25)] > 100_000, "the page"
    assert all(colors.get(one, 0) > 20 for one in [(74, 168, 224), (242, 142, 75)]), "the first two streams"


def _colors(data: bytes) -> dict[tuple[int, ...], int]:
    """How many pixels of a PNG have each colour."""
    at, packed, width, channels = 8, b"", 0, 3
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, color_type = struct.unpack(">IIBB", body[:10])
            assert depth == 8
            channels = {2: 3, 6: 4}[color_type]
        packed += body if kind == b"IDAT" else b""
        at += length + 12
    raw = zlib.decompress(packed)
    stride = width * channels
    before = bytearray(stride)
    colors: dict[tuple[int, ...], int] = {}
    for start in range(0, len(raw), stride + 1):
        row = _unfiltered(raw[start], raw[start + 1 : start + 1 + stride], before, channels)
        for pixel in zip(*(row[channel::channels] for channel in range(3)), strict=True):
            colors[pixel] = colors.get(pixel, 0) + 1
        before = row
    return colors


def _unfiltered(kind: int, line: bytes, above: bytearray, channels: int) -> bytearray:
    """A row of a PNG (W3C PNG, section 9)."""
    row = bytearray(line)
    for place in range(len(row)):
        left = row[place - channels] if place >= channels else 0
        up = above[place]
        corner = above[place - channels] if place >= channels else 0
        if kind == 1:
            add = left
        elif kind == 2:
            add = up
        elif kind == 3:
            add = (left + up) // 2
        elif kind == 4:
            guess = left + up - corner
            add = min((left, up, corner), key=lambda one: abs(guess - one))
        else:
            return row
        row[place] = (row[place] + add) & 255
    return row
