"""Memory load: `python -m pdctl.core.bench.memory_load PARENT` copies a big buffer to and fro while it is told to.

{"do": "go"}, then {"do": "stop"} -> {"bytes", "s"}: read and written, and in what time.
"""

from __future__ import annotations

import select
import sys
import time

from pdctl.core.bench.helper import Wire, run
from pdctl.core.bench.transports import private_memory

# Far beyond any cache, and yet little beside what is measured.
_BUFFER_BYTES = 256 << 20
_STEP_BYTES = 8 << 20


def serve(wire: Wire) -> None:
    first, second = private_memory(_BUFFER_BYTES), private_memory(_BUFFER_BYTES)
    wire.say(ready=True)
    while wire.hear() is not None:
        wire.say(going=True)
        began, moved, at = time.monotonic(), 0, 0
        while not select.select([sys.stdin.buffer], [], [], 0)[0]:
            second[at : at + _STEP_BYTES] = first[at : at + _STEP_BYTES]
            moved += 2 * _STEP_BYTES
            at = (at + _STEP_BYTES) % _BUFFER_BYTES
        took_s = time.monotonic() - began
        if wire.hear() is None:
            return
        wire.say(bytes=moved, s=took_s)


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
