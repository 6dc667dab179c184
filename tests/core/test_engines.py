"""The engines over a private segment, in one process: tokens against transformers and against themselves.

Every served sequence must be transformers' own in float32 (or within 1e-3 of its largest logit, teacher-forced),
and bit-equal to the same request served alone, whatever else happens in the segment.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import Engines

from pdctl.core import attention as attention_module
from pdctl.core import model as model_module
from pdctl.core.config import ClusterSpec
from pdctl.core.daemon import map_pages, numerics_hold
from pdctl.core.model import Model, load
from pdctl.core.numerics import numerics
from pdctl.transport.layout import LOGPROB_RING, R
from pdctl.transport.recovery import reap, verify
from pdctl.transport.rows import Actor, FinishReason, RowParams, RowState, TokenLogprobs
from pdctl.transport.segment import Role, Segment

BLOCK = 16
CHUNK = 32
# All that a request can ask of the sampler.
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "seed": 3,
    "min_tokens": 10,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "stop_ids": (9,),
    "logit_bias": ((9, 2.0), (40, -100.0), (77, 1.5)),
    "num_logprobs": 2,
}
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "top_p": 0.8, "seed": 1},
    {**EVERYTHING, "stop_ids": ()},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "num_logprobs": 0},
]


class Cluster(Engines):
    """A router's, a prefill's and a decode's place over one anonymous segment, stepped by hand; or colocated."""

    def __init__(
        self,
        model: Model,
        path: Path,
        *,
        num_blocks: int = 256,
        chunk: int = CHUNK,
        local: int = 0,
        colocated: bool = False,
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
        self.rung: list[int] = []
        self.segment = Segment.anonymous(self.spec.geometry)
        self.model = model
        self.router = self.segment.attach(Role.ROUTER)
        pages = map_pages(self.segment)
        # Pages of a pool in use are never clean: what they hold must not matter.
        pages.fill_(float("nan"))
        model.use_pages(pages)
        self.colocated = self.new_colocated() if colocated else None
        self.prefill = self.new_prefill() if self.colocated is None else self.colocated.prefill
        self.decode = self.new_decode() if self.colocated is None else self.colocated.decode
        self._logprobs: dict[int, list[TokenLogprobs]] = {}

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
        if params.get("num_logprobs") is not None:
            self._logprobs[claim.row] = []
        return claim.row, claim.generation

    def read_logprobs(self, row: int) -> list[TokenLogprobs]:
        """All so far, as the router reads them: each once, as tokens come."""
        rows, start = self.segment.rows, self.segment.rows.get(row, R.READ_TOKENS)
        self._logprobs[row] += rows.take_logprobs(row, start, rows.count_tokens(row))
        return self._logprobs[row]

    def done(self, row: int) -> bool:
        return self.segment.rows.state(row) in (RowState.FINISHED, RowState.FAILED, RowState.CANCELLED)

    def step(self) -> None:
        for engine in (self.prefill, self.decode) if self.colocated is None else (self.colocated,):
            engine.step()

    def run(self, *rows: int, steps: int = 5000) -> None:
        for _ in range(steps):
            self.step()
            for row in self._logprobs:
                self.read_logprobs(row)
            if all(self.done(row) for row in rows):
                assert verify(self.segment) == []
                return
        raise AssertionError(f"rows {[self.segment.rows.state(row).name for row in rows]} after {steps} steps")

    def take(self, row: int, generation: int, prompt: int) -> list[int]:
        rows = self.segment.rows
        assert rows.state(row) is RowState.FINISHED, rows.error_text(row)
        tokens = rows.new_tokens(row, generation, prompt)
        if row in self._logprobs:
            assert [one.token for one in self._logprobs.pop(row)] == tokens
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
    colocated = Cluster(model, tiny_dir, colocated=True)
    assert [colocated.ask(prompt, 24) for _ in range(2)] == [cold, cold]
    if model.numerics.dtype == "float32":
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + cold])).logits[0, length - 1 : -1]
        chosen = logits.gather(1, torch.tensor(cold).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) < 1e-3
        assert cold == logits.argmax(1).tolist()


