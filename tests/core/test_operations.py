"""Operations as the supervisor runs them, over a fleet without processes: each step is one turn of its loop."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.core import child as children
from pdctl.core.child import MAX_QUICK_DEATHS, Child
from pdctl.core.operations import DAEMONS, Operations
from pdctl.transport.errors import NotFoundError, UsageError
from pdctl.transport.segment import Role


class Fleet:
    """Children whose processes come and go at the test's word."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.zygote = Child(name="zygote", role=None, ready=True, start_at=None)
        self.router = Child(name="router", role=Role.ROUTER, ready=True, start_at=None)
        self.daemons: list[Child] = []
        self.drained: set[Child] = set()
        self.resize({Role.PREFILL: prefill, Role.DECODE: decode})
        self.start_all()
        self.zygote.handle = self.router.handle = self.daemons[0].handle

    @property
    def children(self) -> list[Child]:
        return [self.zygote, self.router, *self.daemons]

    def named(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def resize(self, numbers: dict[Role, int]) -> None:
        for role, number in numbers.items():
            mine = [child for child in self.daemons if child.role is role]
            for child in mine:
                child.wanted = child.index < number
            self.daemons += [
                Child(name=f"{role.label}-{index}", role=role, index=index) for index in range(len(mine), number)
            ]
        self.daemons.sort(key=lambda child: (DAEMONS.index(child.role or Role.NONE), child.index))

    def replace(self, child: Child) -> None:
        if child.handle is None:
            child.start_afresh()
        child.ready, child.kill_at = False, time.monotonic() + 15

    def is_drained(self, child: Child) -> bool:
        return child in self.drained

    def hint(self, verb: str) -> str:
        return f"pdctl {verb}"

    def start_all(self) -> None:
        for child in self.daemons:
            if child.handle is None and child.wanted:
                child.begin(object())  # type: ignore[arg-type]
                child.ready = True

    def end(self, name: str) -> None:
        child = self.named(name)
        child.end()
        if not child.wanted:
            self.daemons.remove(child)


class Asker:
    def __init__(self) -> None:
        self.is_gone = False
        self.heard: list[str] = []
        self.answer: dict[str, Any] | None = None

    def say(self, **message: Any) -> None:
        self.heard.append(message["progress"])

    def finish(self, **message: Any) -> None:
        assert self.answer is None
        self.answer = message

    @property
    def done(self) -> dict[str, Any]:
        assert self.answer is not None
        return self.answer["done"]  # type: ignore[no-any-return]

    @property
    def error(self) -> dict[str, Any]:
        assert self.answer is not None
        return self.answer["error"]  # type: ignore[no-any-return]


class World:
    def __init__(self, **numbers: int) -> None:
        self.fleet = Fleet(**numbers)
        self.operations = Operations(self.fleet)

    def ask(self, operation: str, **more: Any) -> Asker:
        asker = Asker()
        self.operations.ask(asker, {"operation": operation, "timeout_s": 60, **more})
        self.operations.advance()
        return asker


def test_scale_up_ends_when_all_new_ones_are_ready() -> None:
    world = World()
    asker = world.ask("scale", numbers={"decode": 3, "prefill": 2})
    assert asker.answer is None
    world.fleet.start_all()
    world.operations.advance()
    assert asker.done == {"started": ["prefill-1", "decode-1", "decode-2"], "stopped": [], "prefill": 2, "decode": 3}
    assert asker.heard == ["prefill-1: ready", "decode-1: ready", "decode-2: ready"]


def test_scale_down_ends_when_the_last_of_them_is_gone() -> None:
    world = World(decode=3)
    asker = world.ask("scale", numbers={"decode": 1})
    assert [child.wanted for child in world.fleet.daemons if child.role is Role.DECODE] == [True, False, False]
    world.fleet.end("decode-2")
    world.operations.advance()
    assert asker.answer is None
    world.fleet.end("decode-1")
    world.operations.advance()
    assert asker.done == {"started": [], "stopped": ["decode-1", "decode-2"], "prefill": 1, "decode": 1}


def test_scale_to_what_is_there_changes_nothing() -> None:
    assert World(decode=2).ask("scale", numbers={"decode": 2}).done["started"] == []


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"decode": 0}, "scale decode=0: expected 1 to 16"),
        ({"decode": 17}, "scale decode=17: expected 1 to 16"),
        ({"decode": True}, "scale decode=True"),
        ({"decode": 1.0}, "scale decode=1.0"),
        ({"router": 1}, "scale router=1: expected one of prefill, decode"),
        ({}, "expected numbers"),
        ([2], "expected numbers"),
        (None, "expected numbers"),
    ],
)
def test_numbers_that_cannot_be(numbers: Any, words: str) -> None:
    error = World().ask("scale", numbers=numbers).error
    assert (error["exit_code"], words in error["message"]) == (2, True), error


