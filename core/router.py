"""The router's process: one event loop between HTTP clients and rows.

    python -m pdctl.core.router --fd N --spec FILE --segment NAME --parent PID

Serves on the listening socket that the supervisor left open as descriptor N. Without torch: it tokenizes, and
never sees a weight. SIGTERM ends it within about three seconds, open streams with an error event. Started and
restarted by supervisor.py.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from pdctl.core import logs, process
from pdctl.core.config import ClusterSpec
from pdctl.core.private_files import read_private
from pdctl.core.requests import RowClient
from pdctl.transport.doorbell import Bell
from pdctl.transport.errors import PdctlError, UsageError
from pdctl.transport.layout import P
from pdctl.transport.names import cluster_dir, log_dir, parse_segment_name
from pdctl.transport.segment import Participant, ParticipantState, Role, Segment

log = logging.getLogger("pdctl.core.router")  # run as __main__

# After SIGTERM: for responses to go out, and then for daemons to let go of cancelled rows.
_CONNECTION_GRACE_S = 2
_ROW_GRACE_S = 1.0


class Server(uvicorn.Server):
    """uvicorn that leaves signals to its caller and wakes once a second, not ten times."""

    def __init__(self, config: uvicorn.Config, on_serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_serving = on_serving
        self._stop = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_serving()

    async def main_loop(self) -> None:
        # uvicorn renews the Date header at every tenth tick.
        while not await self.on_tick(0):
            try:
                await asyncio.wait_for(self._stop.wait(), 1.0)
            except TimeoutError:
                pass

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()


def forbid_torch() -> None:
    """Make this process one in which torch is not installed, before transformers looks.

    transformers would import it with any tokenizer: 1.7 s and 200 MiB for nothing.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


async def serve(spec: ClusterSpec, listener: socket.socket, segment: Segment, me: Participant) -> None:
    """Serve until SIGTERM; then end everything that is under way and return."""
    # Both bring transformers or FastAPI along, which takes a second: after attaching, so that status shows us.
    from pdctl.core.api import ServerConfig, create_app
    from pdctl.core.connection import (
        KEEP_ALIVE_S,
        MAX_HEAD_BYTES,
        Connection,
        bound_unread_answers,
        max_connections,
    )
    from pdctl.core.hosts import Hosts
    from pdctl.core.tokenizer import Tokenizer, read_sampling_defaults

    tokenizer = Tokenizer.load(spec.model_path)
    sampling = read_sampling_defaults(spec.model_path)
    log.info("requests that do not say: %s", sampling)
    bell = Bell(cluster_dir(spec.state_dir, spec.name), me.slot)
    client = RowClient(
        segment,
        me,
        bell,
        local_prefill_tokens=spec.local_prefill_tokens,
        max_batch=spec.max_batch,
        max_queue=spec.max_queue,
    )
    app = create_app(
        client,
        tokenizer,
        ServerConfig(
            model_name=spec.model_name,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            sampling=sampling,
            hosts=Hosts(spec.host, spec.allowed_hosts),
            api_key=spec.api_key,
        ),
    )

    def on_serving() -> None:
        client.start()
        gc.collect()
        gc.freeze()
        me.put(P.READY_NS, time.monotonic_ns())
        me.put(P.STATE, ParticipantState.READY)
        log.info("serving %s on port %d", spec.model_name, listener.getsockname()[1])

    bound_unread_answers(listener)
    Connection.limit = max_connections()
    config = uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CONNECTION_GRACE_S,
    )
    server = Server(config, on_serving)

    def on_stop_signal() -> None:
        log.info("stopping: %d rows in flight, %d requests waiting", client.num_live, client.num_waiting)
        me.put(P.STATE, ParticipantState.STOPPING)
        client.begin_shutdown("the server is shutting down")
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop_signal)
    try:
        await server.serve(sockets=[listener])
        left = await client.finish_shutdown(_ROW_GRACE_S)
        if left:
            log.warning("%d cancelled rows are left to the supervisor", left)
    finally:
        bell.close()


def run(spec: ClusterSpec, fd: int, segment_name: str) -> None:
    name = parse_segment_name(segment_name)
    if name is None:
        raise UsageError(f"--segment {segment_name}: not a segment's name")
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    segment = Segment.open(name)
    me = segment.attach(Role.ROUTER)
    try:
        asyncio.run(serve(spec, listener, segment, me))
    finally:
        segment.detach(me)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdctl.core.router")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--spec", type=Path, required=True, help="file with the cluster's specification")
    parser.add_argument("--segment", required=True, help="the segment's file name")
    parser.add_argument("--parent", type=int, required=True, help="PID of the supervisor")
    # The specification has both; on the command line they tell people whose process this is.
    parser.add_argument("--name")
    parser.add_argument("--state-dir", type=Path)
    given = parser.parse_args(argv)
    process.die_with_parent(given.parent)
    process.set_process_name("pdctl-router")
    forbid_torch()
    try:
        spec = ClusterSpec.from_json(read_private(given.spec))
        logs.setup(log_dir(spec.state_dir, spec.name), "router")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        run(spec, given.fd, given.segment)
    except PdctlError as error:
        log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
