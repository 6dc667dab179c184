"""The tokens of the embedded model: transformers' own in float32, and the same whatever happens around them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.checkpoint import fingerprint
from pdctl.core.model_cache import cache_dir
from pdctl.transport.segment import Role

BLOCK = 16
CHUNK = 64
NEW_TOKENS = 16
KILL_TOKENS = 24
# At most so much below the largest logit, where the ids differ from `generate`'s.
TIE = 1e-3

EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1]
NATURAL = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Water boils at 100 degrees Celsius because",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM users WHERE",
    "The three primary colours are red,",
    "To make a good cup of tea, first",
    "In 1969, Neil Armstrong became the first",
    "東京は日本の首都であり、",
    "Der schnelle braune Fuchs springt über",
    "La tour Eiffel se trouve à",
    "😀 😀 😀 😀",
    '{"name": "Alice", "age": 30, "city":',
    "# Heading\n\n- first item\n- second item\n-",
    "She opened the door and saw",
    "The derivative of x^2 is",
    "Photosynthesis is the process by which",
    "If all bloops are razzies and all razzies are lazzies, then",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\ny =",
    "Roses are red, violets are",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "A" * 200,
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n- ",
    "Breaking news: scientists have discovered",
    "안녕하세요, 저는",
    "The meaning of life, according to Douglas Adams, is",
    "for i in range(10):\n    print(",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, " * 4,
]


def _prompts(smollm_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    book = tokenizer(" ".join(NATURAL)).input_ids
    # Each of another beginning: no prompt is the prefix of another.
    edges = [book[7 * index : 7 * index + length] for index, length in enumerate(EDGES)]
    return edges + [tokenizer(text).input_ids for text in NATURAL]


@pytest.fixture(scope="module")
def prompts(smollm_dir: Path) -> list[list[int]]:
    return _prompts(smollm_dir)


@pytest.fixture(scope="module")
def oracle(smollm_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own `generate` answers in float32, computed once for a model and version."""
    key = json.dumps([fingerprint(smollm_dir), version("torch"), version("transformers"), prompts, NEW_TOKENS])
    kept = cache_dir() / "oracle" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if kept.exists():
        answers: list[list[int]] = json.loads(kept.read_text())
        return answers
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(answers))
    return answers


@pytest.fixture(scope="module")
def float32_cluster(start_shared: Any, smollm_dir: Path) -> Any:
    return start_shared(
        "--model", str(smollm_dir), "--dtype", "float32", "--block-size", str(BLOCK), "--chunk-tokens", str(CHUNK),
        "--local-prefill-tokens", "0", "--kv-gib", "0.5", "--max-context", "2048",
    )  # fmt: skip


@pytest.mark.e2e
def test_every_prompt_twice_is_transformers_own(
    float32_cluster: Any, smollm_dir: Path, prompts: list[list[int]], oracle: list[list[int]]
) -> None:
    prefill_slot = float32_cluster.slots(Role.PREFILL)[0][0]
    different: list[tuple[list[int], list[int]]] = []
    with ThreadPoolExecutor(8) as pool:
        ask = lambda prompt: float32_cluster.complete(prompt, NEW_TOKENS)  # noqa: E731
        all_cold = list(pool.map(ask, prompts))
        all_cached = list(pool.map(ask, prompts))
    for prompt, expected, cold, cached in zip(prompts, oracle, all_cold, all_cached, strict=True):
        assert cold["choices"][0]["token_ids"] == cached["choices"][0]["token_ids"]
        length = len(prompt)
        from_cache = (length - 1) // BLOCK * BLOCK
        for answer in (cold, cached):
            assert answer["usage"]["prompt_tokens"] == length
            assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        # Prompts of one book share beginnings by chance only; cold ones may hit a block or two of another.
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == from_cache
        cold_cached = cold["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cold["timings"]["prefill_tokens"] == length - 1 - cold_cached
        assert cold["timings"]["local_tokens"] == 0
        if length - 1 - cold_cached > 0:
            assert cold["timings"]["prefill_slot"] == prefill_slot
        if cold["choices"][0]["token_ids"] != expected:
            different.append((prompt, cold["choices"][0]["token_ids"]))
    assert len(different) <= len(prompts) // 100 + 1
    _assert_ties(smollm_dir, different)


def _assert_ties(smollm_dir: Path, served: list[tuple[list[int], list[int]]]) -> None:
    """Teacher-forced: every served id is within TIE of the largest logit."""
    import torch
    from transformers import AutoModelForCausalLM

    if not served:
        return
    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()
    for prompt, ids in served:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) < TIE


