"""The engines over a private segment, in one process: tokens against transformers and against themselves.

Every served sequence must be transformers' own in float32 (or within 1e-3 of its largest logit, teacher-forced),
and bit-equal to the same request served alone, whatever else happens in the segment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdctl.core.config import ClusterSpec
from pdctl.core.daemon import map_pages, numerics_hold
from pdctl.core.decode import DecodeEngine
from pdctl.core.model import Model, load
from pdctl.core.numerics import numerics
from pdctl.core.prefill import PrefillEngine
from pdctl.transport.layout import P, R
from pdctl.transport.recovery import reap, verify
from pdctl.transport.rows import Actor, FinishReason, RowParams, RowState
from pdctl.transport.segment import ParticipantState, Role, Segment

BLOCK = 16
CHUNK = 32


class Cluster:
    """A router's, a prefill's and a decode's place over one anonymous segment, stepped by hand."""

    def __init__(
        self, model: Model, path: Path, *, num_blocks: int = 256, chunk: int = CHUNK, local: int = 0
    ) -> None:
        from pdctl.core.checkpoint import read_config

        config = read_config(path)
        self.spec = ClusterSpec(
            name="test",
            state_dir=Path("/tmp"),
            model_path=path,
            model_name="tiny",
            fingerprint=1,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            eos_token_ids=(),
            dtype=model.numerics.dtype,
            block_tokens=BLOCK,
            num_blocks=num_blocks,
            max_context=512,
            max_rows=32,
            local_prefill_tokens=local,
            chunk_tokens=chunk,
        )
        self.segment = Segment.anonymous(self.spec.geometry)
        self.model = model
        self.router = self.segment.attach(Role.ROUTER)
        pages = map_pages(self.segment)
        # Pages of a pool in use are never clean: what they hold must not matter.
        pages.fill_(float("nan"))
        model.use_pages(pages)
        self.prefill = self.new_prefill()
        self.decode = self.new_decode()

    def new_prefill(self) -> PrefillEngine:
        return PrefillEngine(self.segment, self.segment.attach(Role.PREFILL), self.model, self.spec, lambda _: None)

    def new_decode(self) -> DecodeEngine:
        me = self.segment.attach(Role.DECODE)
        me.put(P.STATE, ParticipantState.READY)
        return DecodeEngine(self.segment, me, self.model, self.spec, lambda _: None)

    def submit(self, tokens: list[int], count: int, **params: Any) -> tuple[int, int]:
        claim = self.segment.rows.submit(
            self.router,
            request_id="r",
            tokens=tokens,
            limit_tokens=len(tokens) + count,
            params=RowParams(**params),
            local_prefill_tokens=self.spec.local_prefill_tokens,
        )
        assert claim is not None
        return claim.row, claim.generation

    def done(self, row: int) -> bool:
        return self.segment.rows.state(row) in (RowState.FINISHED, RowState.FAILED, RowState.CANCELLED)

    def run(self, *rows: int, steps: int = 5000) -> None:
        for _ in range(steps):
            self.prefill.step()
            self.decode.step()
            if all(self.done(row) for row in rows):
                assert verify(self.segment) == []
                return
        raise AssertionError(f"rows {[self.segment.rows.state(row).name for row in rows]} after {steps} steps")

    def take(self, row: int, generation: int, prompt: int) -> list[int]:
        rows = self.segment.rows
        assert rows.state(row) is RowState.FINISHED, rows.error_text(row)
        tokens = rows.new_tokens(row, generation, prompt)
        assert rows.recycle(row, generation)
        return tokens

    def ask(self, tokens: list[int], count: int, **params: Any) -> list[int]:
        row, generation = self.submit(tokens, count, **params)
        self.run(row)
        return self.take(row, generation, len(tokens))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 259, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tiny_dir: Path) -> Model:
    torch.set_num_threads(2)
    return load(tiny_dir, numerics(request.param))


@pytest.fixture(scope="module")
def oracle(tiny_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * BLOCK + 1, 2 * CHUNK, 140]


