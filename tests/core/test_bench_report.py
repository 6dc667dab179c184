"""What a report shows: the numbers of its documents, all of them, and nothing that a document's texts could do."""

from __future__ import annotations

import base64
import copy
import hashlib
import html.parser
import json
import random
from collections.abc import Iterator
from typing import Any

import bench_documents as made
import numpy
import pytest

from pdctl.core.bench import page
from pdctl.core.bench.plots import Section
from pdctl.core.bench.reading import printable
from pdctl.core.bench.report import Document, sections
from pdctl.transport.errors import IncompatibleError

KINDS = sorted(made.documents())
HOSTILE_TEXTS = [
    "<script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "</script><script>window.pwned = 1</script><!--",
    "<a href='javascript:window.pwned = 1'>click</a><b>bold</b>",
    "&lt;script&gt;window.pwned = 1&lt;/script&gt;",
    "%{x}%{fullData.name} $\\alpha$ --ink var(--ink)",
    "\x1b[31mred\x1b]0;title\x07\r\n\0\ud800\u202e\u2028",
    "x" * 100_000,
    "",
]
HOSTILE_VALUES = [None, True, -1, 1.5, 1e308, 10**400, float("inf"), float("nan"), "7", "", [], [[]], {}, {"a": 1}]


class Page(html.parser.HTMLParser):
    """Tags, attributes, scripts and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.words += data

    @property
    def figures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.scripts[0])
        return found


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the five megabytes that are the same in every page."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def sections_of(*documents: dict[str, Any]) -> tuple[Section, ...]:
    return sections(
        [
            Document(label=f"file{number}", path=f"file{number}.json", content=one)
            for number, one in enumerate(documents)
        ]
    )


def page_of(*documents: dict[str, Any]) -> Page:
    return Page(page.render(sections_of(*documents), "a title"))


def figures_of(*documents: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures as they stand in the page, by title."""
    titles = [plot.title for section in sections_of(*documents) for plot in section.plots]
    return dict(zip(titles, page_of(*documents).figures, strict=True))


