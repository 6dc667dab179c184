"""What a running cluster can be asked to do: scale, drain, restart.

Each is a generator that the supervisor resumes after every event, so that it ends by events (a process says that
it is ready, a pidfd that one is gone) and never blocks. It yields what it waits for, which is what is said when
its time is up; reports through `say`; and returns the fields of its answer. What it wants is written into the
fleet first: if its client leaves or its time is up, the supervisor goes on towards the same end.

Knows nothing of sockets. Called by supervisor.py; asked for by control_client.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from pdctl.core.child import MAX_QUICK_DEATHS, Child
from pdctl.core.config import MAX_DAEMONS
from pdctl.transport.errors import DeadlineError, NotFoundError, PdctlError, UsageError
from pdctl.transport.segment import Role

_log = logging.getLogger("operations")
DAEMONS = (Role.PREFILL, Role.DECODE)
MAX_TIMEOUT_S = 86400.0
Say = Callable[[str], None]
Steps = Generator[str, None, dict[str, Any]]


class Fleet(Protocol):
    """The processes of a cluster, as the supervisor has them."""

    @property
    def children(self) -> list[Child]:
        """Zygote, router, prefill and decode daemons, those that are leaving included."""

    def resize(self, numbers: dict[Role, int]) -> None:
        """Want so many daemons of these roles: the missing are started, the highest-numbered told to end.

        Raises:
            CapacityError: the segment has no rows for so many; nothing was changed.
        """

    def replace(self, child: Child) -> None:
        """End its process in order, if there is one, and make another in its place."""

    def is_drained(self, child: Child) -> bool:
        """Whether it has put its rows back and stands idle."""

    def hint(self, verb: str) -> str:
        """The command line of a command on this cluster."""


class Asker(Protocol):
    """Who asked, as control.py has it."""

    @property
    def is_gone(self) -> bool: ...

    def say(self, **message: Any) -> None: ...

    def finish(self, **message: Any) -> None:
        """Say the last thing."""


@dataclass(kw_only=True)
class _Asked:
    asker: Asker
    request: dict[str, Any]
    deadline: float
    steps: Steps | None = None
    waits_for: str = "the one before it"


class Operations:
    """Those asked for, one at a time, in the order in which they came."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._queue: list[_Asked] = []

    def ask(self, asker: Asker, request: dict[str, Any]) -> None:
        try:
            deadline = time.monotonic() + timeout_of(request)
        except PdctlError as error:
            _finish_with(asker, error)
            return
        if self._queue:
            asker.say(progress=f"waits for a {self._queue[0].request.get('operation')} that is under way")
        self._queue.append(_Asked(asker=asker, request=request, deadline=deadline))

    def advance(self) -> None:
        """Do what can be done now: call after every event, and at `next_deadline`."""
        now = time.monotonic()
        for asked in [one for one in self._queue if one.asker.is_gone or one.deadline <= now]:
            self._queue.remove(asked)
            why = "nobody waits for it any more" if asked.asker.is_gone else "time is up"
            what = f"{asked.request.get('operation')}: {why}, still waiting for {asked.waits_for}"
            _finish_with(asked.asker, DeadlineError(what, hint=self._fleet.hint("status")))
        while self._queue and self._step(self._queue[0]):
            self._queue.pop(0)

    def next_deadline(self) -> float | None:
        return min((asked.deadline for asked in self._queue), default=None)

    def abandon(self, error: PdctlError) -> None:
        """Nothing more will be done."""
        for asked in self._queue:
            _finish_with(asked.asker, error)
        self._queue.clear()

    def _step(self, asked: _Asked) -> bool:
        """Resume an operation; True: it has ended, well or not."""
        try:
            if asked.steps is None:
                _log.info("%s", asked.request)
                asked.steps = begin(self._fleet, lambda text: asked.asker.say(progress=text), asked.request)
            asked.waits_for = next(asked.steps)
            return False
        except StopIteration as end:
            asked.asker.finish(done=end.value)
        except PdctlError as error:
            _finish_with(asked.asker, error)
        except Exception as error:
            # Ours, and no reason to end a cluster that serves.
            _log.exception("%s", asked.request)
            _finish_with(asked.asker, PdctlError(f"{type(error).__name__}: {error}", hint=self._fleet.hint("logs")))
        return True


