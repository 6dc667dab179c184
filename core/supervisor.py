"""The supervisor: makes the segment, starts everything, restarts what dies, takes it all away again.

    lock -> stale leftovers away -> HTTP socket -> segment -> router, zygote -> daemons -> ready
    a death: pidfd readable -> repair and reap (rows to others) -> a new process in its place
    a wish on the control socket: operations.py, resumed after every event
    SIGTERM: close the segment -> stop all -> unlink -> state away -> lock away

Never touches KV and loads no torch; serves HTTP only by refusing it while no router runs. What vanishes on disk, or
fails for want of memory, processes or descriptors, ends nothing: it is made or tried again.

Its stdout is a stream of JSON events for `pdctl up`:
{"event": "stage", "name", "state": "start" | "done", "detail"}, {"event": "progress", "name", "done", "total"},
{"event": "ready", "url"} or {"event": "error", "message", "hint", "exit_code"}.

The supervisor's death ends all: every child is bound to it by PDEATHSIG.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pdctl.core import logs
from pdctl.core.child import MAX_QUICK_DEATHS, Child
from pdctl.core.cluster import (
    ClusterLock,
    ClusterState,
    advice,
    already_running,
    command,
    read_state,
    refuse_if_running,
    remove_stale,
    spec_path,
    write_state,
)
from pdctl.core.config import ClusterSpec, check_scale
from pdctl.core.control import ControlClient, ControlServer
from pdctl.core.faults import Faults
from pdctl.core.inheritance import handed_over
from pdctl.core.numerics import environment, numerics
from pdctl.core.operations import DAEMONS, Operations
from pdctl.core.private_files import private_directory
from pdctl.core.process import (
    ProcessHandle,
    become_subreaper,
    check_pidfds,
    descendants,
    die_with_parent,
    exit_text,
    outlive_parent,
    set_process_name,
)
from pdctl.core.stand_in import StandIn
from pdctl.core.upkeep import Upkeep
from pdctl.core.wake import keep_bell
from pdctl.core.watchdog import Look, Watchdog, state_and_cpu_s
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import (
    AlreadyRunningError,
    CapacityError,
    DeadlineError,
    NotFoundError,
    PdctlError,
    UsageError,
)
from pdctl.transport.layout import H, P, VerifyKv
from pdctl.transport.mapping import leads_to, unlink_if_orphaned
from pdctl.transport.names import cluster_dir, control_path, log_dir, new_segment_name
from pdctl.transport.recovery import reap, sweep
from pdctl.transport.segment import ParticipantState, Role, Segment, process_start_time

_log = logging.getLogger("supervisor")
_TICK_S = 1.0
_LOCK_DEADLINE_S = 0.5
_STOPPING_WAIT_S = 20.0
_TERM_GRACE_S = 5.0
_KILL_GRACE_S = 10.0
# For one process among others that go on: a chunk or step may be long, and nobody is in a hurry.
_LEAVE_GRACE_S = 15.0
_MAX_MESSAGE_BYTES = 1 << 16
# Of what a process says about its end: state.json holds it.
_MAX_WORDS = 1000
# For a router to start: so long its clients may wait in the listener's queue.
_ROUTER_PATIENCE_S = 10.0
_EXIT_CODES = range(UsageError.exit_code, AlreadyRunningError.exit_code + 1)


@dataclass(frozen=True, kw_only=True)
class _Dead:
    """A participant that is proven dead, until its rows are taken. `counted`: with another place of its process."""

    name: str
    slot: int
    incarnation: int
    cause: str
    counted: bool


class Supervisor:
    """
    Args:
        outlives_parent: whether to go on when the process that started us ends, once the cluster is up.
    """

    def __init__(self, spec: ClusterSpec, *, outlives_parent: bool = False) -> None:
        self._spec = spec
        self._outlives_parent = outlives_parent
        self._directory = cluster_dir(spec.state_dir, spec.name)
        self._logs = log_dir(spec.state_dir, spec.name)
        self._lock = ClusterLock(spec.state_dir, spec.name)
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._wakeup, writer = socket.socketpair()
        for end in (self._wakeup, writer):
            end.setblocking(False)
        self._wakeup_writer = writer
        self._dead: list[_Dead] = []
        self._announced = False
        self._wire: socket.socket | None = None
        self._loaded = False
        self._zygote = Child(name="zygote", role=None)
        self._router = Child(name="router", role=Role.ROUTER)
        self._daemons = _daemons(spec)
        self._operations = Operations(self)
        self._watchdog = Watchdog()
        self._judge_at = 0.0
        self._upkeep_at = 0.0
        self._faults = Faults()
        self._router_away_since: float | None = time.monotonic()
        self._has_name = True
        self._segment: Segment
        self._made: os.stat_result
        self._door: int
        self._upkeep: Upkeep
        self._stand_in: StandIn
        self._listener: socket.socket
        self._bell: Bell
        self._control: ControlServer

    # --- start ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Bring the cluster up, keep it up until SIGTERM, take it down."""
        # Before there is anything to take away: a signal during the start must not leave half of it.
        signal.set_wakeup_fd(self._wakeup_writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        private_directory(self._spec.state_dir)
        if not self._lock.acquire(0):
            self._wait_for_the_one_before()
        try:
            self._lock.sign()
            logs.begin_run()
            self._lock.forget_state()
            self._open()
            try:
                self._loop()
            finally:
                self._close()
        finally:
            self._lock.release(remove=True)

    def _wait_for_the_one_before(self) -> None:
        """A cluster that is stopping is waited for; one that runs or starts is an error."""
        deadline = time.monotonic() + _STOPPING_WAIT_S
        while True:
            refuse_if_running(self._spec.state_dir, self._spec.name)
            if self._lock.acquire(0.2):
                return
            if self._stopping or time.monotonic() > deadline:
                directory, name = self._spec.state_dir, self._spec.name
                raise already_running(directory, name, read_state(directory, name))

    def _open(self) -> None:
        spec = self._spec
        removed = remove_stale(spec.state_dir, spec.name)
        for name in removed:
            emit(event="stage", name="stale segment", state="done", detail=f"reclaimed {name}")
        self._listener = self._listen()
        host, port = self._listener.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        name = new_segment_name(spec.name)
        state = ClusterState(
            name=spec.name,
            phase="starting",
            supervisor_pid=os.getpid(),
            supervisor_start_time=process_start_time(os.getpid()) or 0,
            segment=str(name),
            url=url,
            started_unix_ns=time.time_ns(),
            spec=spec,
        )
        emit(event="stage", name="segment", state="start", detail=str(name))
        self._segment = Segment.create(
            name,
            spec.geometry,
            fingerprint=spec.fingerprint,
            numerics_id=numerics(spec.dtype).id,
            verify_kv=VerifyKv[spec.verify_kv.upper()],
        )
        self._made = os.fstat(self._segment.mapping.fd)
        self._upkeep = Upkeep(state, self._lock)
        try:
            self._door = self._segment.mapping.door()
            self._me = self._segment.attach(Role.SUPERVISOR)
            # The supervisor never waits long: whoever holds the lock too long is its to judge.
            self._segment.lock.deadline_s = _LOCK_DEADLINE_S
            self._me.put(P.STATE, ParticipantState.READY)
            self._bell = Bell(self._directory, self._me.slot)
            self._control = ControlServer(control_path(self._directory), self._selector, self._on_request)
            self._stand_in = StandIn(
                self._listener, self._selector, lambda: self._stands(self._router, ParticipantState.READY)
            )
            self._upkeep.begin()
        except BaseException:
            self._remove_segment()
            raise
        emit(
            event="stage",
            name="segment",
            state="done",
            detail=f"{self._segment.layout.total_bytes >> 20} MiB",
        )

    def _listen(self) -> socket.socket:
        host, port = self._spec.host, self._spec.port
        hint = f"{self.hint('up')} --port 0 (any free port)"
        local = f"{self.hint('up')} --host 127.0.0.1"
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except socket.gaierror as error:
            raise UsageError(f"--host {host}: {error.strerror}", hint=local) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AlreadyRunningError(f"port {port} on {host}: {_port_holder(port)} has it", hint=hint) from error
            if error.errno == errno.EADDRNOTAVAIL:
                hint = local
            raise UsageError(f"--host {host} --port {port}: {error.strerror}", hint=hint) from error
        return listener

    # --- the loop ------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: _drain(self._wakeup))
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell.drain)
        turn = (
            self._start_due,
            self._kill_overdue,
            self._kill_hung,
            self._look_at_readiness,
            self._wish_drains,
            self._operations.advance,
            self._control.expire,
            self._answer_for_router,
        )
        while not self._stopping:
            for step in turn:
                self._guarded(step.__name__, step)
            for key, _ in self._selector.select(self._pause()):
                if not self._stopping:
                    self._guarded("an event", key.data)
            self._guarded("recovery", self._recover)
            self._guarded("upkeep", self._keep_up)
            if pause_s := self._faults.pause_s():
                # A signal ends the pause.
                select.select([self._wakeup], [], [], pause_s)
        if not self._announced:
            message = f"cluster {self._spec.name!r}: taken down while it was starting"
            emit(event="error", message=message, hint=None, exit_code=1)

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        """Call; once the cluster is up, an exception ends nothing. Before, it is why there is no cluster."""
        try:
            call()
        except Exception as error:
            if not self._announced:
                raise
            self._faults.note(what, error)

    def _keep_up(self) -> None:
        """Once a second: what others find us by is where it should be, or made again."""
        now = time.monotonic()
        if now < self._upkeep_at:
            return
        self._upkeep_at = now + _TICK_S
        heard = self._bell.fileno()
        if keep_bell(self._bell):
            self._selector.unregister(heard)
            self._selector.register(self._bell, selectors.EVENT_READ, self._bell.drain)
        self._note_name()
        self._upkeep.warn("supervisor", self._faults.warning())
        if not self._upkeep.look(self._control):
            _log.error("another supervisor has taken the name in %s: going down", self._directory)
            self._stopping = True

    def _note_name(self) -> None:
        """Log once when the segment's name is gone; who looks at the segment sees it for himself."""
        has_name = leads_to(self._state.segment_name, self._door)
        if has_name != self._has_name:
            self._has_name = has_name
            what = "has its name again" if has_name else "lost its name in /dev/shm: it is passed on by descriptor"
            _log.warning("segment %s: %s", self._state.segment, what)

    @property
    def _state(self) -> ClusterState:
        return self._upkeep.state

    def _pause(self) -> float:
        due = [
            self._operations.next_deadline(),
            self._control.next_deadline(),
            self._stand_in.next_deadline(),
        ]
        due += [at for child in self.children for at in (child.start_at, child.kill_at)]
        return max(0.0, min([_TICK_S, *(at - time.monotonic() for at in due if at is not None)]))

    @property
    def children(self) -> list[Child]:
        return [self._zygote, self._router, *self._daemons]

    def _on_signal(self, *_: Any) -> None:
        self._stopping = True

    def _start_due(self) -> None:
        for child in self.children:
            if child.handle is None and child.start_at is not None and child.start_at <= time.monotonic():
                try:
                    self._start(child)
                except OSError as error:
                    self._put_off(child, str(error))

    def _put_off(self, child: Child, why: str) -> None:
        """The system did not make its process: try again later, for as long as it takes."""
        if not self._announced:
            raise CapacityError(f"{child.name}: cannot be started: {why}", hint=self.hint("up"))
        pause_s = child.put_off()
        _log.error("%s: cannot be started: %s; tried again in %.1f s", child.name, why, pause_s)
        self._upkeep.warn(child.name, f"{child.name} cannot be started: {why} (tried {child.num_refused} times)")

    def _start(self, child: Child) -> None:
        """Start it, or ask the zygote for it.

        Raises:
            OSError: there is no memory, process or descriptor to be had; nothing of it is left.
        """
        child.start_at = None
        child.ready = False
        if child is self._zygote:
            self._start_zygote()
        elif child is self._router:
            emit(event="stage", name="router", state="start")
            self._spawn(child, "pdctl.core.router", self._listener.fileno())
        elif self._loaded and self._wire is not None:
            emit(event="stage", name=child.name, state="start")
            child.log_size = self._log_size(child)
            # The same image of the same weights, with as many threads: one proof is enough for all.
            proofs = [one.proof_ns for one in self._daemons if one.kind == child.kind and one.proof_ns is not None]
            request = {"fork": child.kind, "index": child.index, "proof_ns": max(proofs, default=None)}
            with contextlib.suppress(ConnectionError):  # the zygote's death is told by its pidfd
                self._wire.send(json.dumps(request).encode())
                child.asked = True

    def _start_zygote(self) -> None:
        emit(event="stage", name="weights", state="start")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            self._spawn(self._zygote, "pdctl.core.zygote", theirs.fileno())
            self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear_zygote(ours))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        # Requests wait until it has loaded: "loaded" asks for every daemon that is missing.
        self._wire, self._loaded = ours, False

    def _spawn(self, child: Child, module: str, fd: int) -> None:
        """Start a process with the specification, the segment, and one descriptor more.

        Raises:
            OSError: see `_start`.
        """
        spec = self._spec
        child.log_size = self._log_size(child)
        env = {**os.environ, **environment(numerics(spec.dtype))}
        path = spec_path(spec.state_dir, spec.name)
        with handed_over(spec, path, self._state.segment, self._door) as (given, fds), self._log_of(child) as log:
            command = [sys.executable, "-m", module, "--parent", str(os.getpid()), "--fd", str(fd), *given]
            child.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[fd, *fds], env=env, cwd="/"
            )
        self._watch(child, child.popen.pid)

    @contextmanager
    def _log_of(self, child: Child) -> Iterator[int]:
        """Where a process writes what it prints before its own logging stands: its log, or else nowhere."""
        self._upkeep.keep_logs()
        try:
            fd = logs.open_log(self._logs, child.name)
        except OSError as error:
            _log.error("%s.log: %s: what it prints at its start is lost", child.name, error)
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _log_size(self, child: Child) -> int:
        try:
            return (self._logs / f"{child.name}.log").stat().st_size
        except OSError:
            return 0

    def hint(self, verb: str) -> str:
        return command(verb, self._spec.name, self._spec.state_dir)

    def _watch(self, child: Child, pid: int) -> None:
        """Take a process as this child's.

        Raises:
            OSError: it cannot be watched, and was killed.
        """
        try:
            handle = ProcessHandle(pid)
            try:
                self._selector.register(handle, selectors.EVENT_READ, lambda: self._on_death(child))
            except OSError:
                handle.close()
                raise
        except OSError:
            # A child of ours: the number is its own until we take its exit status.
            os.kill(pid, signal.SIGKILL)
            if child.popen is not None:
                child.popen.wait()
                child.popen = None
            raise
        child.begin(handle)
        self._upkeep.warn(child.name, None)
        _log.info("%s: started, pid %d", child.name, pid)
        if not child.wanted:
            self._end_in_order(child)

    def _hear_zygote(self, wire: socket.socket) -> None:
        while True:
            try:
                message = wire.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._selector.unregister(wire)
                wire.close()
                if self._wire is wire:
                    self._wire = None
                    self._loaded = False
                    self._forget_requests()
                return
            told = json.loads(message)
            if "loading" in told:
                emit(event="progress", name="weights", done=told["loading"][0], total=told["loading"][1])
            elif "loaded" in told:
                self._loaded = True
                self._zygote.ready = True
                self._note_trouble(self._zygote, None)
                emit(event="stage", name="weights", state="done")
                for child in self._daemons:
                    if child.handle is None and not child.gave_up:
                        child.start_at = time.monotonic()
            elif "forked" in told:
                for child in self._named(told):
                    try:
                        self._watch(child, told["forked"])
                    except OSError as error:
                        self._put_off(child, str(error))
            elif "unforked" in told:
                for child in self._named(told):
                    self._put_off(child, str(told["unforked"]))
            elif "error" in told:
                _log.error("zygote: %s", told["error"])
                self._note_trouble(self._zygote, told["error"])
                if not self._announced:
                    raise PdctlError(
                        f"loading {self._spec.model_path}: {told['error']}", hint=self.hint("logs zygote")
                    )

    def _named(self, told: dict[str, Any]) -> list[Child]:
        """The daemon of which the zygote speaks."""
        return [child for child in self._daemons if child.name == f"{told['kind']}-{told['index']}"]

    def _look_at_readiness(self) -> None:
        for child in self.children:
            if child.ready or child.kill_at is not None or child.role is None:
                continue
            if self._stands(child, ParticipantState.READY) or self.is_drained(child):
                child.ready = True
                self._note_trouble(child, None)
                self._note_proof(child)
                seconds = time.monotonic() - child.started
                _log.info("%s: ready after %.2f s", child.name, seconds)
                emit(event="stage", name=child.name, state="done")
        if not self._announced and all(child.ready for child in self.children):
            self._announced = True
            self._upkeep.show(replace(self._state, phase="running"))
            if self._outlives_parent:
                outlive_parent()  # before it hears that we are up, and ends
            emit(event="ready", url=self._state.url)
            _silence_stdout()

    def _answer_for_router(self) -> None:
        """While no router serves: refuse its clients, unless one is about to. They must not wait without end."""
        router, now, away = self._router, time.monotonic(), self._router_away_since
        if router.ready:
            self._router_away_since = None
            self._stand_in.serve(None)
        elif router.gave_up:
            by_hand = self.hint("restart router")
            self._stand_in.serve(f"the router gave up after {router.quick_deaths} deaths in a row; {by_hand}")
        elif away is None:
            self._router_away_since = now
        elif now - away > _ROUTER_PATIENCE_S or (router.handle is None and (router.start_at or now) > now):
            self._stand_in.serve("the router is being started", retry_after_s=1)
        else:
            self._stand_in.serve(None)

    def _note_proof(self, child: Child) -> None:
        for slot in self._slots_of(child):
            if self._segment.participant_word(slot, P.BIT_EXACT) == 2:
                child.proof_ns = self._segment.participant_word(slot, P.LONGEST_TICK_NS)

    def _slots_of(self, child: Child) -> list[int]:
        """Its places in the segment: none before it has attached, two of a colocated daemon."""
        if child.handle is None:
            return []
        pid, word = child.handle.pid, self._segment.participant_word
        return [slot for role in child.roles for slot in self._segment.slots(role) if word(slot, P.PID) == pid]

    def _stands(self, child: Child, state: ParticipantState) -> bool:
        """Whether it is in this state, in all its places."""
        slots = self._slots_of(child)
        states = [self._segment.participant_word(slot, P.STATE) for slot in slots]
        return len(slots) == len(child.roles) > 0 and set(states) == {state}

    # --- what operations do --------------------------------------------------------------------------------

    def _on_request(self, client: ControlClient, request: dict[str, Any]) -> None:
        if self._announced:
            self._operations.ask(client, request)
        else:
            message, hint = f"cluster {self._spec.name!r}: is still starting", self.hint("status")
            client.finish(error={"message": message, "hint": hint, "exit_code": NotFoundError.exit_code})

    def resize(self, numbers: dict[Role, int]) -> None:
        prefill, decode = (numbers.get(role, self._num_wanted(role)) for role in DAEMONS)
        again = f"{self.hint('down')} && {self.hint('up')} --prefill {prefill} --decode {decode}"
        check_scale(self._spec, prefill, decode, hint=again)
        self._spec = replace(self._spec, num_prefill=prefill, num_decode=decode)
        self._upkeep.show(replace(self._state, spec=self._spec))
        for role, number in zip(DAEMONS, (prefill, decode), strict=True):
            present = {child.index: child for child in self._daemons if child.role is role}
            for index in range(number):
                child = present.pop(index, None)
                if child is None:
                    self._daemons.append(_daemon(role, index, start_at=time.monotonic()))
                else:
                    child.wanted = True  # perhaps it is on its way out: another takes its place
            for child in present.values():
                child.wanted = False
                self._end_in_order(child)
        self._daemons.sort(key=lambda child: (child.role or 0, child.index))

    def _num_wanted(self, role: Role) -> int:
        return sum(child.role is role and child.wanted for child in self._daemons)

    def replace(self, child: Child) -> None:
        if child.handle is None and not child.asked:
            child.start_afresh()
            self._note_who_gave_up()
        else:
            self._end_in_order(child)

    def is_drained(self, child: Child) -> bool:
        return self._stands(child, ParticipantState.DRAINED)

    def _end_in_order(self, child: Child) -> None:
        """Tell a process to end: a daemon puts its rows back first. Its pidfd tells the rest."""
        if child.handle is not None:
            child.ready = False
            child.kill_at = child.kill_at or time.monotonic() + _LEAVE_GRACE_S
            child.handle.send(signal.SIGTERM)
            child.handle.send(signal.SIGCONT)  # a stopped one could not hear us
        elif not child.asked:
            self._forget(child)
            self._note_who_gave_up()

    def _kill_overdue(self) -> None:
        for child in self.children:
            if child.handle is not None and child.kill_at is not None and child.kill_at <= time.monotonic():
                _log.warning("%s: did not stop in %.0f s, killed", child.name, _LEAVE_GRACE_S)
                child.handle.send(signal.SIGKILL)
                child.kill_at = float("inf")

    def _kill_hung(self) -> None:
        """Once a second: what is stopped or makes no progress is killed, and is dead only when its pidfd says so."""
        now = time.monotonic()
        if now < self._judge_at:
            return
        self._judge_at = now + _TICK_S
        looks = [look for child in self.children if (look := self._look_at(child)) is not None]
        verdicts = self._watchdog.judge(looks, now)
        for child in self.children:
            why = verdicts.get(child.name)
            if why is not None and child.handle is not None and child.verdict is None:
                _log.error("%s: hangs, killed: %s", child.name, why)
                child.verdict = why
                child.handle.send(signal.SIGKILL)

    def _look_at(self, child: Child) -> Look | None:
        if child.handle is None or (found := state_and_cpu_s(child.handle.pid)) is None:
            return None
        pid, (state, cpu_s), word = child.handle.pid, found, self._segment.participant_word
        if child is self._zygote:
            asked = any(daemon.asked for daemon in self._daemons)
            return Look(name=child.name, pid=pid, state=state, cpu_s=cpu_s, progress=(0, 0), owns_rows=asked)
        slots, segment = self._slots_of(child), self._segment
        if not slots:
            return None
        holds_lock = segment.words[H.LOCK_PID] == pid
        if child.role is Role.ROUTER:
            # Its event loop may sleep as long as it likes; stopped, it lets every client hang.
            return Look(name=child.name, pid=pid, state=state, cpu_s=cpu_s, progress=(0, 0), holds_lock=holds_lock)
        return Look(
            name=child.name,
            pid=pid,
            state=state,
            cpu_s=cpu_s,
            progress=(word(slots[0], P.PROGRESS), word(slots[0], P.TICKS)),
            owns_rows=any(segment.rows.owned_by(at, word(at, P.INCARNATION)) for at in slots),
            longest_tick_s=word(slots[0], P.LONGEST_TICK_NS) / 1e9,
            holds_lock=holds_lock,
        )

    def _wish_drains(self) -> None:
        """Write into each daemon's place whether it is to stand idle; a new process of its name has a new place."""
        for child in self._daemons:
            for slot in self._slots_of(child):
                if self._segment.participant_word(slot, P.DRAIN) != child.drain:
                    self._segment.words[self._segment.layout.participant(slot) + P.DRAIN] = int(child.drain)
                    self._bell.ring(slot)

    def _forget(self, child: Child) -> None:
        self._daemons.remove(child)
        self._upkeep.warn(child.name, None)

    def _forget_requests(self) -> None:
        """The zygote that was asked for daemons is gone; the next one is asked again."""
        for child in [one for one in self._daemons if one.asked]:
            child.asked = False
            if not child.wanted:
                self._forget(child)

    def _note_who_gave_up(self) -> None:
        """Into state.json, for `pdctl status`."""
        gave_up = {child.name: child.quick_deaths for child in self.children if child.gave_up}
        if gave_up != self._state.gave_up:
            self._upkeep.show(replace(self._state, gave_up=gave_up))

    def _note_trouble(self, child: Child, words: str | None) -> None:
        """The same: why a process does not come up; None: it has come up."""
        trouble = {name: said for name, said in self._state.trouble.items() if name != child.name}
        trouble |= {} if words is None else {child.name: words[:_MAX_WORDS]}
        if trouble != self._state.trouble:
            self._upkeep.show(replace(self._state, trouble=trouble))

    # --- death ---------------------------------------------------------------------------------------------

    def _on_death(self, child: Child) -> None:
        """Its pidfd is readable: it is gone, it stores nothing any more, its rows may be taken."""
        assert child.handle is not None
        status = _collect(child)
        who = f"{child.name} (pid {child.handle.pid})"
        cause = f"{who} was killed: {child.verdict}" if child.verdict else f"{who} ended: {exit_text(status)}"
        slots = self._slots_of(child)
        self._selector.unregister(child.handle)
        child.handle.close()
        _log.log(logging.WARNING if child.kill_at is None else logging.INFO, "%s", cause)
        said = f"{cause}; {self.hint(f'logs {child.name}')}"
        for slot in slots:
            incarnation, counted = self._segment.participant_word(slot, P.INCARNATION), slot != slots[0]
            self._dead.append(_Dead(name=child.name, slot=slot, incarnation=incarnation, cause=said, counted=counted))
        self._guarded("recovery", self._recover)
        was_ready, was_told = child.ready, child.kill_at is not None
        child.end(worked=any(self._segment.participant_word(slot, P.STEPS) > 0 for slot in slots))
        if not self._announced and not was_ready:
            raise self._failed_start(child, cause, status)
        if not (was_ready or was_told or child is self._zygote):  # which has said it over the wire
            self._note_trouble(child, logs.last_error(self._logs, child.name, child.log_size) or cause)
        if not child.wanted:
            self._forget(child)
            self._note_trouble(child, None)
        if child.gave_up:
            _log.error("%s: died %d times in a row, not restarted", child.name, MAX_QUICK_DEATHS)
        self._note_who_gave_up()

    def _recover(self) -> None:
        """Take the rows of the dead. While the lock does not come free, look again at the next tick."""
        try:
            while self._dead:
                dead = self._dead[0]
                resume = self._spec.on_failure == "resume"
                reaped = reap(
                    self._segment, dead.slot, dead.incarnation, dead.cause, resume=resume, counted=dead.counted
                )
                self._dead.pop(0)
                _log.info("%s: slot %d reaped", dead.name, dead.slot)
                request_id = self._segment.rows.request_id
                for row in reaped.adoptable:
                    _log.info("%s row %d: waits for another than %s", request_id(row), row, dead.name)
                for row in reaped.failed:
                    _log.error("%s row %d: failed, %s", request_id(row), row, dead.cause)
                for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
                    for other in self._segment.slots(role):
                        self._bell.ring(other)
            sweep(self._segment)
        except DeadlineError as error:
            _log.error("recovery waits: %s", error.message)

    def _failed_start(self, child: Child, cause: str, status: int) -> PdctlError:
        """This death ends the start of the cluster."""
        reason = logs.last_error(self._logs, child.name, child.log_size)
        said = f"; its last words: {reason}" if reason else ""
        error = PdctlError(f"{cause}{said}", hint=self.hint(f"logs {child.name}"))
        # A child that ended by an error of ours says which.
        code = os.waitstatus_to_exitcode(status)
        error.exit_code = code if code in _EXIT_CODES else error.exit_code
        return error

    # --- end -----------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Stop all processes, then remove the segment and every file. Whatever fails, the rest is done."""
        going = NotFoundError(f"cluster {self._spec.name!r}: is going down", hint=self.hint("up"))
        with _whatever_fails("state.json"):
            if self._lock.is_in_place():
                write_state(replace(self._state, phase="stopping"))
        with _whatever_fails("operations"):
            self._operations.abandon(going)
        with _whatever_fails("control socket"):
            self._control.close()
        self._segment.mark_closed()
        with _whatever_fails("HTTP port"):
            self._stand_in.close()
            self._listener.close()
        with _whatever_fails("processes"):
            self._end_all()
        with _whatever_fails("processes without a name"):
            _end_children()
        with _whatever_fails("bell"):
            self._bell.close()
        with _whatever_fails("segment"):
            self._remove_segment()

    def _end_all(self) -> None:
        living = [(child, child.handle) for child in self.children if child.handle is not None]
        for child, handle in living:
            # The zygote and an unfinished start have nothing to put in order.
            orderly = child.role is not None and child.ready
            handle.send(signal.SIGTERM if orderly else signal.SIGKILL)
            handle.send(signal.SIGCONT)  # a stopped one could not hear us
        deadline = time.monotonic() + _TERM_GRACE_S
        for child, handle in living:
            if not handle.is_gone(max(0.0, deadline - time.monotonic())):
                _log.warning("%s: did not stop in %.0f s, killed", child.name, _TERM_GRACE_S)
                handle.send(signal.SIGKILL)
        for child, handle in living:
            if handle.is_gone(_KILL_GRACE_S):
                _collect(child)

    def _remove_segment(self) -> None:
        """Give up our own place and remove the segment's name, if it is still ours, once nobody holds a place."""
        self._segment.close()
        name = self._state.segment_name
        deadline = time.monotonic() + _KILL_GRACE_S
        while not unlink_if_orphaned(name, made=self._made):
            if time.monotonic() > deadline:
                _log.error("segment %s: still held by another process", name)
                return
            time.sleep(0.01)


