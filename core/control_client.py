"""Ask a running cluster's supervisor for something, over its control socket (control.py says what is spoken)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdctl.core.cluster import ClusterState, command, running
from pdctl.core.private_files import open_directory
from pdctl.transport.errors import DeadlineError, NotFoundError, PdctlError
from pdctl.transport.names import cluster_dir, control_path, socket_address

# A supervisor that runs answers at once, whatever it is doing.
_HEARD_S = 10.0
# Its own deadline comes first, and says more.
_GRACE_S = 10.0


def ask(
    state_dir: Path,
    name: str,
    request: dict[str, Any],
    *,
    timeout_s: float,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """What the operation answers, when it has ended.

    Raises:
        NotFoundError: the cluster does not run.
        DeadlineError: it did not end in time; the supervisor goes on towards what was asked.
        PdctlError: why it was refused or failed, with the supervisor's exit code.
    """
    state = running(state_dir, name)
    connection = _connect(state)
    began = time.monotonic()
    try:
        connection.sendall(json.dumps({**request, "timeout_s": timeout_s}).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "progress" in message:
                    on_progress(str(message["progress"]))
                elif "done" in message:
                    answer: dict[str, Any] = message["done"]
                    return answer
                elif "error" in message:
                    raise _error(message["error"])
                connection.settimeout(max(0.1, began + timeout_s + _GRACE_S - time.monotonic()))
    except TimeoutError as error:
        raise _silent(state) from error
    except (OSError, ValueError, KeyError) as error:
        raise PdctlError(
            f"control socket of cluster {name!r}: {type(error).__name__}: {error}", hint=_hint(state, "status")
        ) from error
    finally:
        connection.close()
    raise PdctlError(f"cluster {name!r}: its supervisor ended the conversation", hint=_hint(state, "logs supervisor"))


def _connect(state: ClusterState) -> socket.socket:
    path = control_path(cluster_dir(state.spec.state_dir, state.name))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_HEARD_S)
    deadline = time.monotonic() + _HEARD_S
    while True:
        try:
            os.close(open_directory(path.parent))  # or it could be anybody who listens there
            with socket_address(path) as address:
                connection.connect(address)
            return connection
        except BlockingIOError as error:  # its queue of connections is full
            if time.monotonic() > deadline:
                connection.close()
                raise _silent(state) from error
            time.sleep(0.05)
        except OSError as error:
            connection.close()
            raise NotFoundError(f"control socket {path}: {error.strerror}", hint=_hint(state, "status")) from error


def _silent(state: ClusterState) -> DeadlineError:
    return DeadlineError(
        f"cluster {state.name!r}: its supervisor (pid {state.supervisor_pid}) does not answer",
        hint=_hint(state, "status"),
    )


def _error(told: dict[str, Any]) -> PdctlError:
    error = PdctlError(str(told["message"]), hint=told["hint"])
    error.exit_code = int(told["exit_code"])
    return error


def _hint(state: ClusterState, verb: str) -> str:
    return command(verb, state.name, state.spec.state_dir)