@pytest.mark.parametrize("length", EDGES)
def test_tokens_are_transformers_own_cold_and_cached(model: Model, tiny_dir: Path, oracle: Any, length: int) -> None:
    cluster = Cluster(model, tiny_dir)
    prompt = prompt_of(length)
    row, generation = cluster.submit(prompt, 24)
    cluster.run(row)
    rows = cluster.segment.rows
    assert rows.get(row, R.PREFILLED_TOKENS) == length - 1
    assert rows.get(row, R.LOCAL_TOKENS) == 0
    cold = cluster.take(row, generation, length)
    row, generation = cluster.submit(prompt, 24)
    cluster.run(row)
    assert rows.get(row, R.CACHED_TOKENS) == (length - 1) // BLOCK * BLOCK
    assert cluster.take(row, generation, length) == cold
    if model.numerics.dtype == "float32":
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + cold])).logits[0, length - 1 : -1]
        chosen = logits.gather(1, torch.tensor(cold).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) < 1e-3
        assert cold == logits.argmax(1).tolist()


def test_alone_is_among_others_is_chunked_is_local(model: Model, tiny_dir: Path) -> None:
    prompts = [prompt_of(length, seed=3) for length in (1, 40, 97, 5, 64, 33, 200, 16)]
    samplers: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.3, "top_p": 0.8, "seed": 1},
    ]
    alone = []
    for index, prompt in enumerate(prompts):
        alone.append(Cluster(model, tiny_dir).ask(prompt, 40, **samplers[index % 3]))
    for chunk, local, threads in ((CHUNK, 0, 2), (7, 0, 1), (512, 0, 2), (CHUNK, 64, 2), (CHUNK, 512, 1)):
        torch.set_num_threads(threads)
        cluster = Cluster(model, tiny_dir, chunk=chunk, local=local)
        handles = []
        for index, prompt in enumerate(prompts):
            handles.append(cluster.submit(prompt, 40, **samplers[index % 3]))
            for _ in range(index):
                cluster.prefill.step()
                cluster.decode.step()
        cluster.run(*(row for row, _ in handles))
        for prompt, (row, generation), expected in zip(prompts, handles, alone, strict=True):
            assert cluster.take(row, generation, len(prompt)) == expected, (chunk, local, threads, len(prompt))
    torch.set_num_threads(2)


def test_preempted_for_want_of_blocks(model: Model, tiny_dir: Path) -> None:
    prompts = [prompt_of(60, seed=seed) for seed in range(4)]
    alone = [Cluster(model, tiny_dir).ask(prompt, 80) for prompt in prompts]
    # 9 blocks a row in the end, 14 in all.
    cluster = Cluster(model, tiny_dir, num_blocks=14)
    handles = [cluster.submit(prompt, 80) for prompt in prompts]
    cluster.run(*(row for row, _ in handles))
    assert sum(cluster.segment.rows.get(row, R.PREEMPTIONS) for row, _ in handles) > 0
    for (row, generation), prompt, expected in zip(handles, prompts, alone, strict=True):
        assert cluster.take(row, generation, len(prompt)) == expected
    assert cluster.segment.pool.num_available() == 14


