"""One end of one transport: `python -m pdctl.core.bench.endpoint PARENT`, driven by handoff.py.

{"transport", "setup"}       first
{"do": "prepare", "card"}    -> {"card"}
{"do": "connect", "card"}    -> {"connected"}
{"do": "fill", "num_blocks", "seed"}     -> {"filled"}       the sender
{"do": "send", "num_blocks"}             -> {"began_ns"}     the sender
{"do": "receive", "num_blocks", "seed"}  -> {"armed"}, {"ended_ns"}, {"fault"}     the receiver
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdctl.core.bench.helper import Wire, run
from pdctl.core.bench.peer_transports import Mooncake, Nixl
from pdctl.core.bench.transports import Memcpy, Pipe, Setup, SharedMemory, Transport, UnixSocket
from pdctl.transport.errors import UsageError
from pdctl.transport.layout import Geometry
from pdctl.transport.names import parse_segment_name

TRANSPORTS: tuple[type[Transport], ...] = (SharedMemory, Memcpy, Pipe, UnixSocket, Nixl, Mooncake)


def serve(wire: Wire, transports: tuple[type[Transport], ...] = TRANSPORTS) -> None:
    """Do what is asked until nothing more is."""
    first = wire.hear()
    if first is None:
        return
    kind = next(kind for kind in transports if kind.name == first["transport"])
    end = kind(_setup(first["setup"]))
    try:
        while (asked := wire.hear()) is not None:
            _do(wire, end, asked)
    finally:
        end.close()


def _do(wire: Wire, end: Transport, asked: dict[str, Any]) -> None:
    number = asked.get("num_blocks", 0)
    match asked["do"]:
        case "prepare":
            wire.say(card=end.prepare(asked["card"]))
        case "connect":
            end.connect(asked["card"])
            wire.say(connected=True)
        case "fill":
            end.fill(number, asked["seed"])
            wire.say(filled=True)
        case "send":
            wire.say(began_ns=end.send(number))
        case "receive":
            wire.say(armed=True)
            wire.say(ended_ns=end.receive(number))
            wire.say(fault=end.fault(number, asked["seed"]))


def _setup(given: dict[str, Any]) -> Setup:
    segment = parse_segment_name(given["segment"])
    if segment is None:
        raise UsageError(f"{given['segment']}: not a segment's name")
    return Setup(
        sends=given["sends"],
        directory=Path(given["directory"]),
        segment=segment,
        geometry=Geometry.from_words(given["geometry"]),
        max_blocks=given["max_blocks"],
        timeout_s=given["timeout_s"],
    )


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
