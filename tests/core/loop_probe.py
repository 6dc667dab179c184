"""A router as a process of its own, that tells how long its loop stood still: the other end of test_loop.py.

    python loop_probe.py RUN_DIR          one line of JSON when it serves; ends with its standard input

Real rows in a real segment, a real server and connections; the daemons are those of test_api.py, in a third process.
GET /probe tells the longest callback since the last such call, in CPU time of its own, and starts anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdctl.core.router import Server, forbid_torch, return_freed_memory

return_freed_memory()
forbid_torch()

import uvicorn  # noqa: E402
from starlette.types import Receive, Scope, Send  # noqa: E402
from test_api import EOS, MODEL, Engine, ids_of, inner_tokenizer  # noqa: E402

from pdctl.core.api import ServerConfig, create_app  # noqa: E402
from pdctl.core.api_errors import json_response  # noqa: E402
from pdctl.core.connection import MAX_HEAD_BYTES, Connection  # noqa: E402
from pdctl.core.process import die_with_parent  # noqa: E402
from pdctl.core.requests import RowClient  # noqa: E402
from pdctl.core.server.collector import Collector  # noqa: E402
from pdctl.core.tokenizer import Tokenizer  # noqa: E402
from pdctl.transport.doorbell import Bell  # noqa: E402
from pdctl.transport.layout import DType, Geometry  # noqa: E402
from pdctl.transport.names import new_segment_name  # noqa: E402
from pdctl.transport.segment import Role, Segment  # noqa: E402

GEOMETRY = Geometry(
    num_blocks=40_000,
    block_tokens=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype=DType.FLOAT32,
    max_rows=300,
    max_context=8192,
    max_participants=8,
)


class Probe:
    """The longest callback, and what it was."""

    def __init__(self) -> None:
        self.longest_s, self.what = 0.0, ""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.longest_s:
                self.longest_s, self.what = took, repr(handle)

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    def tell(self) -> dict[str, Any]:
        said = {"longest_ms": self.longest_s * 1e3, "what": self.what, "threads": threading.active_count()}
        self.longest_s, self.what = 0.0, ""
        return said


def play_daemons(name: Any, run_dir: Path, parent: int) -> None:
    """Four tokens of an "a" a turn for every row, for ever."""
    die_with_parent(parent)
    engine = Engine(Segment.open(name), run_dir)
    engine.burst = 4
    engine.reply = lambda prompt: ids_of("a") if len(prompt) > 2 else [*ids_of("a"), EOS]
    engine.become_ready()
    engine.segment.attach(Role.SUPERVISOR)  # here: nobody sees its own guard byte as held

    async def run() -> None:
        while True:
            engine._step()
            await asyncio.sleep(0 if engine._active else 0.001)

    asyncio.run(run())


async def serve(segment: Segment, run_dir: Path) -> None:
    me = segment.attach(Role.ROUTER)
    bell = Bell(run_dir, me.slot)
    client = RowClient(segment, me, bell, local_prefill_tokens=4, max_batch=300, max_queue=1000)
    config = ServerConfig(model_name=MODEL, vocab_size=259, eos_token_ids=(EOS,))
    app = create_app(client, Tokenizer(inner_tokenizer()), config)
    probe = Probe()

    async def with_probe(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/probe":
            await json_response(probe.tell())(scope, receive, send)
        else:
            await app(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    def on_serving() -> None:
        client.start()
        Collector(lambda: client.num_live + client.num_waiting).start()
        where = {"port": listener.getsockname()[1], "segment": str(segment.mapping.path)}
        print(json.dumps(where), flush=True)

    server = Server(
        uvicorn.Config(
            with_probe,
            http=Connection,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        ),
        on_serving,
    )
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), server.stop)
    await server.serve(sockets=[listener])
    app.state.close()
    client.begin_shutdown("over")
    await client.finish_shutdown(1)


def main() -> None:
    run_dir = Path(sys.argv[1])
    name = new_segment_name(f"probe-{secrets.token_hex(4)}")
    segment = Segment.create(name, GEOMETRY, fingerprint=1, numerics_id=1)
    parent = os.getpid()
    try:
        if os.fork() == 0:
            try:
                play_daemons(name, run_dir, parent)
            finally:
                os._exit(1)
        asyncio.run(serve(segment, run_dir))
    finally:
        Path(segment.mapping.path or "").unlink()


if __name__ == "__main__":
    main()