@pytest.fixture(scope="module")
def two_of_each(start_shared: Any, smollm_dir: Path) -> Any:
    """Two prefill and two decode daemons, with other chunks than the cluster above and local prefill on."""
    return start_shared(
        "--model", str(smollm_dir), "--dtype", "float32", "--chunk-tokens", "48", "--kv-gib", "0.5",
        "--max-context", "2048", "--prefill", "2", "--decode", "2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def bfloat16_cluster(start_shared: Any, smollm_dir: Path) -> Any:
    return start_shared(
        "--model", str(smollm_dir), "--dtype", "bfloat16", "--chunk-tokens", "48", "--kv-gib", "0.5",
        "--max-context", "2048",
    )  # fmt: skip


@pytest.fixture(params=["two_of_each", "bfloat16_cluster"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.e2e
def test_two_of_each_answer_as_one_of_each(
    two_of_each: Any, smollm_dir: Path, prompts: list[list[int]], oracle: list[list[int]]
) -> None:
    """S02: the layout is not in the answer; every daemon has had work."""
    chosen = range(len(EDGES) - 1, len(EDGES) + 20)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: two_of_each.complete(prompts[index], NEW_TOKENS), chosen))
    different = [
        (prompts[index], answer["choices"][0]["token_ids"])
        for index, answer in zip(chosen, answers, strict=True)
        if answer["choices"][0]["token_ids"] != oracle[index]
    ]
    _assert_ties(smollm_dir, different)
    decoders = {answer["timings"]["decode_slot"] for answer in answers}
    assert decoders == {slot for slot, _ in two_of_each.slots(Role.DECODE)}
    assert sum(answer["timings"]["local_tokens"] for answer in answers) > 0


@pytest.mark.e2e
def test_alone_is_among_eight_others_is_after_a_kill(either: Any, prompts: list[list[int]]) -> None:
    chosen = [prompts[index] for index in (5, 10, 12, 29)]
    samplers: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 11, "top_p": 0.9}]
    alone = [[either.ids(prompt, KILL_TOKENS, **sampler) for sampler in samplers] for prompt in chosen]

    stop = threading.Event()

    def noise(index: int) -> int:
        number = 0
        while not stop.is_set():
            either.ids(prompts[(index * 5 + number) % len(prompts)], 24, temperature=1.0, seed=number)
            number += 1
        return number

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(noise, index) for index in range(8)]
        try:
            among = [[either.ids(prompt, KILL_TOKENS, **sampler) for sampler in samplers] for prompt in chosen[:2]]
        finally:
            stop.set()
        assert all(other.result() >= 1 for other in others)
    assert among == alone[:2]

    for role in (Role.DECODE, Role.PREFILL):
        with ThreadPoolExecutor(len(chosen)) as pool:
            waiting = [pool.submit(either.ids, prompt, KILL_TOKENS, **samplers[1]) for prompt in chosen]
            time.sleep(0.8)
            killed = either.kill(role)
            assert [one.result() for one in waiting] == [pair[1] for pair in alone]
        assert either.pid(role) != killed