@pytest.mark.parametrize("operation", [None, "", "stop", ["scale"], {}])
def test_an_operation_that_is_none(operation: Any) -> None:
    error = World().ask(operation).error
    assert error["message"].endswith("expected scale, drain or restart")


def test_only_drained_ones_may_not_stay() -> None:
    world = World(decode=2)
    world.fleet.named("decode-0").drain = True
    error = world.ask("scale", numbers={"decode": 1}).error
    assert (error["exit_code"], error["hint"]) == (2, "pdctl drain --undo decode-0")
    assert len([child for child in world.fleet.daemons if child.wanted]) == 3


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "scale", "numbers": {"decode": 2}},
        {"operation": "drain", "name": "colocated-0"},
        {"operation": "drain", "name": "decode-0", "force": True},
        {"operation": "drain", "name": "colocated-0", "undo": True},
    ],
)
def test_a_colocated_daemon_has_no_peers(request_: dict[str, Any]) -> None:
    world = World()
    one = Child(name="colocated-0", role=Role.PREFILL, colocated=True, ready=True)
    world.fleet.daemons = [one]
    error = world.ask(**request_).error
    assert (error["exit_code"], "is colocated" in error["message"]) == (2, True)
    assert not one.drain
    asker = world.ask("restart")
    one.begin(object())  # type: ignore[arg-type]
    one.ready = True
    world.operations.advance()
    assert asker.done == {"restarted": ["colocated-0"]}


def test_drain_and_back() -> None:
    world = World(decode=2)
    asker = world.ask("drain", name="decode-1")
    child = world.fleet.named("decode-1")
    assert child.drain and asker.answer is None
    world.fleet.drained.add(child)
    world.operations.advance()
    assert asker.done == {"name": "decode-1", "drained": True}
    assert world.ask("drain", name="decode-1").done["drained"]
    asker = world.ask("drain", name="decode-1", undo=True)
    assert not child.drain and asker.answer is None
    world.fleet.drained.clear()
    world.operations.advance()
    assert asker.done == {"name": "decode-1", "drained": False}


def test_the_last_one_that_works_is_drained_only_by_force() -> None:
    world = World(decode=3)
    world.fleet.named("decode-1").drain = True
    world.fleet.named("decode-2").ready = False
    error = world.ask("drain", name="decode-0").error
    assert (error["exit_code"], "--force" in error["hint"]) == (2, True)
    assert "decode-0" in error["message"]
    assert not world.fleet.named("decode-0").drain
    world.ask("drain", name="decode-0", force=True)
    assert world.fleet.named("decode-0").drain


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        ({"operation": "drain", "name": "router"}, 2, "only prefill and decode"),
        ({"operation": "drain", "name": "decode-7"}, 3, "expected one of zygote, router, prefill-0, decode-0"),
        ({"operation": "drain", "name": 5}, 2, "expected a name"),
        ({"operation": "drain"}, 2, "expected a name"),
        ({"operation": "restart", "names": ["decode-0", "nobody"]}, 3, "process 'nobody'"),
        ({"operation": "restart", "names": "decode-0"}, 2, "expected names"),
        ({"operation": "restart", "names": ["zygote"]}, 2, "shares the weights"),
        ({"operation": "restart", "names": ["supervisor"]}, 2, "it is the cluster"),
    ],
)
def test_what_cannot_be_named(request_: dict[str, Any], code: int, words: str) -> None:
    world = World()
    error = world.ask(**request_).error
    assert (error["exit_code"], words in error["message"]) == (code, True), error
    assert all(child.ready for child in world.fleet.daemons)