def test_alone_is_among_others_is_chunked_is_local(model: Model, tiny_dir: Path) -> None:
    prompts = [prompt_of(length, seed=3) for length in (1, 40, 97, 5, 64, 33, 200, 16)]
    samplers = [SAMPLERS[index % len(SAMPLERS)] for index in range(len(prompts))]
    alone = []
    for prompt, sampler in zip(prompts, samplers, strict=True):
        alone.append(Cluster(model, tiny_dir).ask(prompt, 40, **sampler))
    # Chunk, local prefill, threads, colocated.
    setups = [
        (CHUNK, 0, 2, False),
        (7, 0, 1, False),
        (512, 0, 2, False),
        (CHUNK, 64, 2, False),
        (CHUNK, 512, 1, False),
    ]
    setups += [(CHUNK, 0, 2, True), (7, 0, 1, True), (512, 0, 2, True)]
    for chunk, local, threads, colocated in setups:
        torch.set_num_threads(threads)
        cluster = Cluster(model, tiny_dir, chunk=chunk, local=local, colocated=colocated)
        handles = []
        for index, prompt in enumerate(prompts):
            handles.append(cluster.submit(prompt, 40, **samplers[index]))
            for _ in range(index):
                cluster.step()
        cluster.run(*(row for row, _ in handles))
        for prompt, (row, generation), expected in zip(prompts, handles, alone, strict=True):
            what = (chunk, local, threads, colocated, len(prompt))
            assert cluster.take(row, generation, len(prompt)) == expected, what
    torch.set_num_threads(2)


def test_preempted_for_want_of_blocks(model: Model, tiny_dir: Path) -> None:
    prompts = [prompt_of(60, seed=seed) for seed in range(4)]
    samplers = [{}, *SAMPLERS[2:]]
    pairs = list(zip(prompts, samplers, strict=True))
    alone = [Cluster(model, tiny_dir).ask(prompt, 80, **sampler) for prompt, sampler in pairs]
    # 9 blocks a row in the end, 14 in all.
    cluster = Cluster(model, tiny_dir, num_blocks=14)
    handles = [cluster.submit(prompt, 80, **sampler) for prompt, sampler in pairs]
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
    expected = Cluster(model, tiny_dir).ask(prompt, 30, **EVERYTHING)
    cluster = Cluster(model, tiny_dir)
    row, generation = cluster.submit(prompt, 30, **EVERYTHING)
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


# --- sampling ------------------------------------------------------------------------------------------------


def test_greedy_and_sampled_side_by_side(model: Model, tiny_dir: Path) -> None:
    prompt, sampled = prompt_of(50, seed=4), {"temperature": 0.9, "seed": 7}
    alone = Cluster(model, tiny_dir).ask(prompt, 40, **sampled)
    cluster = Cluster(model, tiny_dir)
    handles = [cluster.submit(prompt, 40, **params) for params in ({}, sampled, {}, sampled)]
    cluster.run(*(row for row, _ in handles))
    a, b, c, d = [cluster.take(row, generation, 50) for row, generation in handles]
    assert a == c != b == d == alone


def test_penalties_are_seen_in_the_answer(model: Model, tiny_dir: Path) -> None:
    """Bias makes the model say two ids in turn for ever; penalties make it say all three."""
    cluster, prompt = Cluster(model, tiny_dir), prompt_of(20)
    bias = {"logit_bias": ((50, 100.0), (60, 99.0), (70, 98.0))}
    plain = cluster.ask(prompt, 12, **bias)
    assert plain.count(50) > 6
    for penalty in ({"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}):
        found = cluster.ask(prompt, 12, **bias, **penalty)
        assert found != plain
        assert len(set(found)) > len(set(plain)), penalty
    # Of the prompt only repetition takes note.
    prompt[-3] = 50
    assert cluster.ask(prompt, 1, **bias, presence_penalty=2.0) == cluster.ask(prompt, 1, **bias)
    assert cluster.ask(prompt, 1, **bias, repetition_penalty=2.0) != cluster.ask(prompt, 1, **bias)


def test_bias_forces_and_bans(model: Model, tiny_dir: Path) -> None:
    cluster, prompt = Cluster(model, tiny_dir), prompt_of(20)
    assert cluster.ask(prompt, 5, logit_bias=((50, 100.0),)) == [50] * 5
    free = cluster.ask(prompt, 20)
    banned = cluster.ask(prompt, 20, logit_bias=tuple((token, -100.0) for token in sorted(set(free))))
    assert not set(banned) & set(free)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 2}])