def test_the_oldest_gets_the_blocks_of_a_younger_queued_row(model: Model, tiny_dir: Path) -> None:
    cluster = Cluster(model, tiny_dir, num_blocks=14)
    old, _ = cluster.submit(prompt_of(150), 4)
    young, _ = cluster.submit(prompt_of(100), 4)
    rows = cluster.segment.rows
    other = cluster.segment.attach(Role.PREFILL)
    assert rows.claim(other, young, alone=True) is not None
    rows.put_back(young, Actor.PREFILL)
    assert rows.state(young) is RowState.QUEUED
    assert rows.get(young, R.NUM_BLOCKS) == 7
    cluster.run(old, young)
    assert rows.get(young, R.PREEMPTIONS) == 1
    assert rows.get(old, R.PREEMPTIONS) == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_dead_daemons_rows_go_on_elsewhere(model: Model, tiny_dir: Path, role: Role, after: int) -> None:
    prompt = prompt_of(150, seed=9)
    expected = Cluster(model, tiny_dir).ask(prompt, 30)
    cluster = Cluster(model, tiny_dir)
    row, generation = cluster.submit(prompt, 30)
    if role is Role.DECODE:
        while cluster.segment.rows.state(row) is not RowState.READY:
            cluster.prefill.step()
    engine = cluster.prefill if role is Role.PREFILL else cluster.decode
    for _ in range(after):
        engine.step()
    computed = cluster.segment.rows.get(row, R.KV_LEN)
    assert computed > 0
    dead = engine._me
    reaped = reap(cluster.segment, dead.slot, dead.incarnation, "killed")
    assert reaped.adoptable == ((row,) if cluster.segment.rows.get(row, R.ADOPTIONS) else ())
    cluster.prefill, cluster.decode = cluster.new_prefill(), cluster.new_decode()
    cluster.run(row)
    # Nothing committed was computed again.
    if role is Role.PREFILL:
        assert cluster.segment.rows.get(row, R.PREFILLED_TOKENS) == 149
    assert cluster.take(row, generation, len(prompt)) == expected


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_released_rows_go_on_with_a_peer_as_they_are(model: Model, tiny_dir: Path, role: Role) -> None:
    """Drain, scale down, restart: handed from peer to peer at every step, nothing computed twice."""
    prompt = prompt_of(150, seed=9)
    expected = Cluster(model, tiny_dir).ask(prompt, 30)
    cluster = Cluster(model, tiny_dir)
    peers = {
        Role.PREFILL: [cluster.prefill, cluster.new_prefill()],
        Role.DECODE: [cluster.decode, cluster.new_decode()],
    }
    row, generation = cluster.submit(prompt, 30)
    rows, owners = cluster.segment.rows, set()
    prefills = role is Role.PREFILL
    held, left = (RowState.PREFILLING, RowState.QUEUED) if prefills else (RowState.DECODING, RowState.READY)
    for turn in range(1000):
        for each in Role.PREFILL, Role.DECODE:
            engine = peers[each][turn % 2 if each is role else 0]
            engine.step()
            if each is role and rows.state(row) is held:
                owners.add(rows.get(row, R.OWNER))
                engine.release()
                assert rows.state(row) is left
        if cluster.done(row):
            break
    assert len(owners) == 2
    assert verify(cluster.segment) == []
    assert (rows.get(row, R.PREFILLED_TOKENS), rows.get(row, R.LOCAL_TOKENS)) == (149, 0)
    assert (rows.get(row, R.ADOPTIONS), rows.get(row, R.PREEMPTIONS), rows.get(row, R.ATTEMPTS)) == (0, 0, 0)
    assert cluster.take(row, generation, len(prompt)) == expected


def test_a_predecessor_that_died_after_the_last_token(model: Model, tiny_dir: Path) -> None:
    cluster = Cluster(model, tiny_dir)
    prompt = prompt_of(20)
    row, generation = cluster.submit(prompt, 5)
    rows = cluster.segment.rows
    while rows.count_tokens(row) < 24:
        cluster.prefill.step()
        cluster.decode.step()
    base = cluster.segment.layout.row(row) + cluster.segment.layout.row_tokens
    rows.put(row, R.KV_LEN, 24)
    cluster.segment.words[base + 24] = generation << 32 | 77  # the slot is the commit; the length was not yet told
    reap(cluster.segment, cluster.decode._me.slot, cluster.decode._me.incarnation, "killed")
    cluster.decode = cluster.new_decode()
    cluster.run(row)
    assert rows.get(row, R.FINISH_REASON) == FinishReason.LENGTH
    assert cluster.take(row, generation, 20)[-1] == 77


def test_stop_token_and_limit(model: Model, tiny_dir: Path) -> None:
    cluster = Cluster(model, tiny_dir)
    prompt = prompt_of(30)
    tokens = cluster.ask(prompt, 12)
    assert len(tokens) == 12
    row, generation = cluster.submit(prompt, 12, stop_ids=(tokens[0],))
    cluster.run(row)
    assert cluster.segment.rows.get(row, R.FINISH_REASON) == FinishReason.STOP
    assert cluster.take(row, generation, 30) == tokens[:1]


def test_cancelled_rows_give_their_blocks_back(model: Model, tiny_dir: Path) -> None:
    cluster = Cluster(model, tiny_dir)
    handles = [cluster.submit(prompt_of(100, seed=seed), 200) for seed in range(3)]
    for _ in range(6):
        cluster.prefill.step()
        cluster.decode.step()
    for row, generation in handles:
        cluster.segment.rows.cancel(row, generation)
    cluster.run(*(row for row, _ in handles))
    assert cluster.segment.pool.num_available() == cluster.spec.num_blocks


def test_the_probe_holds_here_and_notices_order(
    model: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(model, tiny_dir)
    assert numerics_hold(model)
    from pdctl.core import attention

    real = attention._attend

    def other_order(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        out = real(q, k, v, hidden)
        return out * (1 + 1e-3) if q.shape[1] > 8 else out

    monkeypatch.setattr(attention, "_attend", other_order)
    assert not numerics_hold(model)
