"""The hand-over copies nothing: shown by what two processes allocate and touch, not claimed.

Prefill is traced from its last KV write to the READY store and after; decode from before its claim to the first
attention over the row. 1,024 tokens of KV are 8 MiB here; a copy of them would be seen three times over
(torch's allocations, page faults), as the control shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.core.checkpoint import read_config
from pdctl.core.config import ClusterSpec
from pdctl.transport.layout import R
from pdctl.transport.names import new_segment_name
from pdctl.transport.rows import RowParams
from pdctl.transport.segment import Role, Segment

PROMPT = [(13 * position) % 250 + 3 for position in range(1025)]
TRACE = Path(__file__).with_name("zero_copy_trace.py")


@pytest.fixture
def spec(tmp_path: Path, request: pytest.FixtureRequest) -> ClusterSpec:
    make = request.getfixturevalue("checkpoint_maker")
    path = make(tmp_path / "wide", num_hidden_layers=4, num_key_value_heads=4, head_dim=64, hidden_size=256)
    config = read_config(path)
    return ClusterSpec(
        name="zero",
        state_dir=tmp_path,
        model_path=path,
        model_name="wide",
        fingerprint=5,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        dtype="float32",
        num_blocks=128,
        max_context=2048,
        max_rows=4,
        local_prefill_tokens=0,
    )


@pytest.fixture
def segment(spec: ClusterSpec) -> Iterator[Segment]:
    name = new_segment_name(f"zc{os.getpid()}")
    numerics_id = spec.expected.numerics_id
    made = Segment.create(name, spec.geometry, fingerprint=spec.fingerprint, numerics_id=numerics_id)
    try:
        yield made
    finally:
        made.close()
        name.path.unlink()


@pytest.mark.e2e
def test_no_kv_byte_is_copied(spec: ClusterSpec, segment: Segment, tmp_path: Path) -> None:
    assert segment.mapping.path is not None
    spec_path = tmp_path / "spec.json"
    spec_path.write_text(spec.to_json())
    sides = {}
    for side in ("prefill", "decode"):
        command = [sys.executable, str(TRACE), side, str(spec_path), segment.mapping.path.name]
        sides[side] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for process in sides.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
    router = segment.attach(Role.ROUTER)
    kv_bytes = 1024 * spec.geometry.token_bytes
    assert kv_bytes == 8 << 20
    for copying in (False, True):
        claim = segment.rows.submit(
            router,
            request_id="r",
            # Of another beginning each: nothing of the second is cached.
            tokens=PROMPT[copying:] + PROMPT[:copying],
            limit_tokens=len(PROMPT) + 3,
            params=RowParams(),
            local_prefill_tokens=0,
        )
        assert claim is not None and claim.row == copying
        counts = {side: json.loads(process.stdout.readline()) for side, process in sides.items() if process.stdout}
        assert segment.rows.get(claim.row, R.PREFILLED_TOKENS) == 1024
        for side, found in counts.items():
            print("copying" if copying else side, found)
            if copying and side == "decode":
                assert found["torch_bytes"] >= kv_bytes
                assert found["fault_bytes"] >= kv_bytes // 2
            elif not copying:
                # What is left: tables of block numbers, one token's activations, the tracer's own pages.
                assert found["torch_bytes"] < kv_bytes // 16
                assert found["python_peak_bytes"] < kv_bytes // 16
                assert found["fault_bytes"] < kv_bytes // 4
    assert [process.wait(60) for process in sides.values()] == [0, 0]