def test_no_end_before_min_tokens_whatever_the_bias(model: Model, tiny_dir: Path, params: dict[str, Any]) -> None:
    cluster, prompt = Cluster(model, tiny_dir), prompt_of(20)
    wish: dict[str, Any] = {"stop_ids": (9, 11), "logit_bias": ((9, 100.0), (11, 100.0)), **params}
    assert len(cluster.ask(prompt, 30, **wish)) == 1
    for number in (1, 6, 30):
        row, generation = cluster.submit(prompt, 30, **wish, min_tokens=number)
        cluster.run(row)
        reason = FinishReason(cluster.segment.rows.get(row, R.FINISH_REASON))
        tokens = cluster.take(row, generation, 20)
        assert not {9, 11} & set(tokens[:number])
        assert (len(tokens), reason) == (
            (number + 1, FinishReason.STOP) if number < 30 else (30, FinishReason.LENGTH)
        )


def test_several_end_of_sequence_ids(model: Model, tiny_dir: Path) -> None:
    prompt = prompt_of(20)
    cluster = Cluster(model, tiny_dir)
    cluster.spec = replace(cluster.spec, eos_token_ids=(9, 11))
    cluster.decode = cluster.new_decode()
    for token in (9, 11):
        force = {"logit_bias": ((token, 100.0),)}
        assert cluster.ask(prompt, 8, **force) == [token]
        assert cluster.ask(prompt, 8, **force, ignore_eos=True) == [token] * 8
        assert len(cluster.ask(prompt, 8, **force, min_tokens=3)) == 4


def test_log_probabilities_are_the_models_own(model: Model, tiny_dir: Path, oracle: Any) -> None:
    """More of them than the ring holds, the first token's included, and whatever else changes the answer."""
    count, prompt = LOGPROB_RING * 2 + 9, prompt_of(40)
    asked = ({"num_logprobs": 0}, {"num_logprobs": 5}, {**EVERYTHING, "stop_ids": (), "num_logprobs": 20})
    cluster = Cluster(model, tiny_dir)
    handles = [cluster.submit(prompt, count, **params) for params in asked]
    cluster.run(*(row for row, _ in handles))
    for params, (row, generation) in zip(asked, handles, strict=True):
        logprobs = cluster.read_logprobs(row)
        tokens = cluster.take(row, generation, len(prompt))
        assert len(logprobs) == count
        assert {len(one.top) for one in logprobs} == {params["num_logprobs"]}
        if model.numerics.dtype != "float32":
            continue
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        for one, theirs in zip(logprobs, expected, strict=True):
            assert abs(one.logprob - float(theirs[one.token])) < 1e-3
            for (_, value), value_there in zip(one.top, theirs.sort(descending=True).values.tolist(), strict=False):
                assert abs(value - value_there) < 1e-3
            assert all(abs(value - float(theirs[token])) < 1e-3 for token, value in one.top)


def test_a_row_waits_for_its_reader_and_others_do_not(model: Model, tiny_dir: Path) -> None:
    expected = Cluster(model, tiny_dir).ask(prompt_of(20), 100, num_logprobs=1)
    cluster = Cluster(model, tiny_dir)
    read, generation = cluster.submit(prompt_of(20), 100, num_logprobs=1)
    other, _ = cluster.submit(prompt_of(30), 120)
    rows = cluster.segment.rows
    while not cluster.done(other):
        cluster.prefill.step()
        assert cluster.decode.step() or rows.states().count(RowState.DECODING) == 0
    assert rows.count_tokens(read) == 20 + LOGPROB_RING
    assert not cluster.decode.step(), "nothing can run: the daemon sleeps until its bell rings"
    cluster.read_logprobs(read)
    assert cluster.decode.step()
    cluster.run(read)
    assert cluster.take(read, generation, 20) == expected


