"""The zygote: loads the weights once and forks every daemon from itself.

    supervisor --- zygote (weights, one thread, no segment, no lock, no forward ever)
        \\              | fork, fork
         +---- prefill-0, decode-0, ...   orphans of the second fork: children of the supervisor (a sub-reaper)

A daemon so made shares the weights' memory, and one that died is replaced in a fraction of a second. Speaks
JSON lines over a socket pair with the supervisor: {"fork": kind, "index": n, "proof_ns": t} -> {"forked": pid, ...}.
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
from pathlib import Path

from pdctl.core import logs
from pdctl.core.config import ClusterSpec
from pdctl.core.private_files import read_private
from pdctl.core.process import die_with_parent, set_process_name
from pdctl.transport.errors import PdctlError
from pdctl.transport.names import SegmentName, log_dir, parse_segment_name

_ADOPTION_DEADLINE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdctl.core.zygote")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--segment", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    set_process_name("pdctl-zygote")
    spec = ClusterSpec.from_json(read_private(given.spec))
    logs.setup(log_dir(spec.state_dir, spec.name), "zygote")
    segment_name = parse_segment_name(given.segment)
    if segment_name is None:
        sys.exit(f"{given.segment}: not a segment's name")
    wire = socket.socket(fileno=given.fd)
    try:
        _serve(spec, segment_name, wire, given.parent)
    except Exception as error:
        traceback.print_exc()
        said = error.message if isinstance(error, PdctlError) else f"{type(error).__name__}: {error}"
        _say(wire, error=said.splitlines()[0])
        sys.exit(1)


def _serve(spec: ClusterSpec, segment_name: SegmentName, wire: socket.socket, supervisor: int) -> None:
    import torch

    # OpenMP threads do not survive a fork: this process never starts any.
    torch.set_num_threads(1)
    from pdctl.core.daemon import serve
    from pdctl.core.model import load
    from pdctl.core.numerics import numerics

    model = load(
        spec.model_path,
        numerics(spec.dtype),
        lambda done, total: _say(wire, loading=[done, total]) if done % 8 == 0 else None,
    )
    gc.collect()
    gc.freeze()
    gc.disable()
    _say(wire, loaded=True)
    # SOCK_SEQPACKET: one message a read; empty when the supervisor is gone.
    while message := wire.recv(4096):
        request = json.loads(message)
        kind, index, proof_ns = str(request["fork"]), int(request["index"]), request["proof_ns"]
        middle = os.fork()
        if middle == 0:
            daemon = os.fork()
            if daemon:
                _say(wire, forked=daemon, kind=kind, index=index)
                os._exit(0)
            code = 1
            try:
                wire.close()
                _await_adoption(supervisor)
                die_with_parent(supervisor)
                serve(spec, segment_name, kind, index, model, proof_ns)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.waitpid(middle, 0)


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
