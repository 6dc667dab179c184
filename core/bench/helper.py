"""Helper processes of a bench: one JSON object a line over stdin and stdout, and never a wait without a deadline.

`Helper` is the bench's end, `Wire` the helper's. A helper is killed with the bench, in whatever way that ends, and
what it prints goes to a file whose last line is its cause of death. Knows nothing of what is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pdctl.core.process import die_with_parent, exit_text
from pdctl.transport.errors import DeadlineError, PdctlError

_MOST_READ_BYTES = 1 << 16
_LAST_LINE_BYTES = 4096


class HelperError(PdctlError):
    """A helper failed: it said why, or died."""


class Helper:
    """One helper process.

    Args:
        name: for people, and for its file of errors.
        module: run as `python -m`; its `main` calls `run`.
        directory: private to this bench.
        environment: what is added to ours.
    """

    def __init__(
        self, name: str, module: str, directory: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._errors = directory / f"{name}.err"
        self._buffer = b""
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **message: Any) -> None:
        """Say something. A helper that is gone is noticed by `hear`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, timeout_s: float, what: str) -> dict[str, Any]:
        """Its next message.

        Args:
            what: is waited for; for the error's text.

        Raises:
            HelperError: it failed, and why.
            DeadlineError: it said nothing in time.
        """
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise DeadlineError(f"{self.name}: {what} took longer than {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), _MOST_READ_BYTES)
            if not data:
                raise HelperError(f"{self.name}: {self._cause_of_death()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        if (error := message.get("error")) is not None:
            raise HelperError(f"{self.name}: {error}")
        return message

    def ask(self, timeout_s: float, what: str, **message: Any) -> dict[str, Any]:
        self.tell(**message)
        return self.hear(timeout_s, what)

    def _cause_of_death(self) -> str:
        try:
            # Its output is closed: it is about to end, if it has not.
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its output"
        said = self._errors.read_bytes()[-_LAST_LINE_BYTES:].decode("utf-8", "replace").strip().splitlines()
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {exit_text(code << 8)}"
        return f"{ended}: {said[-1]}" if said else ended

    def close(self) -> None:
        """It is gone when this returns."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):
                    end.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Wire:
    """A helper's own end. What libraries print to stdout goes to stderr, so that it is no message."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None: the bench has nothing more to say."""
        line = sys.stdin.buffer.readline()
        return json.loads(line) if line else None

    def say(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]


def run(serve: Callable[[Wire], None]) -> None:
    """The life of a helper process; its last words tell why it failed."""
    die_with_parent(int(sys.argv[1]))
    # Ctrl-C reaches the whole process group: the bench decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire = Wire()
    try:
        serve(wire)
    except Exception as error:
        traceback.print_exc()
        text = error.message if isinstance(error, PdctlError) else f"{type(error).__name__}: {error}"
        wire.say(error=text.strip().splitlines()[0])
        sys.exit(1)