def _finish_with(asker: Asker, error: PdctlError) -> None:
    _log.warning("%s", error.message)
    asker.finish(error={"message": error.message, "hint": error.hint, "exit_code": error.exit_code})


def begin(fleet: Fleet, say: Say, request: dict[str, Any]) -> Steps:
    """The operation that a request asks for; its values are checked before the first step.

    Raises:
        UsageError, NotFoundError: it asks for what cannot be.
    """
    operation = request.get("operation")
    if operation in ("scale", "drain"):
        _refuse_colocated(fleet, operation)
    if operation == "scale":
        return scale(fleet, say, _numbers(request.get("numbers")))
    if operation == "drain":
        name, undo, force = request.get("name"), request.get("undo", False), request.get("force", False)
        if not (isinstance(name, str) and isinstance(undo, bool) and isinstance(force, bool)):
            raise UsageError(f"drain: expected a name, got {request}")
        return drain(fleet, say, _daemon(fleet, name), undo=undo, force=force)
    if operation == "restart":
        names = request.get("names", [])
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise UsageError(f"restart: expected names, got {names!r}")
        return restart(fleet, say, _restartable(fleet, names))
    raise UsageError(f"operation {operation!r}: expected scale, drain or restart")


def _refuse_colocated(fleet: Fleet, operation: str) -> None:
    """Raise if there is one process for both roles: there is nobody beside it, and nobody can be."""
    for child in fleet.children:
        if child.colocated:
            raise UsageError(
                f"{operation}: this cluster is colocated, {child.name} alone does the work of all prefill and decode "
                "daemons",
                hint=f"{fleet.hint('restart')}, or {fleet.hint('down')} && {fleet.hint('up')} without --colocated",
            )


def timeout_of(request: dict[str, Any]) -> float:
    """Seconds that a request's operation may take."""
    value: Any = request.get("timeout_s")
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout {value}: expected more than 0, at most {MAX_TIMEOUT_S:.0f} seconds")
    return float(value)


# --- the operations ----------------------------------------------------------------------------------------


def scale(fleet: Fleet, say: Say, numbers: dict[Role, int]) -> Steps:
    """Have so many daemons of a role. One that leaves puts its rows back for the others, with tokens and blocks."""
    before = _wanted(fleet)
    for role, number in numbers.items():
        if number < len(before[role]) and all(child.drain for child in before[role][:number]):
            kept = before[role][0].name
            raise UsageError(
                f"scale {role.label}={number}: only drained {role.label} daemons would stay ({kept})",
                hint=fleet.hint(f"drain --undo {kept}"),
            )
    fleet.resize(numbers)
    after = _wanted(fleet)
    stopped = [child for role in DAEMONS for child in before[role] if child not in after[role]]
    started = [child for role in DAEMONS for child in after[role] if child not in before[role]]
    for child in stopped:
        while child in fleet.children:
            yield f"{child.name} to end"
        say(f"{child.name}: stopped")
    for child in started:
        yield from _until_ready(fleet, child)
        say(f"{child.name}: ready")
    return {
        "started": [child.name for child in started],
        "stopped": [child.name for child in stopped],
        **{role.label: len(children) for role, children in after.items()},
    }