@pytest.mark.e2e
def test_a_killed_prefill_is_taken_up_where_it_was(float32_cluster: Any, prompts: list[list[int]]) -> None:
    """Its row goes on from the last committed chunk; what was computed is not computed again."""
    prompt = [(31 * position + 17) % 40000 + 100 for position in range(1200)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(float32_cluster.complete, prompt, 8)
        deadline = time.monotonic() + 60
        from pdctl.transport.layout import R
        from pdctl.transport.rows import RowState
        from pdctl.transport.segment import take_snapshot

        computed = 0
        while time.monotonic() < deadline and not computed > 2 * CHUNK:
            rows = take_snapshot(float32_cluster.state.segment_name).segment.rows
            computed = max([rows.get(row, R.KV_LEN) for row in rows.in_state(RowState.PREFILLING)], default=0)
        assert computed > 2 * CHUNK
        float32_cluster.kill(Role.PREFILL)
        answer = waiting.result()
    assert answer["timings"]["adoptions"] == 1
    # At most the chunk under way at the kill was computed twice; it is not counted, it was not committed.
    assert answer["timings"]["prefill_tokens"] == 1199
    again = float32_cluster.complete(prompt, 8)
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


@pytest.mark.e2e
def test_answers_are_right_after_blocks_fill(float32_cluster: Any, prompts: list[list[int]]) -> None:
    """S03: decode crosses block edges; a prompt of whole blocks, fully cached, is asked again and again."""
    book = [token for prompt in prompts for token in prompt]
    short = book[: BLOCK - 1]
    first = float32_cluster.ids(short, 2 * BLOCK + 3)
    assert len(first) == 2 * BLOCK + 3
    assert float32_cluster.ids(short + first[:BLOCK], BLOCK + 3) == first[BLOCK:]
    whole = book[100 : 100 + 2 * BLOCK]
    answers = {tuple(float32_cluster.ids(whole, 1)) for _ in range(4)}
    assert len(answers) == 1


@pytest.mark.e2e
def test_limits_and_finish_reasons(float32_cluster: Any, prompts: list[list[int]]) -> None:
    """S08: max_tokens is exact; a first token that ends the answer ends it."""
    for limit in (1, 2, 3):
        answer = float32_cluster.complete(prompts[11], limit)
        assert answer["usage"]["completion_tokens"] == limit
        assert answer["choices"][0]["finish_reason"] == "length"
    first = float32_cluster.ids(prompts[11], 1)[0]
    stopped = float32_cluster.complete(prompts[11], 16, stop_token_ids=[first])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 1
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    status, chat = float32_cluster.post(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 30}
    )
    assert status == 200
    assert "Paris" in chat["choices"][0]["message"]["content"]
    assert chat["choices"][0]["finish_reason"] == "stop"


@pytest.mark.e2e
def test_prompt_lengths_are_the_tokenizers(float32_cluster: Any, smollm_dir: Path) -> None:
    """S12: no second BOS, in neither route."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    messages = [{"role": "user", "content": "Hello there"}]
    _, chat = float32_cluster.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert chat["usage"]["prompt_tokens"] == len(ids)
    _, raw = float32_cluster.post("/v1/completions", {"prompt": "Hello there", "max_tokens": 2})
    assert raw["usage"]["prompt_tokens"] == len(tokenizer("Hello there").input_ids)


@pytest.mark.e2e
def test_streams_never_emit_half_a_character(float32_cluster: Any, smollm_dir: Path) -> None:
    """S15: emoji cut over tokens, in streams, whole answers and on the command line."""
    from transformers import AutoTokenizer

    from pdctl.core.client import Client

    body = {"prompt": "😀 😀 😀 😀", "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    _, whole = float32_cluster.post("/v1/completions", body)
    deltas = [
        choice["text"]
        for _, chunk in Client(float32_cluster.state.url).stream("/v1/completions", body)
        for choice in chunk["choices"]
    ]
    text = whole["choices"][0]["text"]
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    assert text == tokenizer.decode(whole["choices"][0]["token_ids"], skip_special_tokens=True)
    assert "".join(deltas) == text
    # The limit may cut the last character; no other is ever broken.
    assert all("\ufffd" not in delta for delta in deltas[:-1])
    assert "\ufffd" not in text[:-1]
    assert max(map(ord, text)) > 0xFFFF
    printed = float32_cluster.cli("generate", "--raw", "--max-tokens", "40", body["prompt"])
    assert printed.out == text + "\n"
    assert "\x1b" not in printed.out + printed.err