def test_a_restart_goes_one_by_one_and_leaves_the_router() -> None:
    world = World(decode=2)
    asker = world.ask("restart")
    for name in ("prefill-0", "decode-0", "decode-1"):
        assert asker.answer is None
        assert [child.name for child in world.fleet.children if not child.ready] == [name]
        world.fleet.end(name)
        world.operations.advance()
        world.fleet.start_all()
        world.operations.advance()
    assert asker.done == {"restarted": ["prefill-0", "decode-0", "decode-1"]}
    assert {child.num_starts for child in world.fleet.daemons} == {2}


def test_a_restart_brings_back_who_gave_up() -> None:
    world = World()
    child = world.fleet.named("decode-0")
    for _ in range(MAX_QUICK_DEATHS):
        world.fleet.end("decode-0")
        assert child.gave_up or child.start_at is not None
        child.begin(object())  # type: ignore[arg-type]
    world.fleet.end("decode-0")
    assert child.gave_up and child.start_at is None
    asker = world.ask("restart", names=["decode-0"])
    assert not child.gave_up and child.start_at is not None
    world.fleet.start_all()
    world.operations.advance()
    assert asker.done == {"restarted": ["decode-0"]}


@pytest.mark.parametrize("name", ["decode-1", "zygote"])
def test_who_waits_for_one_that_gave_up_is_told(name: str) -> None:
    world = World()
    asker = world.ask("scale", numbers={"decode": 2})
    world.fleet.named(name).quick_deaths = MAX_QUICK_DEATHS
    world.operations.advance()
    assert asker.error["message"] == f"{name}: gave up after {MAX_QUICK_DEATHS} deaths in a row"
    assert asker.error["hint"] == f"pdctl logs {name}"


def test_time_is_up_but_the_wish_stays() -> None:
    world = World()
    asker = world.ask("scale", numbers={"decode": 2}, timeout_s=0.01)
    time.sleep(0.02)
    world.operations.advance()
    assert asker.error["exit_code"] == 6
    assert asker.error["message"] == "scale: time is up, still waiting for decode-1 to be ready"
    assert world.fleet.named("decode-1").wanted
    assert world.operations.next_deadline() is None


def test_one_at_a_time_in_the_order_of_asking() -> None:
    world = World()
    first = world.ask("scale", numbers={"decode": 2})
    second = world.ask("restart", names=["decode-1"])
    third = world.ask("drain", name="prefill-0", force=True)
    assert second.heard == third.heard == ["waits for a scale that is under way"]
    second.is_gone = True
    world.fleet.start_all()
    world.operations.advance()
    assert first.done["started"] == ["decode-1"]
    # Nobody waited for the restart any more: it did not happen.
    assert world.fleet.named("decode-1").ready
    assert world.fleet.named("prefill-0").drain
    world.operations.abandon(NotFoundError("going down"))
    assert third.error["message"] == "going down"


def test_our_own_mistake_is_the_askers_news_and_nobodys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.fleet, "resize", lambda numbers: 1 / 0)
    error = world.ask("scale", numbers={"decode": 2}).error
    assert (error["exit_code"], error["message"]) == (1, "ZeroDivisionError: division by zero")
    assert world.ask("scale", numbers={"decode": 0}).error["exit_code"] == 2


# --- when a child is started again -------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    return now