def traces_of(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those in the legend, by name; of a plot without names the first."""
    return {trace["name"]: trace for trace in reversed(figure["data"]) if trace["showlegend"]}


@pytest.mark.usefixtures("light")
def test_every_gap_of_every_stream_is_a_dot() -> None:
    samples = made.mixed_samples(420.0)
    figure = figures_of(made.serve_document(samples))["Inter-token latency over the run"]
    traces = traces_of(figure)
    streams = [one for one in samples if one.group == "stream"]
    for one in streams:
        trace = traces[f"stream {one.index}"]
        assert trace["y"] == pytest.approx(one.itls_ms, abs=2e-3)
        assert trace["x"] == pytest.approx([at / 1e3 for at in one.chunks_ms[1:]], abs=2e-6)
    # Streams under one another can be seen, and have colours of their own.
    assert len({traces[f"stream {one.index}"]["marker"]["size"] for one in streams}) == len(streams)
    assert len({traces[f"stream {one.index}"]["marker"]["color"] for one in streams}) == len(streams)


@pytest.mark.usefixtures("light")
def test_long_prompts_are_lines_where_they_arrive_and_shaded_until_their_first_token() -> None:
    figure = figures_of(made.serve_document(made.mixed_samples()))["Inter-token latency over the run"]
    shapes = figure["layout"]["shapes"]
    assert [one["x0"] for one in shapes if one["type"] == "line"] == pytest.approx([0.6, 1.2])
    assert [(one["x0"], one["x1"]) for one in shapes if one["type"] == "rect"] == [
        (pytest.approx(0.6), pytest.approx(1.0)),
        (pytest.approx(1.2), pytest.approx(1.6)),
    ]
    arrivals = traces_of(figure)["a long prompt arrives"]
    assert arrivals["text"] == [f"prompt {index} of 64 tokens: first token after 400 ms" for index in (4, 5)]


@pytest.mark.usefixtures("light")
def test_many_streams_share_one_colour() -> None:
    samples = [made.sample(index, 0.0, [20.0] * 3, group="stream") for index in range(7)]
    samples.append(made.sample(7, 10.0, [], group="prompt"))
    traces = traces_of(figures_of(made.serve_document(samples))["Inter-token latency over the run"])
    assert set(traces) == {"stream", "a long prompt arrives"}
    assert len(traces["stream"]["y"]) == 21


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("title", "metric"),
    [
        ("Time to first token (TTFT)", "ttft"),
        ("Time per output token (TPOT)", "tpot"),
        ("Inter-token latency (ITL)", "itl"),
        ("Whole request (E2EL)", "e2el"),
    ],
)
def test_a_distribution_holds_all_values_and_marks_the_percentiles_of_the_summary(title: str, metric: str) -> None:
    samples = made.plain_samples()
    document = made.serve_document(samples)
    line, marks = figures_of(document)[title]["data"]
    values = sorted(
        gap
        for one in samples
        for gap in (one.itls_ms if metric == "itl" else [getattr(one, f"{metric}_ms")])
    )  # fmt: skip
    assert line["x"] == pytest.approx(values, abs=3e-3)
    assert (line["y"][0], line["y"][-1]) == (0, 100)
    summary = document["results"]["summary"]
    assert marks["x"] == pytest.approx([summary[f"p50_{metric}_ms"], summary[f"p99_{metric}_ms"]], abs=3e-3)
    assert [text.split()[0] for text in marks["text"]] == ["p50", "p99"]


@pytest.mark.usefixtures("light")
def test_rates_are_drawn_by_whether_they_meet() -> None:
    document = made.sweep_document()
    points = document["results"]["points"]
    figures = figures_of(document)
    for title, key in (
        ("Requests answered", "request_throughput"),
        ("Output", "output_throughput"),
        ("TTFT, 99th percentile", "p99_ttft_ms"),
        ("TPOT, 99th percentile", "p99_tpot_ms"),
    ):
        traces = traces_of(figures[title])
        for name, meets in (("meets the objectives", True), ("does not", False)):
            chosen = [one for one in points if one["meets"] is meets and one["rate_per_s"] is not None]
            assert traces[name]["x"] == [one["rate_per_s"] for one in chosen]
            assert traces[name]["y"] == [one["summary"][key] for one in chosen]
        assert traces["meets the objectives"]["marker"]["symbol"] != traces["does not"]["marker"]["symbol"]
        levels = [one["y0"] for one in figures[title]["layout"]["shapes"] if one.get("xref") == "paper"]
        # All at once has no rate: a level.
        assert points[0]["summary"][key] in levels
        assert (100.0 in levels) == title.startswith("TTFT")
        marks = [one["x0"] for one in figures[title]["layout"]["shapes"] if one.get("yref") == "paper"]
        assert marks == [2.0]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(("rates", "best"), [((None,), None), ((None,), 3.0), ((None, 1.0), None), ((), None)])
def test_a_search_that_ended_early_is_drawn(rates: tuple[float | None, ...], best: float | None) -> None:
    document = made.sweep_document(rates, best)
    words = page_of(document).words
    assert ("up to 3.00 requests/s" if best else "at none of the rates") in words
    assert ("Requests answered" in words) == bool(rates)


@pytest.mark.usefixtures("light")
def test_systems_stand_side_by_side_on_the_same_axes() -> None:
    document = made.compare_document(rounds=3)
    figures = figures_of(document)
    layouts = []
    for system in document["results"]["systems"]:
        figure = figures[f"Mixed: inter-token latency of {system['name']}"]
        layouts.append(figure["layout"])
        rounds = [
            [gap for one in round_["samples"] if one["group"] == "stream" for gap in numpy.diff(one["chunks_ms"])]
            for round_ in system["workloads"]["mixed"]["rounds"]
        ]
        found = {trace["name"]: [] for trace in figure["data"]}
        for trace in figure["data"]:
            found[trace["name"]].append(trace["y"])
        assert found["first round"] == [rounds[0]]
        assert sorted(found["the other rounds"]) == sorted(rounds[1:])
        assert figure["data"][-2]["name"] == "first round", "it lies on top of the others"
    for axis in ("xaxis", "yaxis"):
        assert layouts[0][axis]["range"] == layouts[1][axis]["range"]
    assert layouts[0]["yaxis"]["range"][1] > 420
    pooled = figures["Mixed, all rounds: the streams' inter-token latency (ITL)"]
    assert set(traces_of(pooled)) == {"disaggregated", "colocated"}
    assert len(traces_of(pooled)["colocated"]["x"]) == 3 * 4 * 60


@pytest.mark.usefixtures("light")
def test_ratios_have_their_spread_and_the_verdict_comes_first() -> None:
    document = made.compare_document()
    (trace,) = figures_of(document)["Mixed: disaggregated over the others"]["data"]
    assert trace["x"] == [0.11, 1.4]
    assert trace["y"] == ["p99 ITL under prompts", "median prompt TTFT"]
    assert trace["error_x"]["array"] == pytest.approx([0.2 - 0.11, 1.7 - 1.4])
    assert trace["error_x"]["arrayminus"] == pytest.approx([0.11 - 0.08, 1.4 - 1.2])
    words = page_of(document).words
    verdict, *rest = (words.index(text) for text in ("mixed: 9.1x lower.", "TTFT p50 ms", "cpu: A CPU"))
    assert verdict < min(rest)
    chunks = traces_of(figures_of(document)["Chunk of the colocated server: the streams' tail"])
    assert (chunks["tried"]["x"], chunks["tried"]["y"]) == ([128, 256, 512], [80, 120, 300])
    assert (chunks["chosen"]["x"], chunks["chosen"]["y"]) == ([256], [120])


@pytest.mark.usefixtures("light")
def test_a_hand_over_has_a_line_a_transport_and_a_dot_a_round() -> None:
    document = made.handoff_document()
    figures = figures_of(document)
    for title, load in (("Hand-over", False), ("Hand-over beside a memory load of 12.5 GB/s", True)):
        figure = figures[title]
        assert (figure["layout"]["xaxis"]["type"], figure["layout"]["yaxis"]["type"]) == ("log", "log")
        for name in ("pdctl", "memcpy", "pipe"):
            cells = [
                one
                for one in document["results"]["cells"]
                if (one["transport"], one["load"]) == (name, load)
            ]  # fmt: skip
            dots, line = [trace for trace in figure["data"] if trace["name"] == name]
            assert dots["y"] == [time for one in cells for time in one["samples_ms"]]
            assert dots["x"] == [one["kv_tokens"] for one in cells for _ in one["samples_ms"]]
            assert line["y"] == pytest.approx([one["p50_ms"] for one in cells])
            assert "lines" in line["mode"] and dots["mode"] == "markers"
            assert line["showlegend"] and not dots["showlegend"]
    words = page_of(document).words
    assert "mooncake failed: no route" in words
    assert "nixl is not installed: pip install nixl-cu12" in words
    assert "(median)." in words and "busy" not in words
    # Nobody says "idle" of a machine that was not.
    document["results"]["busy_share"] = [0.8]
    words = page_of(document).words
    assert "idle" not in words and "the machine was busy (80% of its cores)" in words
    del document["results"]["busy_share"]
    assert "idle" not in page_of(document).words


@pytest.mark.usefixtures("light")
def test_an_engine_is_drawn_against_its_limits() -> None:
    document = made.engine_document()
    figures = figures_of(document)
    for batch in (1, 4, 8):
        cells = [one for one in document["results"]["decode"] if one["batch"] == batch]
        trace = traces_of(figures["Decode step"])[f"batch {batch}"]
        assert (trace["x"], trace["y"]) == ([one["context"] for one in cells], [one["p50_ms"] for one in cells])
        share = traces_of(figures["Share of the machine's limit"])[f"decode, batch {batch}"]
        assert share["y"] == pytest.approx([100 * one["share_of_limit"] for one in cells])
    rate = traces_of(figures["Prefill"])
    assert rate["prefill"]["y"] == pytest.approx([one["tokens_per_s"] for one in document["results"]["prefill"]])
    assert rate["the machine's limit (of each colour)"]["y"] == pytest.approx([2000.0, 2000.0])
    words = page_of(document).words
    assert "65540 positions, a row holds 8192" in words
    assert "the machine was busy (90% of its cores)" in words


@pytest.mark.usefixtures("light")
def test_files_of_one_kind_are_laid_over_each_other_as_well() -> None:
    loads = [made.serve_document(made.plain_samples(seed=seed)) for seed in (1, 2)]
    found = sections_of(*loads, made.sweep_document(), made.sweep_document(best=1.0), made.handoff_document())
    assert [section.source for section in found] == ["2 files", "2 files", *(f"file{n}" for n in range(5))]
    itl = next(plot for plot in found[0].plots if "ITL" in plot.title)
    assert {trace.name for trace in itl.traces} == {"file0", "file1"}
    assert {trace.color for trace in itl.traces} == {0, 1}
    names = {trace.name for plot in found[1].plots for trace in plot.traces}
    assert names >= {"file2: meets the objectives", "file3: does not"}
    assert len(page_of(*loads).figures) == sum(len(section.plots) for section in sections_of(*loads))


@pytest.mark.usefixtures("light")
def test_what_failed_is_said_and_what_is_there_is_drawn() -> None:
    none = page_of(made.serve_document([made.failed(0), made.failed(1, "gone")], {"ttft": 5.0}))
    assert none.figures == []
    for words in ("0 of 2 requests succeeded", "there is nothing to draw", "2 x connection: refused", "n/a"):
        assert words in none.words
    some = made.serve_document([*made.plain_samples(2), made.failed(2)])
    assert "1 failed requests are not drawn." in page_of(some).words
    assert len(figures_of(some)["Inter-token latency over the run"]["data"][0]["y"]) == 20
    one_token = made.serve_document([made.sample(0, 0.0, [])])
    assert [plot.title for plot in sections_of(one_token)[0].plots] == [
        "Time to first token (TTFT)",
        "Whole request (E2EL)",
    ]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_measured_is_null_and_the_rest_is_drawn(kind: str) -> None:
    """Every figure of every summary, one cell, ratio or point: gone."""
    document = made.documents()[kind]

    figures = (
        "p50",
        "p90",
        "p99",
        "mean",
        "max",
        "output_through",
        "request_through",
        "tokens_per",
        "share",
        "limit_ms",
    )

    def empty(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                if isinstance(value[key], float) and key.startswith(figures):
                    value[key] = None
                if key == "samples_ms":
                    value[key] = []
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            empty(inner)

    empty(document["results"])
    assert "n/a" in page_of(document).words


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_documents_make_the_same_page(kind: str) -> None:
    first, second = (page.render(sections_of(made.documents()[kind]), "a title") for _ in range(2))
    assert first == second


def small_documents() -> dict[str, dict[str, Any]]:
    """One of each kind, with few values: every one of them is changed."""
    prompts = [made.sample(1, 5.0, [], group="prompt")]
    mixed = [made.sample(0, 0.0, [20.0, 30.0], group="stream"), *prompts]
    documents = made.documents()
    documents["plain"] = made.serve_document([made.sample(0, 0.0, [20.0]), made.failed(1)], {"ttft": 60.0})
    documents["mixed"] = made.serve_document(mixed)
    documents["sweep"]["results"]["points"] = documents["sweep"]["results"]["points"][:2]
    systems = documents["compare"]["results"]["systems"]
    del systems[1:]
    systems[0]["workloads"] = {"mixed": {"rounds": [made.load(mixed)]}}
    for kind, lists in (("handoff", ["cells"]), ("engine", ["decode", "prefill"])):
        for name in lists:
            documents[kind]["results"][name] = documents[kind]["results"][name][:1]
    return documents


def places(value: Any, *before: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document, but for what results.load has looked at."""
    if before and before not in (("schema",), ("kind",)):
        yield before
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from places(inner, *before, key)


def changed(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(document)
    inner: Any = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copied


def assert_harmless(text: str) -> None:
    found = Page(text)
    assert found.tags.count("script") == 3
    assert not {"img", "iframe", "object", "base", "form", "b"} & set(found.tags)
    assert [name for name, _ in found.attributes if name.startswith("on")] == []
    links = [value or "" for name, value in found.attributes if name in ("href", "src")]
    assert [one for one in links if not one.startswith(("#section-", "data:,"))] == []
    # What plotly would read as tags.
    for one in texts(found.figures):
        assert "<" not in one, one
    text.encode()
    assert "\x1b" not in text and "\0" not in text


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for inner in entries:
        if inner != "<extra></extra>":
            yield from (one.replace("<extra>", "").replace("</extra>", "") for one in texts(inner))


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_any_place_is_only_read(kind: str) -> None:
    document = small_documents()[kind]
    for place in places(document):
        inner: Any = document
        for key in place:
            inner = inner[key]
        if not isinstance(inner, str):
            continue
        for text in HOSTILE_TEXTS:
            assert_harmless(page.render(sections_of(changed(document, place, text)), text))


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_in_any_place_is_only_read(kind: str) -> None:
    document = small_documents()[kind]
    for place in places(document):
        holder: Any = document
        for key in place[:-1]:
            holder = holder[key]
        if isinstance(holder, dict):
            copied = changed(document, (*place[:-1], HOSTILE_TEXTS[2]), holder[place[-1]])
            assert_harmless(page.render(sections_of(copied), "a title"))


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_any_kind_in_any_place_is_drawn_or_named(kind: str) -> None:
    document = small_documents()[kind]
    refused = 0
    for place in places(document):
        for value in HOSTILE_VALUES:
            broken = changed(document, place, value)
            try:
                found = sections_of(broken)
            except IncompatibleError as error:
                assert error.message.startswith("file0.json: "), error.message
                assert error.message.isprintable() and len(error.message) < 400
                refused += 1
            else:
                # What is left out, what JSON has no word for, and plots of nothing would show here.
                json.dumps([page.figure(plot) for section in found for plot in section.plots], allow_nan=False)
    assert refused


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_without_any_one_of_its_values_is_drawn_or_named(kind: str) -> None:
    document = small_documents()[kind]
    for place in places(document):
        broken = copy.deepcopy(document)
        inner: Any = broken
        for key in place[:-1]:
            inner = inner[key]
        del inner[place[-1]]
        try:
            sections_of(broken)
        except IncompatibleError as error:
            assert error.message.startswith("file0.json: ")


def test_no_text_ends_the_script_that_holds_it() -> None:
    """Labels are escaped already: this is the second wall."""
    made_of = page._json({text: [text] for text in HOSTILE_TEXTS})
    assert not {"<", ">", "&"} & set(made_of)
    assert json.loads(made_of) == {text: [text] for text in HOSTILE_TEXTS}


def test_nothing_but_its_two_scripts_runs_in_the_page() -> None:
    text = page.render(sections_of(made.documents()["mixed"]), "a title")
    found = Page(text)
    policy = next(value or "" for name, value in found.attributes if name == "content" and "src" in (value or ""))
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found.scripts]
    allowed = policy.partition("script-src ")[2].split()
    assert allowed == [f"'sha256-{hashes[1]}'", f"'sha256-{hashes[2]}'", "'unsafe-eval'"]
    assert "default-src 'none'" in policy
    assert "plotly.js v" in found.scripts[1][:100]
    assert "\r" not in text, "a browser would change it, and its hash"
    assert_harmless(text)


@pytest.mark.parametrize("kind", KINDS)
def test_plotly_knows_every_word_of_the_figures(kind: str) -> None:
    """Its own check of names, kinds and values, which refuses what it does not know."""
    import plotly.graph_objects

    def painted(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: painted(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [painted(inner, key) for inner in value]
        return "#000000" if key.lower().endswith("color") and value.startswith("--") else value

    for section in sections_of(made.documents()[kind]):
        for plot in section.plots:
            figure = painted(page.figure(plot))
            plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
            assert not [one for one in texts(figure) if one.startswith("--")], "a colour that nobody looks up"


def test_many_dots_are_drawn_by_the_graphics_card() -> None:
    source = random.Random(0)
    samples = [made.sample(0, 0.0, [source.uniform(20, 40) for _ in range(6000)])]
    (plot,) = [one for one in sections_of(made.serve_document(samples))[0].plots if one.wide]
    assert {trace["type"] for trace in page.figure(plot)["data"]} == {"scattergl"}
    few = sections_of(made.serve_document(made.plain_samples()))[0].plots[0]
    assert {trace["type"] for trace in page.figure(few)["data"]} == {"scatter"}


def test_printable_text_is_kept_and_the_rest_is_marked() -> None:
    assert printable("SmolLM2-135M, ключ, 日本 🙂") == "SmolLM2-135M, ключ, 日本 🙂"
    assert printable("a\nb\tc\x1b[2J\x9b\ud800\u202e") == "a b c�[2J���"
    assert printable("x" * 11, 10) == "x" * 10 + "…"