@pytest.mark.parametrize("committed", [False, True])
def test_log_probabilities_survive_a_death_around_the_commit(
    model: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    prompt = prompt_of(20)
    cluster = Cluster(model, tiny_dir)
    row, _ = cluster.submit(prompt, 30, **EVERYTHING)
    cluster.run(row)
    expected = cluster.read_logprobs(row)
    cluster = Cluster(model, tiny_dir)  # whose ring has nothing of it yet
    rows = cluster.segment.rows
    row, _ = cluster.submit(prompt, 30, **EVERYTHING)
    commit = rows.commit_token

    def die(row: int, generation: int, position: int, token: int) -> None:
        if position != 23 or committed:
            commit(row, generation, position, token)
        if position == 23:
            raise KeyboardInterrupt

    monkeypatch.setattr(rows, "commit_token", die)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(row)
    monkeypatch.undo()
    assert rows.count_tokens(row) == 23 + committed
    reap(cluster.segment, cluster.decode._me.slot, cluster.decode._me.incarnation, "killed")
    cluster.decode = cluster.new_decode()
    cluster.run(row)
    assert cluster.read_logprobs(row) == expected


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

    def other_order(q: Any, *rest: Any) -> Any:
        out = real(q, *rest)
        return out * (1 + 1e-3) if q.shape[1] > 8 else out

    monkeypatch.setattr(attention, "_attend", other_order)
    assert not numerics_hold(model)


def test_slices_and_parts_change_no_bit_and_each_is_a_tick(
    model: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of any size is computed in bounded parts: of tokens, of a chunk's scores, of a batch's keys."""
    prompts = [prompt_of(length, seed=9) for length in (200, 3, 150, 40)]

    def answers(chunk: int) -> tuple[list[list[int]], int]:
        cluster, ticks = Cluster(model, tiny_dir, chunk=chunk), [0]
        model.on_tick = lambda: ticks.__setitem__(0, ticks[0] + 1)
        handles = [cluster.submit(prompt, 12, temperature=0.8, seed=3) for prompt in prompts]
        cluster.run(*(row for row, _ in handles))
        return [cluster.take(*one, len(prompt)) for one, prompt in zip(handles, prompts, strict=True)], ticks[0]

    monkeypatch.setattr(model, "on_tick", model.on_tick)
    whole, num_whole = answers(512)
    monkeypatch.setattr(model_module, "SLICE_TOKENS", 16)
    monkeypatch.setattr(attention_module, "_PART_SCORES", 1 << 10)
    monkeypatch.setattr(attention_module, "_PART_KEYS", 1)
    parts, num_parts = answers(512)
    assert parts == whole
    assert num_parts > 4 * num_whole


def test_no_tick_is_more_than_a_layer_of_a_slice_or_a_part_of_its_attention(
    model: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest chunk there may be: what lies between two ticks is bounded by the code, not by the flag."""
    sizes, since = [], [0]
    attend, hidden = attention_module._attend, Model._hidden

    def counted(q: torch.Tensor, k: torch.Tensor, *others: Any) -> torch.Tensor:
        since[0] += q.shape[0] * q.shape[1] * k.shape[1] * attention_module.RANGE_TOKENS
        return attend(q, k, *others)

    def sliced(self: Model, tokens: list[int], runs: list[Any]) -> torch.Tensor:
        assert len(tokens) <= model_module.SLICE_TOKENS
        return hidden(self, tokens, runs)

    def tick() -> None:
        sizes.append(since[0])
        since[0] = 0

    monkeypatch.setattr(attention_module, "_attend", counted)
    monkeypatch.setattr(attention_module, "_PART_SCORES", 1 << 14)
    monkeypatch.setattr(Model, "_hidden", sliced)
    monkeypatch.setattr(model_module, "SLICE_TOKENS", 64)
    monkeypatch.setattr(model, "on_tick", tick)
    Cluster(model, tiny_dir, chunk=1 << 16).ask(prompt_of(400), 2)
    assert max(sizes) <= 1 << 14
    assert len(sizes) > 30


@pytest.mark.parametrize("colocated", [False, True])
def test_a_forward_that_is_ended_midway_leaves_rows_that_go_on_with_another(
    model: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    """A daemon that is told to stop ends its forward at the next tick: as if it had not begun it."""
    prompts = [prompt_of(length, seed=4) for length in (90, 20)]
    alone = [Cluster(model, tiny_dir).ask(prompt, 12) for prompt in prompts]
    cluster = Cluster(model, tiny_dir, colocated=colocated)
    handles = [cluster.submit(prompt, 12) for prompt in prompts]
    rows = cluster.segment.rows
    ticks = 0

    def stop_at_times() -> None:
        nonlocal ticks
        ticks += 1
        if ticks % 13 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(model, "on_tick", stop_at_times)
    engines = [cluster.colocated] if cluster.colocated is not None else [cluster.prefill, cluster.decode]
    stops = 0
    for _ in range(400):
        for engine in engines:
            try:
                engine.step()
            except KeyboardInterrupt:
                engine.release()
                stops += 1
                assert all(rows.get(row, R.ATTEMPTS) == 0 for row, _ in handles)
    assert stops > 3
    for one, prompt, expected in zip(handles, prompts, alone, strict=True):
        assert cluster.take(*one, len(prompt)) == expected