@contextmanager
def _whatever_fails(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("%s: not put in order", what)


def _daemons(spec: ClusterSpec) -> list[Child]:
    """Those that a cluster begins with."""
    if spec.colocated:
        return [Child(name="colocated-0", role=Role.PREFILL, colocated=True, start_at=None)]
    numbers = zip(DAEMONS, (spec.num_prefill, spec.num_decode), strict=True)
    return [_daemon(role, index) for role, number in numbers for index in range(number)]


def _daemon(role: Role, index: int, start_at: float | None = None) -> Child:
    return Child(name=f"{role.label}-{index}", role=role, index=index, start_at=start_at)


def _end_children() -> None:
    """Kill and collect what is still below us: daemons whose fork was not yet told, with those between."""
    deadline = time.monotonic() + _KILL_GRACE_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _collect(child: Child) -> int:
    """Take the exit status of a process that is gone, so that no zombie stays."""
    assert child.handle is not None
    if child.popen is not None:
        code = child.popen.wait()
        child.popen = None
        return -code if code < 0 else code << 8
    try:
        return os.waitpid(child.handle.pid, 0)[1]
    except ChildProcessError:
        return 0


def _drain(reader: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while reader.recv(64):
            pass


def _port_holder(port: int) -> str:
    """Which program listens on a port, as far as this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid:
                    return f"another program ({psutil.Process(connection.pid).name()}, pid {connection.pid})"
                break
    return "another program"


def emit(**event: Any) -> None:
    """Tell `pdctl up`; if nobody listens any more, go on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _silence_stdout() -> None:
    """`pdctl up` returns when our stdout closes; later events are told to nobody, or to our log."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    try:
        nobody = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        os.dup2(2, 1)
        return
    os.dup2(nobody, 1)
    os.close(nobody)


def main() -> None:
    """Read the specification from stdin and supervise.

    `--parent PID` binds us to the process that started us: a start that nobody waits for any more is taken back. With
    `--detach` only until the cluster is up.
    """
    parser = argparse.ArgumentParser(prog="python -m pdctl.core.supervisor")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--detach", action="store_true")
    given = parser.parse_args()
    os.umask(0o077)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # SIGTERM: we go down in order, and nothing is left.
    die_with_parent(given.parent, signal.SIGTERM)
    become_subreaper()
    set_process_name("pdctl-supervisor")
    look, spec = None, None
    try:
        spec = ClusterSpec.from_json(sys.stdin.read())
        look = command("logs supervisor", spec.name, spec.state_dir)
        directory = log_dir(spec.state_dir, spec.name)
        private_directory(spec.state_dir)
        private_directory(directory.parent)
        private_directory(directory)
        logs.setup(directory, "supervisor", stdout=False)
        check_pidfds()
        Supervisor(spec, outlives_parent=given.detach).run()
    except PdctlError as error:
        _log.error("%s", error.message)
        hint = error.hint if spec is None else advice(error, spec.name, spec.state_dir)
        emit(event="error", message=error.message, hint=hint, exit_code=error.exit_code)
        sys.exit(error.exit_code)
    except BaseException as error:
        _log.exception("supervisor")
        emit(
            event="error",
            message=f"{type(error).__name__}: {error}",
            hint=look,
            exit_code=1,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
