"""How long a stream pauses when its decode daemon is killed: of a running cluster, which survives it.

    pdctl up --decode 2 && python tests/benchmarks/failover_pause.py [NAME] [TIMES]

Each time one stream is under way; the daemon that owns its row gets SIGKILL. The pause is the longest gap between
two tokens less the median one. Not collected by pytest.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import time

from pdctl.core.client import Client
from pdctl.core.cluster import running
from pdctl.transport.layout import P, R
from pdctl.transport.names import DEFAULT_CLUSTER, default_state_dir
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Segment, open_to_look


def kill_owner(segment: Segment) -> None:
    (row,) = segment.rows.in_state(RowState.DECODING)
    os.kill(segment.participant_word(segment.rows.get(row, R.OWNER) - 1, P.PID), signal.SIGKILL)


def pause_s(client: Client, segment: Segment, seed: int) -> float:
    body = {
        "prompt": f"Number {seed}: once upon a time",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    for arrived_ns, chunk in client.stream("/v1/completions", body):
        if chunk["choices"] and chunk["choices"][0]["token_ids"]:
            times.append(arrived_ns / 1e9)
            if len(times) == 12:
                kill_owner(segment)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return max(gaps) - statistics.median(gaps)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_CLUSTER
    times = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    state = running(default_state_dir(), name)
    client, segment = Client(state.url, state.spec.api_key), open_to_look(state.segment_name)
    pauses = []
    for seed in range(times):
        pauses.append(pause_s(client, segment, seed))
        time.sleep(12)  # a daemon that dies sooner after its start is taken for one that cannot start
    p99 = statistics.quantiles(pauses, n=100, method="inclusive")[98]
    print(f"{state.spec.num_decode} decode: pause p50 {statistics.median(pauses):.3f} s, p99 {p99:.3f} s of {times}")


if __name__ == "__main__":
    main()
