"""A small segment in shared memory with something of everything in it, and the cluster files around it."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdctl.core.cluster import ClusterLock, ClusterState, write_state
from pdctl.core.config import ClusterSpec
from pdctl.core.numerics import numerics
from pdctl.transport.layout import DType, Geometry, P
from pdctl.transport.lock import Op
from pdctl.transport.names import new_segment_name
from pdctl.transport.rows import Actor, Claim, FinishReason, RowParams, RowState
from pdctl.transport.segment import ParticipantState, Role, Segment, process_start_time

# Token ids that nothing else in an output looks like.
FIRST_TOKEN = 987_650_000
BLOCK_TOKENS = 4
WATCHDOG_S = 30


class Member:
    """A participant with an open file of its own, as another process would have."""

    def __init__(self, world: BusyCluster, role: Role, index: int = 0) -> None:
        self.segment = Segment.open(world.segment_name)
        self.rows = self.segment.rows
        self.me = self.segment.attach(role)
        self.me.put(P.INDEX, index)
        self.me.put(P.STATE, ParticipantState.READY)
        self.me.put(P.THREADS, 2)
        self.me.put(P.BIT_EXACT, 2)

    def claim(self, row: int) -> Claim:
        claim = self.rows.claim(self.me, row, alone=True)
        assert claim is not None
        self.me.add(P.CLAIMS, 1)
        return claim


class BusyCluster:
    """Rows in every state, blocks of every kind, and a decode daemon that was killed with a row in hand.

    Attributes:
        rows: a row's number by its state's name; "dead" is the killed daemon's.
        dead_pid: of the killed daemon.
    """

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.name = f"t-{secrets.token_hex(4)}"
        self.segment_name = new_segment_name(self.name)
        self.path = self.segment_name.path
        self.geometry = Geometry(
            num_blocks=32,
            block_tokens=BLOCK_TOKENS,
            num_layers=2,
            num_kv_heads=1,
            head_dim=8,
            dtype=DType.FLOAT32,
            max_rows=12,
            max_context=64,
            max_participants=12,
            ring_events=16,
        )
        self.lock = ClusterLock(state_dir, self.name)
        self._children: list[int] = []
        numerics_id = numerics("float32").id
        self.segment = Segment.create(self.segment_name, self.geometry, fingerprint=0xABCDEF, numerics_id=numerics_id)
        self.supervisor = Member(self, Role.SUPERVISOR)
        self.router = Member(self, Role.ROUTER)
        self.prefill = Member(self, Role.PREFILL)
        self.decode = Member(self, Role.DECODE)
        self.rows: dict[str, int] = {}

    # --- rows ----------------------------------------------------------------------------------------------

    def submit(self, number: int, request_id: str) -> int:
        """A prompt of 9 tokens; those of one `number` share all of them."""
        tokens = [FIRST_TOKEN + 100 * number + index for index in range(9)]
        claim = self.router.rows.submit(
            self.router.me,
            request_id=request_id,
            tokens=tokens,
            limit_tokens=12,
            params=RowParams(),
            local_prefill_tokens=0,
        )
        assert claim is not None
        return claim.row

    def ready(self, number: int, request_id: str) -> int:
        row = self.submit(number, request_id)
        if self.router.rows.state(row) is RowState.QUEUED:
            self.prefill.claim(row)
            self.prefill.rows.commit_kv(row, 8)
            self.prefill.me.add(P.PREFILL_TOKENS, 8)
            self.prefill.rows.publish(row)
            self.prefill.rows.hand_over(row)
        return row

    def fill(self) -> None:
        rows, decode = self.rows, self.decode
        rows["finished"] = self.ready(1, "req-finished")
        claim = decode.claim(rows["finished"])
        decode.rows.commit_kv(claim.row, 9)
        decode.rows.commit_token(claim.row, claim.generation, 9, FIRST_TOKEN + 9_000)
        decode.rows.finish(claim.row, FinishReason.STOP)
        rows["cancelled"] = self.submit(2, "req-cancelled")
        generation = self.claim_generation(rows["cancelled"])
        self.router.rows.cancel(rows["cancelled"], generation)
        rows["failed"] = self.submit(3, "req-failed")
        self.prefill.claim(rows["failed"])
        self.prefill.rows.fail(rows["failed"], "out of \x1b[31mluck [bold]", Actor.PREFILL)
        rows["ready"] = self.ready(4, "req-ready")
        rows["decoding"] = self.ready(5, "req-[red]decoding\x1b[0m")
        claim = decode.claim(rows["decoding"])
        decode.rows.commit_kv(claim.row, 9)
        decode.rows.commit_token(claim.row, claim.generation, 9, FIRST_TOKEN + 9_001)
        decode.me.put(P.LOAD, 1)
        decode.me.add(P.DECODE_TOKENS, 1)
        rows["prefilling"] = self.submit(6, "req-prefilling")
        self.prefill.claim(rows["prefilling"])
        rows["queued"] = self.submit(7, "req-queued-" + "x" * 80)
        rows["dead"] = self.ready(8, "req-of-the-dead")
        self.dead_pid = self.die_after(lambda member: member.claim(rows["dead"]))
        filling = self.router.rows._take_free_row(self.router.me)
        assert filling is not None
        rows["filling"] = filling

    def claim_generation(self, row: int) -> int:
        from pdctl.transport.layout import R

        return self.router.rows.get(row, R.GENERATION)

    # --- processes -----------------------------------------------------------------------------------------

    def die_after(self, work: Callable[[Member], object]) -> int:
        """A decode daemon in a process of its own that is killed after `work`; returns its PID."""
        pid = self.child(lambda: work(Member(self, Role.DECODE, 1)))
        os.kill(pid, signal.SIGKILL)
        self._children.remove(pid)
        os.waitpid(pid, 0)
        return pid

    def die_in_a_section(self) -> int:
        def work(member: Member) -> None:
            section = member.segment.lock.section(Op.GROW, self.rows["ready"]).__enter__()
            member.segment.pool.allocate(section, self.rows["ready"])

        return self.die_after(work)

    def child(self, body: Callable[[], object]) -> int:
        """A process that has done `body` and now waits to be killed."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(WATCHDOG_S)
                body()
                os.write(write, b"!")
                while True:
                    time.sleep(1)
            finally:
                os._exit(1)
        os.close(write)
        self._children.append(pid)
        done = os.read(read, 1)
        os.close(read)
        assert done == b"!", "the child failed"
        return pid

    # --- the cluster's files -------------------------------------------------------------------------------

    def spec(self, **changes: object) -> ClusterSpec:
        values: dict[str, object] = {
            "name": self.name,
            "state_dir": self.state_dir,
            "model_path": Path("/models/tiny"),
            "model_name": "tiny",
            "fingerprint": 0xABCDEF,
            "num_layers": 2,
            "num_kv_heads": 1,
            "head_dim": 8,
            "vocab_size": 100,
            "eos_token_ids": (2,),
            "dtype": "float32",
        }
        return ClusterSpec(**{**values, **changes})  # type: ignore[arg-type]

    def state(self, *, supervisor_pid: int | None = None, phase: str = "running", **spec: object) -> ClusterState:
        pid = os.getpid() if supervisor_pid is None else supervisor_pid
        return ClusterState(
            name=self.name,
            phase=phase,
            supervisor_pid=pid,
            supervisor_start_time=process_start_time(pid) or 0,
            segment=str(self.segment_name),
            url="http://127.0.0.1:8000",
            started_unix_ns=time.time_ns() - 65 * 10**9,
            spec=self.spec(**spec),
        )

    def run(self, state: ClusterState | None = None) -> None:
        """Hold the lock and write the state file, as a supervisor does."""
        assert self.lock.acquire(0)
        write_state(self.state() if state is None else state)

    def close(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.lock.release(remove=True)
        for member in (self.supervisor, self.router, self.prefill, self.decode):
            member.segment.close()
        self.segment.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusyCluster]:
    """A BusyCluster, filled; its files are gone after the test."""
    # Sockets' paths must fit: not below pytest's long directories.
    state_dir = Path(f"/tmp/pdctl-test-{secrets.token_hex(4)}")
    state_dir.mkdir(mode=0o700)
    made = BusyCluster(state_dir)
    try:
        made.fill()
        yield made
    finally:
        made.close()
        for left in sorted(state_dir.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() else left.unlink()
        state_dir.rmdir()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pdctl's cache directory: the test's own, not made yet."""
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDCTL_SMOLLM2_WHEEL", raising=False)
    return tmp_path / "cache"
