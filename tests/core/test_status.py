"""Snapshots as records: what they count, what they say of the dead, and what they never hold."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdctl.cli import status as status_command
from pdctl.cli.tables import status_view
from pdctl.core import status as core_status
from pdctl.core.status import SegmentStatus, cluster_status, cluster_status_of, describe, find_segment, look, to_dict
from pdctl.core.survey import survey
from pdctl.transport.errors import CorruptSegmentError, IncompatibleError, NotFoundError
from pdctl.transport.layout import LAYOUT_VERSION, WORD, B, H, P, R, VerifyKv
from pdctl.transport.lock import Op
from pdctl.transport.names import new_segment_name
from pdctl.transport.rows import RowParams, RowState
from pdctl.transport.segment import ParticipantState, Role, Segment

Cluster = Any


def described(cluster: Cluster) -> SegmentStatus:
    return describe(look(cluster.segment_name), cluster.path)


# --- segments ----------------------------------------------------------------------------------------------


def test_rows_are_counted_by_state_and_shown(cluster: Cluster) -> None:
    status = described(cluster)
    assert status.rows_by_state == {
        "free": 3,
        "filling": 1,
        "queued": 1,
        "prefilling": 1,
        "ready": 1,
        "decoding": 2,
        "finished": 1,
        "cancelled": 1,
        "failed": 1,
    }
    rows = {row.row: row for row in status.rows}
    assert len(rows) == 9
    for state in ("queued", "prefilling", "ready", "decoding", "finished", "cancelled", "failed", "filling"):
        assert rows[cluster.rows[state]].state == state
    decoding = rows[cluster.rows["decoding"]]
    assert (decoding.num_prompt_tokens, decoding.num_output_tokens, decoding.kv_len) == (9, 1, 9)
    assert decoding.age_s is not None and decoding.age_s >= 0
    assert decoding.prefill_s is not None and decoding.ready_s is not None
    assert rows[cluster.rows["finished"]].finish_reason == "stop"
    assert rows[cluster.rows["queued"]].owner is None


def test_owners_are_alive_or_dead(cluster: Cluster) -> None:
    status = described(cluster)
    rows = {row.row: row for row in status.rows}
    live, dead = rows[cluster.rows["decoding"]].owner, rows[cluster.rows["dead"]].owner
    assert live is not None and dead is not None
    assert (live.role, live.pid, live.alive) == ("decode", os.getpid(), True)
    assert (dead.role, dead.pid, dead.alive) == ("decode", cluster.dead_pid, False)


def test_participants(cluster: Cluster) -> None:
    status = described(cluster)
    found = [(one.role, one.state, one.alive) for one in status.participants]
    assert found == [
        ("supervisor", "ready", True),
        ("router", "ready", True),
        ("prefill", "ready", True),
        ("decode", "ready", True),
        ("decode", "dead", False),
    ]
    prefill, dead = status.participants[2], status.participants[4]
    assert (prefill.num_prefill_tokens, prefill.num_tokens, prefill.bit_exact) == (32, 32, True)
    assert prefill.private_bytes is not None and prefill.private_bytes > 0
    assert prefill.cpu_s is not None and prefill.cpu_s > 0
    assert dead.pid == cluster.dead_pid
    assert dead.private_bytes is None and dead.cpu_s is None


def test_a_segment_is_nobodys_private_memory(cluster: Cluster) -> None:
    """Also while one process alone has mapped it."""
    name = new_segment_name(cluster.name)
    geometry = dataclasses.replace(cluster.geometry, num_blocks=1 << 16)
    segment = Segment.create(name, geometry, fingerprint=1, numerics_id=1)
    try:
        before = core_status.private_bytes(os.getpid())
        start, total = segment.layout.kv_offset, segment.layout.total_bytes
        segment.mapping.memory[start:total] = bytes(total - start)
        after = core_status.private_bytes(os.getpid())
    finally:
        name.path.unlink()
        segment.close()
    assert before is not None and after is not None
    assert total - start >= 32 << 20
    assert after - before < 16 << 20


def test_every_block_is_counted_once(cluster: Cluster) -> None:
    status = described(cluster)
    pool = status.pool
    assert len(status.block_map) == pool.num_blocks == 32
    assert pool.num_private + pool.num_cached + pool.num_free == pool.num_blocks
    assert pool.num_cached == pool.num_referenced + pool.num_reusable
    # The finished row's two prompt blocks wait; ready, decoding and the dead one's row hold two each.
    assert (pool.num_reusable, pool.num_referenced) == (2, 6)
    assert pool.num_cached == cluster.segment.words[H.CACHED_COUNT]
    assert pool.num_free == cluster.segment.words[H.FREE_COUNT]


def test_a_block_in_no_known_state_is_shown(cluster: Cluster) -> None:
    cluster.segment.words[cluster.segment.layout.block(31) + B.STATE] = 77
    status = described(cluster)
    assert status.block_map[31] == "?"
    assert status.pool.num_unknown == 1


def test_counters(cluster: Cluster) -> None:
    counters = described(cluster).counters
    assert counters.num_requests == 9
    assert (counters.num_finished, counters.num_failed, counters.num_cancelled) == (1, 1, 1)
    assert counters.num_prompt_tokens > 0
    assert (counters.num_output_tokens, counters.num_rejected) == (1, 0)


def test_no_token_and_no_control_character_leaves_the_segment(cluster: Cluster) -> None:
    text = json.dumps(to_dict(described(cluster)))
    assert "98765" not in text
    assert "\\u001b" not in text
    rows = {row.row: row for row in described(cluster).rows}
    assert rows[cluster.rows["failed"]].error == "out of ?[31mluck [bold]"


def test_broken_words_are_shown_not_believed(cluster: Cluster) -> None:
    """Every word of rows and participants may be anything: nothing raises."""
    words, layout = cluster.segment.words, cluster.segment.layout
    row = layout.row(cluster.rows["decoding"])
    for value in (1, 1 << 40, (1 << 64) - 1):
        for name in R:
            words[row + name] = value
        words[layout.row_states + cluster.rows["decoding"]] = value
        words[layout.participant(3) + P.STATE] = value
        words[layout.participant(3) + P.ROLE] = max(2, value)
        to_dict(described(cluster))


def test_a_copied_file_has_no_living(cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(cluster.path, copy)
    status = describe(look(copy), copy)
    assert not status.in_use and status.as_of == "last move"
    assert {one.state for one in status.participants} == {"dead"}
    assert all(row.owner is None or not row.owner.alive for row in status.rows)
    ages = [row.age_s for row in status.rows if row.age_s is not None]
    assert min(ages) == 0 and max(ages) < 3600
    link = tmp_path / "link"
    link.symlink_to(copy)
    assert describe(look(link), link).rows_by_state == status.rows_by_state


def poke(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(word * WORD)
        file.write(struct.pack("<Q", value))


def test_other_worlds_are_marked(cluster: Cluster, tmp_path: Path) -> None:
    assert not described(cluster).another_boot and not described(cluster).foreign_pid_namespace
    copy = tmp_path / "copy"
    shutil.copy(cluster.path, copy)
    poke(copy, H.PID_NAMESPACE, 5)
    assert describe(look(copy), copy).foreign_pid_namespace
    poke(copy, H.BOOT_ID, 5)
    status = describe(look(copy), copy)
    assert status.another_boot and not status.foreign_pid_namespace


# --- files that are no segments ----------------------------------------------------------------------------


def _garbage(path: Path, _: Path) -> None:
    path.write_bytes(os.urandom(1 << 16))


def _empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def _truncated(path: Path, segment: Path) -> None:
    path.write_bytes(segment.read_bytes()[:-4096])


def _header_only(path: Path, segment: Path) -> None:
    path.write_bytes(segment.read_bytes()[:4096])


def _other_layout(path: Path, segment: Path) -> None:
    shutil.copy(segment, path)
    poke(path, H.VERSION, 99)


def _impossible(path: Path, segment: Path) -> None:
    shutil.copy(segment, path)
    poke(path, H.GEOMETRY, 1 << 39)


def _directory(path: Path, _: Path) -> None:
    path.mkdir()


def _pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (_garbage, CorruptSegmentError, "not a pdctl segment"),
        (_empty, CorruptSegmentError, "0 bytes found"),
        (_truncated, CorruptSegmentError, "cut off"),
        (_header_only, CorruptSegmentError, "cut off"),
        (_other_layout, IncompatibleError, f"layout version 99 found, {LAYOUT_VERSION} expected"),
        (_impossible, CorruptSegmentError, "expected 1 to"),
        (_directory, CorruptSegmentError, "not a regular file"),
        (_pipe, CorruptSegmentError, "not a regular file"),
        (lambda path, _: None, NotFoundError, "not found"),
    ],
)
def test_what_is_no_segment_is_named(
    cluster: Cluster, tmp_path: Path, make: Callable[[Path, Path], None], error: type[Exception], words: str
) -> None:
    path = tmp_path / "file"
    make(path, cluster.path)
    with pytest.raises(error, match=words):
        look(path)


# --- verification ------------------------------------------------------------------------------------------


def test_a_sound_segment_verifies(cluster: Cluster) -> None:
    checked = core_status.verify(look(cluster.segment_name), cluster.segment_name)
    assert checked.problems == ()
    assert (checked.num_blocks, checked.num_rows, checked.undone) == (32, 12, None)


def test_a_wrong_reference_count_is_found(cluster: Cluster) -> None:
    block = cluster.segment.rows.block_table(cluster.rows["ready"])[0]
    cluster.segment.words[cluster.segment.layout.block(block) + B.REFS] += 1
    problems = core_status.verify(look(cluster.segment_name), cluster.segment_name).problems
    assert problems == (f"block {block}: 2 references counted, 1 found",)


def test_kv_that_is_not_what_was_sealed_is_found_where_it_lies(cluster: Cluster) -> None:
    words = cluster.segment.words
    words[H.VERIFY_KV] = VerifyKv.RECOMPUTE
    row = cluster.ready(9, "req-sealed")
    checked = core_status.verify(look(cluster.segment_name), cluster.segment_name)
    assert (checked.problems, checked.num_sealed) == ((), 2)
    block = cluster.segment.rows.block_table(row)[1]
    words[cluster.segment.layout.kv_offset // 8 + block * cluster.geometry.block_bytes // 8] ^= 1
    checked = core_status.verify(look(cluster.segment_name), cluster.segment_name)
    assert checked.problems == (f"block {block}: its KV is not what was sealed (checksum)",)
    # Whoever meets it condemns it, and everybody sees that.
    cluster.router.rows.cancel(row, cluster.claim_generation(row))
    again = cluster.submit(9, "req-again")
    assert cluster.decode.claim(again).cached_tokens == 4
    status = described(cluster)
    assert (status.pool.num_broken, status.counters.num_broken_blocks) == (1, 1)
    assert status.block_map.count("!") == 1 and status.block_map[block] == "!"


def test_an_operation_cut_off_by_a_death_is_undone_in_the_copy(cluster: Cluster) -> None:
    pid = cluster.die_in_a_section()
    status = described(cluster)
    assert status.torn and status.section is not None
    assert (status.section.operation, status.section.row) == ("grow", cluster.rows["ready"])
    assert not status.section.holder_alive
    assert pid in [one.pid for one in status.participants]
    before = bytes(cluster.segment.words[: cluster.segment.layout.meta_words])
    checked = core_status.verify(look(cluster.segment_name), cluster.segment_name)
    assert checked.problems == () and checked.undone == "GROW"
    assert bytes(cluster.segment.words[: cluster.segment.layout.meta_words]) == before


def test_a_journal_that_leads_nowhere_is_a_problem(cluster: Cluster) -> None:
    words = cluster.segment.words
    words[H.INTENT_OP], words[H.INTENT_COUNT], words[H.INTENT_INCARNATION] = Op.CLAIM, 1 << 50, 999
    (problem,) = core_status.verify(look(cluster.segment_name), cluster.segment_name).problems
    assert "cannot undo" in problem


def test_a_section_under_way_makes_a_torn_snapshot(cluster: Cluster) -> None:
    with cluster.decode.segment.lock.section(Op.GROW):
        snapshot = look(cluster.segment_name)
    status = describe(snapshot, cluster.path)
    assert status.torn and status.section is not None and status.section.holder_alive


# --- finding -----------------------------------------------------------------------------------------------


def test_segments_are_found_running_crashed_or_not_at_all(cluster: Cluster) -> None:
    elsewhere = find_segment(cluster.state_dir, cluster.name)
    assert elsewhere.name == cluster.segment_name
    assert elsewhere.note is not None and "another state directory" in elsewhere.note
    cluster.run()
    assert find_segment(cluster.state_dir, cluster.name).note is None
    cluster.lock.release(remove=False)
    cluster.supervisor.segment.detach(cluster.supervisor.me)
    left = find_segment(cluster.state_dir, cluster.name)
    assert left.name == cluster.segment_name
    assert left.note is not None and "crashed" in left.note
    with pytest.raises(NotFoundError, match="crashed"):
        cluster_status(cluster.state_dir, cluster.name)
    with pytest.raises(NotFoundError, match="not running"):
        find_segment(cluster.state_dir, "no-such-cluster")


def test_the_queue_is_whoever_waits_for_a_daemon(cluster: Cluster) -> None:
    """One row is queued, one is past prefill and waits for decode; then one that went to decode directly."""
    assert described(cluster).num_queued == 2
    cluster.router.me.put(P.WAITING, 3)
    claim = cluster.router.rows.submit(
        cluster.router.me,
        request_id="short",
        tokens=[5],
        limit_tokens=3,
        params=RowParams(),
        local_prefill_tokens=0,
    )
    assert cluster.segment.rows.state(claim.row) is RowState.READY
    assert described(cluster).num_queued == 6
    assert cluster_status_of(cluster.state(max_queue=7), described(cluster)).max_queue == 7


# --- clusters ----------------------------------------------------------------------------------------------


def test_a_healthy_cluster(cluster: Cluster) -> None:
    cluster.run()
    status = cluster_status(cluster.state_dir, cluster.name)
    assert (status.health, status.causes) == ("healthy", ())
    assert (status.supervisor_pid, status.supervisor_state) == (os.getpid(), "running")
    assert 60 <= status.uptime_s < 3600
    assert status.bit_exact is True
    assert status.linear == "native" and status.numerics.startswith("float32")


def test_one_inexact_daemon_makes_the_cluster_inexact(cluster: Cluster) -> None:
    cluster.decode.me.put(P.BIT_EXACT, 1)
    assert cluster_status_of(cluster.state(), described(cluster)).bit_exact is False
    cluster.decode.me.put(P.BIT_EXACT, 0)
    assert cluster_status_of(cluster.state(), described(cluster)).bit_exact is None


def test_a_stopped_supervisor_means_that_recovery_is_off(cluster: Cluster) -> None:
    pid = cluster.child(lambda: None)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    status = cluster_status_of(cluster.state(supervisor_pid=pid), described(cluster))
    assert status.supervisor_state == "stopped" and status.health == "degraded"
    assert "recovery is off" in status.causes[0] and f"kill -CONT {pid}" in status.causes[0]


def test_a_stopped_daemon_is_not_ready(cluster: Cluster) -> None:
    cluster.decode.me.put(P.STATE, ParticipantState.STARTING)

    def join() -> None:
        # A segment of the child's own: it must hold its guard byte for as long as it lives.
        segment = Segment.open(cluster.segment_name)
        me = segment.attach(Role.DECODE)
        me.put(P.STATE, ParticipantState.READY)
        kept.append(segment)

    kept: list[Segment] = []
    pid = cluster.child(join)
    assert cluster_status_of(cluster.state(), described(cluster)).health == "healthy"
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    (cause,) = cluster_status_of(cluster.state(), described(cluster)).causes
    assert cause.startswith("no decode is ready") and f"pid {pid} is stopped" in cause


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_decode": 2}, "1 of 2 decode daemons are ready"),
        ({"phase": "stopping"}, "going down"),
    ],
)
def test_causes(cluster: Cluster, changes: dict[str, Any], words: str) -> None:
    (cause,) = cluster_status_of(cluster.state(**changes), described(cluster)).causes
    assert words in cause


def test_a_cluster_that_starts_is_not_degraded(cluster: Cluster) -> None:
    """What is missing is shown, but it is no fault yet; a start whose supervisor is stopped or gone is one."""
    cluster.prefill.me.put(P.STATE, ParticipantState.STARTING)
    found = cluster_status_of(cluster.state(phase="starting"), described(cluster))
    assert (found.health, found.causes) == ("starting", (f"no prefill is ready (pid {os.getpid()} is starting)",))
    console = Console(width=100, file=io.StringIO())
    console.print(status_view(found, 100))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "degraded" not in shown and "starting: no prefill is ready" in shown
    gone = cluster.state(phase="starting", supervisor_pid=1 << 30)
    assert cluster_status_of(gone, described(cluster)).health == "degraded"
    assert status_command.EXIT_CODES == {"healthy": 0, "starting": 3, "degraded": 8}


def test_a_drained_daemon_is_no_fault_unless_nobody_else_works(cluster: Cluster) -> None:
    cluster.decode.me.put(P.STATE, ParticipantState.DRAINED)
    (cause,) = cluster_status_of(cluster.state(), described(cluster)).causes
    assert cause.startswith("no decode is ready") and f"pid {os.getpid()} is drained" in cause
    other = type(cluster.decode)(cluster, Role.DECODE, 2)
    try:
        assert cluster_status_of(cluster.state(num_decode=2), described(cluster)).causes == ()
        (cause,) = cluster_status_of(cluster.state(num_decode=3), described(cluster)).causes
        assert cause.startswith("1 of 3 decode daemons are ready")
        drained, ready = described(cluster).participants[3], described(cluster).participants[5]
        assert [(one.name, one.state) for one in (drained, ready)] == [("decode-0", "drained"), ("decode-2", "ready")]
    finally:
        other.segment.close()


def test_who_gave_up_is_named_with_what_to_do(cluster: Cluster) -> None:
    state = dataclasses.replace(cluster.state(), gave_up={"prefill-1": 8})
    (cause,) = cluster_status_of(state, described(cluster)).causes
    place = f"--name {cluster.name} --state-dir {cluster.state_dir}"
    assert cause == f"prefill-1 gave up after 8 deaths in a row; pdctl restart prefill-1 {place}"


def test_what_does_not_come_up_is_named_with_its_words(cluster: Cluster) -> None:
    place = f"--name {cluster.name} --state-dir {cluster.state_dir}"
    state = dataclasses.replace(cluster.state(), trouble={"zygote": "model.safetensors is not as it was"})
    (cause,) = cluster_status_of(state, described(cluster)).causes
    assert cause == f"zygote does not start: model.safetensors is not as it was; pdctl logs zygote {place}"
    (cause,) = cluster_status_of(dataclasses.replace(state, gave_up={"zygote": 8}), described(cluster)).causes
    said = "gave up after 8 deaths in a row: model.safetensors is not as it was"
    assert cause == f"zygote {said}; pdctl restart zygote {place}"


def test_no_ready_prefill(cluster: Cluster) -> None:
    cluster.prefill.me.put(P.STATE, ParticipantState.STARTING)
    (cause,) = cluster_status_of(cluster.state(), described(cluster)).causes
    assert cause == f"no prefill is ready (pid {os.getpid()} is starting)"


# --- what programs rely on ---------------------------------------------------------------------------------

ROW_KEYS = (
    "row state request_id owner num_prompt_tokens num_output_tokens limit_tokens kv_len num_blocks "
    "num_published_blocks num_cached_tokens num_attempts num_preemptions num_adoptions cancel_requested "
    "preempt_requested finish_reason error age_s queued_s prefill_s ready_s first_token_s"
)
PROCESS_KEYS = (
    "slot name role pid alive state incarnation num_threads num_rows num_claims num_prefill_tokens "
    "num_decode_tokens num_local_prefill_tokens num_cached_tokens num_adopted_rows num_steps busy_s "
    "bit_exact draining private_bytes cpu_s"
)
POOL_KEYS = (
    "num_blocks num_private num_cached num_referenced num_reusable num_free num_broken num_unknown block_tokens "
    "block_bytes token_bytes"
)
COUNTER_KEYS = (
    "num_requests num_finished num_failed num_cancelled num_preemptions num_adoptions num_deaths "
    "num_repairs num_evictions num_broken_blocks num_cached_tokens num_prompt_tokens num_lock_sections num_rejected "
    "num_output_tokens"
)
SEGMENT_KEYS = (
    "schema name path layout_version state total_bytes kv_bytes num_blocks block_tokens num_layers "
    "num_kv_heads head_dim dtype max_rows max_context max_participants block_bytes token_bytes fingerprint "
    "numerics_id created_unix_ns sequence in_use as_of torn section another_boot foreign_pid_namespace "
    "participants rows_by_state rows pool counters block_map num_queued"
)
CLUSTER_KEYS = (
    "schema name health causes phase model model_path dtype numerics numerics_id bit_exact attention linear "
    "url started_unix_ns uptime_s supervisor_pid supervisor_state wanted_prefill wanted_decode colocated "
    "log_dir segment segment_bytes kv_bytes processes rows_by_state pool counters num_queued max_queue "
    "num_cores cpu_quota"
)


def test_json_keys_are_stable(cluster: Cluster) -> None:
    """A key that goes or changes its meaning needs a new STATUS_SCHEMA; new ones are added here."""
    segment = json.loads(json.dumps(to_dict(described(cluster))))
    assert " ".join(segment) == SEGMENT_KEYS
    assert {" ".join(row) for row in segment["rows"]} == {ROW_KEYS}
    assert " ".join(segment["pool"]) == POOL_KEYS
    assert " ".join(segment["counters"]) == COUNTER_KEYS
    assert [*segment["rows_by_state"]] == [state.name.lower() for state in RowState]
    status = json.loads(json.dumps(to_dict(cluster_status_of(cluster.state(), described(cluster)))))
    assert " ".join(status) == CLUSTER_KEYS
    assert {" ".join(one) for one in status["processes"]} == {PROCESS_KEYS}
    assert status["schema"] == segment["schema"] == 1


def test_a_segment_without_a_name_is_looked_at_through_its_supervisor(cluster: Cluster) -> None:
    cluster.run()
    assert cluster_status(cluster.state_dir, cluster.name).causes == ()
    cluster.path.unlink()
    status = cluster_status(cluster.state_dir, cluster.name)
    (cause,) = status.causes
    assert f"the segment's name {cluster.path} was removed" in cause
    assert status.rows_by_state["decoding"] == 2
    [summary] = [one for one in survey(cluster.state_dir) if one.name == cluster.name]
    assert (summary.phase, summary.ready) == ("running", {"prefill": 1, "decode": 1})
    cluster.path.write_text("somebody's")
    assert cluster_status(cluster.state_dir, cluster.name).causes == (cause,)


def test_what_the_supervisor_cannot_do_is_a_cause(cluster: Cluster) -> None:
    state = dataclasses.replace(cluster.state(), warnings={"logs": "logs: gone\x1b"})
    assert cluster_status_of(state, described(cluster)).causes == ("logs: gone?",)
