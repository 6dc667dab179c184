"""Records of `pdctl.core.status` as rich renderables: pure functions, the same for a terminal, a pipe and a test.

Everything fits 80 columns; what is wider only if there is room says so. Text that came from outside is never
read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdctl.core.status import (
    DAEMON_ROLES,
    BlockKind,
    ClusterStatus,
    Counters,
    OwnerStatus,
    ParticipantStatus,
    PoolStatus,
    RowStatus,
    SegmentStatus,
)
from pdctl.core.survey import ClusterSummary
from pdctl.transport.machine import CpuShare

WIDE_COLUMNS = 110
MAX_MAP_LINES = 20
_MAX_BAR = 60
_MIB = 1 << 20
_KIND_STYLES = {
    BlockKind.FREE.value: "dim",
    BlockKind.PRIVATE.value: "yellow",
    BlockKind.REUSABLE.value: "green",
    BlockKind.REFERENCED.value: "cyan",
    BlockKind.BROKEN.value: "bold red",
    BlockKind.UNKNOWN.value: "bold red",
}
_STATE_STYLES = {
    "ready": "green",
    "running": "green",
    "healthy": "green",
    "starting": "yellow",
    "stopping": "yellow",
    "drained": "yellow",
    "stopped": "bold red",
    "dead": "bold red",
    "crashed": "bold red",
    "foreign": "dim",
    "gone": "bold red",
    "degraded": "bold red",
    "failed": "red",
    "decoding": "green",
    "prefilling": "cyan",
}
_ATTENTION = {"torch": "torch (gathers blocks; no native kernel)"}
_LINEAR = {
    "native": "native (matrix kernels of the model's dtype)",
    "widened": "widened (this CPU has no bfloat16 kernels: weights are multiplied as float32)",
    "unknown": "unknown (the cluster runs with other versions than this command)",
}
_NONE = "-"


# --- words -------------------------------------------------------------------------------------------------


def count(value: int) -> str:
    """A number in at most five characters: 9999, 12.3k, 456k, 7.89M."""
    if value < 10_000:
        return str(value)
    scaled = float(value)
    for unit in "kMGT":
        scaled /= 1000
        if scaled < 999.5:
            return f"{scaled:.3g}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{scaled:.0e}"


def seconds(value: float | None) -> str:
    """A time in at most six characters: 12 ms, 3.4 s, 5m07s, 2h03m, 4d05h."""
    if value is None:
        return _NONE
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours}h{minutes:02}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02}h" if days < 100 else f"{days}d"


def size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    for unit, scale in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if num_bytes < scale * 1024:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def number_of(count: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else _NONE


def _state(text: str) -> Text:
    return Text(text, style=_STATE_STYLES.get(text, ""))


def _facts(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _table(*columns: tuple[str, bool]) -> Table:
    """Columns as (heading, numbers?)."""
    table = Table(box=None, padding=(0, 0), pad_edge=False, header_style="bold")
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    table.padding = (0, 1, 0, 0)
    return table


# --- parts -------------------------------------------------------------------------------------------------


def processes_table(processes: Sequence[ParticipantStatus]) -> Table:
    """One line a process; 80 columns."""
    table = _table(
        ("#", True),
        ("name", False),
        ("pid", True),
        ("state", False),
        ("thr", True),
        ("rows", True),
        ("claims", True),
        ("tokens", True),
        ("steps", True),
        ("exact", False),
        ("MiB", True),
        ("cpu", True),
    )
    for one in processes:
        works = one.role in DAEMON_ROLES
        table.add_row(
            _NONE if one.slot is None else str(one.slot),
            one.name,
            str(one.pid),
            _state(one.state),
            count(one.num_threads) if works else _NONE,
            count(one.num_rows) if works else _NONE,
            count(one.num_claims) if works else _NONE,
            count(one.num_tokens) if works else _NONE,
            count(one.num_steps) if works else _NONE,
            {True: "yes", False: "no", None: "?"}[one.bit_exact] if works else _NONE,
            _NONE if one.private_bytes is None else count(round(one.private_bytes / _MIB)),
            seconds(one.cpu_s),
        )
    return table


def clusters_view(clusters: Sequence[ClusterSummary], width: int, gc: str) -> RenderableType:
    """What `pdctl ls` shows; the model's name gets what 80 columns leave.

    Args:
        gc: the command that removes what crashed clusters left.
    """
    table = _table(
        ("name", False),
        ("phase", False),
        ("url", False),
        ("model", False),
        ("daemons", False),
        ("up", True),
    )
    for one in clusters:
        table.add_row(
            _shortened(one.name, 15),
            _state(one.phase),
            one.url or _NONE,
            _shortened(one.model or _NONE, 14 + max(0, width - 80)),
            _daemons_words(one),
            seconds(one.uptime_s),
        )
    elsewhere = [one for one in clusters if one.phase == "foreign" and one.state_dir]
    notes = [Text(f"{one.name}: --state-dir {one.state_dir}", style="dim") for one in elsewhere]
    if any(one.phase == "crashed" for one in clusters):
        notes.append(Text(f"{gc} removes what crashed clusters left", style="dim"))
    return Group(table, *([""] if notes else []), *notes)


def _daemons_words(cluster: ClusterSummary) -> str:
    """2P1D: two prefill daemons and one decode daemon; 2P1/3D: one of three takes requests; 1PD: one for both."""
    if cluster.wanted is None:
        return _NONE
    if cluster.colocated:
        return "1PD" if cluster.ready == cluster.wanted else "0/1PD"
    words = ""
    for role, letter in (("prefill", "P"), ("decode", "D")):
        ready, wanted = (cluster.ready or {}).get(role, 0), cluster.wanted[role]
        words += f"{wanted}{letter}" if ready == wanted else f"{ready}/{wanted}{letter}"
    return words


def pool_bar(pool: PoolStatus, width: int) -> Text:
    """The pool's blocks by kind as one bar; every kind that exists gets at least one character."""
    parts = (
        (BlockKind.PRIVATE, pool.num_private),
        (BlockKind.REFERENCED, pool.num_referenced),
        (BlockKind.REUSABLE, pool.num_reusable),
        (BlockKind.BROKEN, pool.num_broken),
        (BlockKind.UNKNOWN, pool.num_unknown),
        (BlockKind.FREE, pool.num_free),
    )
    cells = {kind: max(number > 0, width * number // max(1, pool.num_blocks)) for kind, number in parts}
    # Rounding is settled by the largest part.
    largest = max(parts, key=lambda part: part[1])[0]
    cells[largest] += width - sum(cells.values())
    bar = Text("[", no_wrap=True)
    for kind, _ in parts:
        bar.append(kind.value * cells[kind], style=_KIND_STYLES[kind.value])
    return bar.append("]")


def _pool_words(pool: PoolStatus) -> str:
    words = (
        f"{pool.num_blocks} blocks of {pool.block_tokens} tokens: {pool.num_private} private, "
        f"{pool.num_cached} cached ({pool.num_referenced} in use, {pool.num_reusable} reusable), "
        f"{pool.num_free} free"
    )
    words += f", {pool.num_broken} broken" if pool.num_broken else ""
    return f"{words}, {pool.num_unknown} in an unknown state" if pool.num_unknown else words


def _rows_words(rows_by_state: dict[str, int]) -> str:
    busy = [f"{number} {state}" for state, number in rows_by_state.items() if number and state != "free"]
    return ", ".join([*busy, f"{rows_by_state['free']} free"])


def _counter_facts(counters: Counters) -> list[tuple[str, str | Text]]:
    requests = (
        f"{counters.num_requests} taken: {counters.num_finished} finished, "
        f"{counters.num_failed} failed, {counters.num_cancelled} cancelled; {counters.num_rejected} rejected"
    )
    events = (
        f"{number_of(counters.num_preemptions, 'preemption')}, {number_of(counters.num_adoptions, 'adoption')}, "
        f"{number_of(counters.num_deaths, 'death')}, {number_of(counters.num_repairs, 'repair')}, "
        f"{number_of(counters.num_evictions, 'eviction')}"
        + (f", {number_of(counters.num_broken_blocks, 'broken block')}" if counters.num_broken_blocks else "")
    )
    cached, prompt = counters.num_cached_tokens, counters.num_prompt_tokens
    return [
        ("requests", requests),
        ("events", events),
        ("prefix", f"{cached} of {prompt} prompt tokens came from the cache ({percent(cached, prompt)})"),
    ]


def block_map(kinds: str, width: int, max_lines: int = MAX_MAP_LINES) -> tuple[Text, int]:
    """One character a block, or one for several if they would not fit `max_lines`.

    Args:
        kinds: one BlockKind value a block.
        width: columns.

    Returns:
        The map, and how many blocks a character stands for (its kind is the most frequent of them; of equally
        frequent ones the busiest).
    """
    number_width = len(str(max(0, len(kinds) - 1)))
    columns = max(8, width - number_width - 1)
    # A round number of blocks a line is easier to count.
    columns = columns // 8 * 8
    step = max(1, -(-len(kinds) // (columns * max_lines)))
    shown = (
        kinds if step == 1 else "".join(_most_frequent(kinds[at : at + step]) for at in range(0, len(kinds), step))
    )
    lines = Text(no_wrap=True)
    for at in range(0, len(shown), columns):
        lines.append(f"{at * step:>{number_width}} ", style="dim")
        for kind, run in groupby(shown[at : at + columns]):
            lines.append("".join(run), style=_KIND_STYLES.get(kind, ""))
        if at + columns < len(shown):
            lines.append("\n")
    return lines, step


def _most_frequent(kinds: str) -> str:
    return "!" if "!" in kinds else max(("?", "#", "@", "o", "."), key=kinds.count)


def _legend(step: int) -> Text:
    legend = Text()
    for kind, words in (
        (BlockKind.FREE, "free"),
        (BlockKind.PRIVATE, "private"),
        (BlockKind.REUSABLE, "cached, reusable"),
        (BlockKind.REFERENCED, "cached, in use"),
        (BlockKind.BROKEN, "broken"),
    ):
        legend.append(kind.value, style=_KIND_STYLES[kind.value]).append(f" {words}   ")
    if step > 1:
        legend.append(f"\none character: {step} blocks, by their most frequent kind")
    return legend


def owner_words(owner: OwnerStatus | None) -> Text:
    if owner is None:
        return Text(_NONE)
    if owner.alive:
        return Text(f"{owner.slot} {owner.role}")
    return Text(f"dead {owner.pid}" if owner.pid else f"dead #{owner.slot}", style=_STATE_STYLES["dead"])


def rows_table(rows: Sequence[RowStatus], *, wide: bool = False) -> Table:
    """One line a request; 80 columns, or more with the times of its phases."""
    columns = [
        ("row", True),
        ("state", False),
        ("request", False),
        ("owner", False),
        ("prompt+out", True),
        ("kv", True),
        ("blocks", True),
        ("cached", True),
        ("age", True),
    ]
    if wide:
        columns += [("queued", True), ("prefill", True), ("ready", True), ("first", True)]
    table = _table(*columns)
    for row in rows:
        phases = (row.queued_s, row.prefill_s, row.ready_s, row.first_token_s) if wide else ()
        table.add_row(
            str(row.row),
            _state(row.state),
            _shortened(row.request_id, 30 if wide else 18),
            owner_words(row.owner),
            f"{count(row.num_prompt_tokens)}+{count(row.num_output_tokens)}",
            count(row.kv_len),
            count(row.num_blocks),
            count(row.num_cached_tokens),
            seconds(row.age_s),
            *(seconds(phase) for phase in phases),
        )
    return table


def _shortened(text: str, columns: int) -> Text:
    return Text(text if len(text) <= columns else text[: columns - 1] + "…")


# --- wholes ------------------------------------------------------------------------------------------------


def status_view(status: ClusterStatus, width: int) -> RenderableType:
    """What `pdctl status` shows."""
    health = _state(status.health).append(f", up {seconds(status.uptime_s)}", style="not bold default")
    exact = {True: "bit-exact", False: "exact up to ties", None: "not probed yet"}[status.bit_exact]
    supervisor = Text(f"pid {status.supervisor_pid}, ").append_text(_state(status.supervisor_state))
    if status.supervisor_state == "stopped":
        supervisor.append(": recovery is off")
    head = _facts(
        [
            ("cluster", Text(f"{status.name}: ").append_text(health)),
            ("url", status.url),
            ("model", status.model),
            *([("daemons", "colocated: prefill-0 and decode-0 are one process")] if status.colocated else []),
            ("numerics", f"{status.numerics}; {exact}"),
            ("attention", _ATTENTION.get(status.attention, status.attention)),
            ("linear", _LINEAR.get(status.linear, status.linear)),
            ("supervisor", supervisor),
            ("cores", _cores_words(status)),
            ("segment", status.segment),
            ("", f"{size(status.segment_bytes)}, {size(status.kv_bytes)} of them KV"),
        ]
    )
    tail = _facts(
        [
            ("queue", f"{status.num_queued} of at most {status.max_queue} requests wait for a daemon"),
            ("rows", _rows_words(status.rows_by_state)),
            ("pool", pool_bar(status.pool, min(_MAX_BAR, width - 14))),
            ("", _pool_words(status.pool)),
            *_counter_facts(status.counters),
        ]
    )
    parts: list[RenderableType] = [head, "", processes_table(status.processes), "", tail]
    if status.causes:
        parts.append("")
        style = "bold yellow" if status.health == "starting" else "bold red"
        parts += [Text(f"{status.health}: ", style=style).append(cause, style="not bold") for cause in status.causes]
    return Group(*parts)


def _cores_words(status: ClusterStatus) -> str:
    if status.num_cores is None:
        return "unknown"
    return CpuShare(num_cores=status.num_cores, quota=status.cpu_quota).words()


def segment_view(status: SegmentStatus, width: int, created: str) -> RenderableType:
    """What `pdctl inspect shm` shows.

    Args:
        created: the segment's time of creation, for people.
    """
    head = _facts(
        [
            ("segment", status.path),
            ("", f"layout {status.layout_version}, {status.state}, {size(status.total_bytes)}, made {created}"),
            (
                "geometry",
                f"{status.num_blocks} blocks of {status.block_tokens} tokens, {status.num_layers} layers, "
                f"{status.num_kv_heads} KV heads of {status.head_dim}, {status.dtype}",
            ),
            (
                "",
                f"{size(status.block_bytes)} a block, {size(status.token_bytes)} a token, {size(status.kv_bytes)} KV",
            ),
            ("", f"{status.max_rows} rows of {status.max_context} tokens, {status.max_participants} participants"),
            ("identity", f"model {status.fingerprint}, numerics {status.numerics_id}"),
            ("sequence", _sequence_words(status)),
            *_world_facts(status),
        ]
    )
    shown, step = block_map(status.block_map, width)
    parts: list[RenderableType] = [head, ""]
    parts += [processes_table(status.participants)] if status.participants else [Text("no participants")]
    pool = [("pool", pool_bar(status.pool, min(_MAX_BAR, width - 14))), ("", Text(_pool_words(status.pool)))]
    parts += ["", _facts([*pool, *_counter_facts(status.counters)]), "", shown, _legend(step), ""]
    parts += [_facts([("rows", _rows_words(status.rows_by_state))])]
    if status.rows:
        parts += [rows_table(status.rows, wide=width >= WIDE_COLUMNS)]
    parts += [
        Text(f"row {row.row} failed: ", style="red").append(row.error, style="default")
        for row in status.rows
        if row.error
    ]
    return Group(*parts)


def _sequence_words(status: SegmentStatus) -> str:
    words = f"{status.sequence}, {status.counters.num_lock_sections} sections"
    return f"{words}; this copy is torn: its numbers may contradict each other" if status.torn else words


def _world_facts(status: SegmentStatus) -> list[tuple[str, str | Text]]:
    """What a reader must know before believing PIDs and ages."""
    warnings = []
    if status.section is not None:
        section = status.section
        where = "" if section.row is None else f" of row {section.row}"
        what = f"{section.operation}{where} by slot {section.slot}, {section.num_stores} stores"
        if section.holder_alive:
            warnings.append(f"an operation is under way: {what}")
        else:
            warnings.append(f"an operation was cut off: {what}; the next one undoes it")
    if status.another_boot:
        warnings.append("from another boot: its PIDs mean nothing here")
    if status.foreign_pid_namespace:
        warnings.append("made in a foreign PID namespace: its PIDs are not those seen here")
    if not status.in_use:
        warnings.append("no participant is alive; ages end at its last move")
    return [("note", Text(warning, style="yellow")) for warning in warnings]