def test_pauses_grow_and_end(clock: list[float]) -> None:
    child = Child(name="decode-0", role=Role.DECODE)
    pauses = []
    while not child.gave_up:
        child.begin(object())  # type: ignore[arg-type]
        child.end()
        pauses.append(child.start_at and child.start_at - clock[0])
    assert pauses == [0.0, 0.0, *(pytest.approx(pause) for pause in (0.8, 1.6, 3.2, 6.4, 12.8)), None]


def test_who_lived_long_is_no_suspect(clock: list[float]) -> None:
    child = Child(name="decode-0", role=Role.DECODE)
    for _ in range(MAX_QUICK_DEATHS - 1):
        child.begin(object())  # type: ignore[arg-type]
        child.end()
    child.begin(object())  # type: ignore[arg-type]
    child.ready = True
    clock[0] += children.STEADY_S
    child.end()
    assert (child.quick_deaths, child.start_at) == (0, clock[0])


def test_who_was_never_ready_is_a_suspect_however_long_it_took(clock: list[float]) -> None:
    child = Child(name="zygote", role=None)
    for number in range(1, MAX_QUICK_DEATHS + 1):
        child.begin(object())  # type: ignore[arg-type]
        clock[0] += 60
        child.end()
        assert child.quick_deaths == number
    assert child.gave_up and child.start_at is None


def test_an_end_that_was_asked_for_is_no_death(clock: list[float]) -> None:
    child = Child(name="decode-0", role=Role.DECODE, quick_deaths=MAX_QUICK_DEATHS - 1)
    child.begin(object())  # type: ignore[arg-type]
    child.kill_at = clock[0] + 15
    child.end()
    assert (child.quick_deaths, child.start_at, child.kill_at) == (0, clock[0], None)


def test_who_has_worked_is_started_again_however_often_it_is_killed() -> None:
    child = Child(name="decode-0", role=Role.DECODE)
    for _ in range(3 * MAX_QUICK_DEATHS):
        child.ready, child.started = True, time.monotonic()
        child.end(worked=True)
        assert not child.gave_up and child.start_at is not None
    assert child.quick_deaths == 0


_WORDS = st.one_of(
    st.sampled_from(["scale", "drain", "restart", "prefill", "decode", "prefill-0", "decode-0", "router", "zygote"]),
    st.text(st.characters(), max_size=5),  # lone surrogates too: JSON has them
)
_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_WORDS, inner, max_size=3)),
    max_leaves=6,
)
_FIELDS = st.sampled_from(["operation", "numbers", "name", "names", "undo", "force", "timeout_s", "x"])


@settings(max_examples=200, deadline=None)
@given(
    request=st.dictionaries(_FIELDS, _ANYTHING, max_size=8),
    likely=st.fixed_dictionaries(
        {},
        optional={
            "operation": st.sampled_from(["scale", "drain", "restart"]),
            "numbers": st.dictionaries(_WORDS, st.integers(-1, 17), max_size=2),
            "name": _WORDS,
            "names": st.lists(_WORDS, max_size=3),
            "timeout_s": st.floats(0.1, 100),
        },
    ),
)
def test_any_request_is_refused_by_name_or_done(request: dict[str, Any], likely: dict[str, Any]) -> None:
    """Whatever JSON comes over the control socket: no error of ours, and the next request is answered."""
    world, asker = World(), Asker()
    world.operations.ask(asker, {**request, **likely})
    world.operations.advance()
    if asker.answer is not None and "error" in asker.answer:
        # An exception that is no refusal would have another.
        assert asker.error["exit_code"] in (UsageError.exit_code, NotFoundError.exit_code), asker.answer
        json.dumps(asker.answer).encode()
    # What is under way ends when its client leaves; the next one is heard.
    asker.is_gone = True
    world.fleet.start_all()
    world.operations.advance()
    assert world.ask("nonsense").error["exit_code"] == UsageError.exit_code
