"""The zygote: loads the weights once and forks every daemon from itself.

    supervisor --- zygote (weights, one thread, no segment, no lock, no forward ever)
        \\              | fork, fork
         +---- prefill-0, decode-0, ...   orphans of the second fork: children of the supervisor (a sub-reaper)

A daemon so made shares the weights' memory, and one that died is replaced in a fraction of a second. Speaks
JSON lines over a socket pair with the supervisor: {"fork": kind, "index": n, "proof_ns": t} -> {"forked": pid, ...},
or {"unforked": why, ...}. Specification and segment come by descriptor (inheritance.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import time
import traceback

from pdctl.core import inheritance, logs
from pdctl.core.config import ClusterSpec
from pdctl.core.process import die_with_parent, set_process_name
from pdctl.transport.errors import PdctlError
from pdctl.transport.names import log_dir

_ADOPTION_DEADLINE_S = 5.0
# Of an error that the supervisor is told, whose ear takes 64 KiB: a library may name a whole configuration.
_MAX_WORDS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdctl.core.zygote")
    inheritance.add_arguments(parser)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    set_process_name("pdctl-zygote")
    spec, segment_fd = inheritance.receive(given)
    logs.setup(log_dir(spec.state_dir, spec.name), "zygote")
    wire = socket.socket(fileno=given.fd)
    try:
        _serve(spec, segment_fd, wire, given.parent)
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, PdctlError):
            said = error.message if error.hint is None else f"{error.message} ({error.hint})"
        _say(wire, error=said.splitlines()[0][:_MAX_WORDS])
        sys.exit(1)


def _serve(spec: ClusterSpec, segment_fd: int, wire: socket.socket, supervisor: int) -> None:
    import torch

    # OpenMP threads do not survive a fork: this process never starts any.
    torch.set_num_threads(1)
    from pdctl.core.daemon import serve
    from pdctl.core.served_model import load_model

    model = load_model(spec, lambda done, total: _say(wire, loading=[done, total]) if done % 8 == 0 else None)
    gc.collect()
    gc.freeze()
    gc.disable()
    _say(wire, loaded=True)
    # SOCK_SEQPACKET: one message a read; empty when the supervisor is gone.
    while message := wire.recv(4096):
        request = json.loads(message)
        kind, index, proof_ns = str(request["fork"]), int(request["index"]), request["proof_ns"]
        middle = _fork(wire, kind, index)
        if middle is None:
            continue
        if middle == 0:
            daemon = _fork(wire, kind, index)
            if daemon != 0:
                if daemon is not None:
                    _say(wire, forked=daemon, kind=kind, index=index)
                os._exit(0)
            code = 1
            try:
                wire.close()
                _await_adoption(supervisor)
                die_with_parent(supervisor)
                serve(spec, segment_fd, kind, index, model, proof_ns)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.waitpid(middle, 0)


def _fork(wire: socket.socket, kind: str, index: int) -> int | None:
    """As os.fork; None, and the supervisor knows why, if the system has no process or memory to give."""
    try:
        return os.fork()
    except OSError as error:
        _say(wire, unforked=error.strerror, kind=kind, index=index)
        return None


def _await_adoption(supervisor: int) -> None:
    """Wait until the process between us and the supervisor is gone."""
    deadline = time.monotonic() + _ADOPTION_DEADLINE_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            sys.exit(f"supervisor {supervisor} is gone")
        time.sleep(0.001)


def _say(wire: socket.socket, **message: object) -> None:
    wire.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