def drain(fleet: Fleet, say: Say, child: Child, *, undo: bool, force: bool) -> Steps:
    """Let a daemon put its rows back and stand idle; `undo`: let it serve again."""
    assert child.role is not None
    others = [one for one in _wanted(fleet)[child.role] if one is not child and one.ready and not one.drain]
    if not (undo or force or child.drain or others):
        role = child.role.label
        raise UsageError(
            f"drain {child.name}: no other {role} daemon takes requests: nobody would work on them",
            hint=f"{fleet.hint(f'scale {role}={len(_wanted(fleet)[child.role]) + 1}')}, "
            f"or {fleet.hint(f'drain --force {child.name}')}",
        )
    child.drain = not undo
    while not child.ready or fleet.is_drained(child) is undo:
        _refuse_hopeless(fleet, child)
        yield f"{child.name} to {'serve again' if undo else 'put its rows back'}"
    say(f"{child.name}: {'serves again' if undo else 'drained'}")
    return {"name": child.name, "drained": not undo}


def restart(fleet: Fleet, say: Say, children: list[Child]) -> Steps:
    """Replace processes one after the other, each when the one before is ready."""
    for child in children:
        before = child.num_starts
        fleet.replace(child)
        while child.num_starts == before:
            _refuse_hopeless(fleet, child)
            yield f"{child.name} to be replaced"
        yield from _until_ready(fleet, child)
        say(f"{child.name}: ready")
    return {"restarted": [child.name for child in children]}


def _until_ready(fleet: Fleet, child: Child) -> Generator[str, None, None]:
    while not child.ready:
        _refuse_hopeless(fleet, child)
        yield f"{child.name} to be ready"


def _refuse_hopeless(fleet: Fleet, child: Child) -> None:
    """Raise if nothing will make this child ready any more."""
    zygote = fleet.children[0]
    for one in (child, zygote):
        if one.gave_up:
            raise PdctlError(
                f"{one.name}: gave up after {MAX_QUICK_DEATHS} deaths in a row", hint=fleet.hint(f"logs {one.name}")
            )
    if not child.wanted:
        raise PdctlError(f"{child.name}: scaled away meanwhile", hint=fleet.hint("status"))


# --- what a request names ----------------------------------------------------------------------------------


def _wanted(fleet: Fleet) -> dict[Role, list[Child]]:
    """The daemons that are to be there, in the order of their numbers."""
    return {role: [child for child in fleet.children if child.role is role and child.wanted] for role in DAEMONS}


def _numbers(given: Any) -> dict[Role, int]:
    roles = {role.label: role for role in DAEMONS}
    if not isinstance(given, dict) or not given:
        raise UsageError(f"scale: expected numbers of daemons by role, got {given!r}")
    for label, number in given.items():
        if label not in roles:
            raise UsageError(f"scale {label}={number}: expected one of {', '.join(roles)}")
        if type(number) is not int or not 1 <= number <= MAX_DAEMONS:
            raise UsageError(f"scale {label}={number}: expected 1 to {MAX_DAEMONS}")
    return {roles[label]: number for label, number in given.items()}


def _named(fleet: Fleet, name: str) -> Child:
    for child in fleet.children:
        if child.name == name and child.wanted:
            return child
    names = ", ".join(child.name for child in fleet.children if child.wanted)
    raise NotFoundError(f"process {name!r}: expected one of {names}", hint=fleet.hint("status"))


def _daemon(fleet: Fleet, name: str) -> Child:
    child = _named(fleet, name)
    if child.role not in DAEMONS:
        raise UsageError(f"drain {name}: only prefill and decode daemons can be drained", hint=fleet.hint("status"))
    return child


def _restartable(fleet: Fleet, names: list[str]) -> list[Child]:
    """The named children, each once; no name: all daemons, and not the router, whose end cuts every stream."""
    if not names:
        return [child for child in fleet.children if child.role in DAEMONS and child.wanted]
    if "supervisor" in names:
        raise UsageError("restart supervisor: it is the cluster", hint=f"{fleet.hint('down')} && {fleet.hint('up')}")
    children = [_named(fleet, name) for name in dict.fromkeys(names)]
    for child in children:
        if child.role is None and child.handle is not None:
            raise UsageError(
                f"restart {child.name}: every daemon shares the weights that it holds; another one would hold them "
                "a second time, and other weights need a new cluster",
                hint=f"{fleet.hint('down')} && {fleet.hint('up')}",
            )
    return children
