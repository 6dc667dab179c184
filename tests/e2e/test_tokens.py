"""The tokens of the embedded model: transformers' own in float32, and the same whatever happens around them."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.transport.layout import P, R
from pdctl.transport.rows import RowState
from pdctl.transport.segment import Role, open_to_look, take_snapshot

BLOCK = 16
CHUNK = 64
NEW_TOKENS = 12
KILL_TOKENS = 12
# Of the model in clusters that are compared with each other: its layers are all alike.
NUM_LAYERS = 6
# No id lies further below the largest logit: then it is a tie, which roundings decide.
TIE = 1e-3

EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1]
NATURAL = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Water boils at 100 degrees Celsius because",
    "SELECT name, COUNT(*) FROM users WHERE",
    "東京は日本の首都であり、",
    "Der schnelle braune Fuchs springt über",
    "😀 😀 😀 😀",
    '{"name": "Alice", "age": 30, "city":',
    "# Heading\n\n- first item\n- second item\n-",
    "The derivative of x^2 is",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\ny =",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "A" * 200,
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n- ",
    "Breaking news: scientists have discovered",
    "안녕하세요, 저는",
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
def reference(smollm_dir: Path) -> Any:
    """transformers' own model, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def float32_cluster(start_shared: Any, smollm_dir: Path) -> Any:
    return start_shared(
        "--model", str(smollm_dir), "--dtype", "float32", "--block-size", str(BLOCK), "--chunk-tokens", str(CHUNK),
        "--local-prefill-tokens", "0", "--kv-gib", "0.5", "--max-context", "2048",
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(float32_cluster: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Every prompt asked once, 16 at a time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda prompt: float32_cluster.complete(prompt, NEW_TOKENS), prompts))


def _ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.e2e
def test_every_prompt_is_transformers_own(
    float32_cluster: Any,
    prompts: list[list[int]],
    served: list[dict[str, Any]],
    reference: Any,
) -> None:
    """Every id is the likeliest after the prompt and the ids before it: what `generate` does, in one forward."""
    prefill_slot = float32_cluster.slots(Role.PREFILL)[0][0]
    num_different = 0
    for prompt, cold in zip(prompts, served, strict=True):
        length = len(prompt)
        assert cold["usage"]["prompt_tokens"] == length
        assert cold["usage"]["completion_tokens"] == NEW_TOKENS
        # Prompts of one book share beginnings by chance only; cold ones may hit a block or two of another.
        cold_cached = cold["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cold["timings"]["prefill_tokens"] == length - 1 - cold_cached
        assert cold["timings"]["local_tokens"] == 0
        if length - 1 - cold_cached > 0:
            assert cold["timings"]["prefill_slot"] == prefill_slot
        likeliest, gap = _judge(reference, prompt, _ids(cold))
        assert gap < TIE
        num_different += likeliest != _ids(cold)
    assert num_different <= len(prompts) // 100 + 1
    # A second time, from the cache: every length at the edges of blocks and chunks, and some texts.
    again = prompts[: 2 * len(EDGES)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: float32_cluster.complete(prompt, NEW_TOKENS), again))
    for prompt, cold, cached in zip(again, served, answers, strict=False):
        assert _ids(cold) == _ids(cached)
        assert cached["usage"]["prompt_tokens"] == len(prompt)
        assert cached["usage"]["completion_tokens"] == NEW_TOKENS
        expected = (len(prompt) - 1) // BLOCK * BLOCK
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def _judge(reference: Any, prompt: list[int], ids: list[int]) -> tuple[list[int], float]:
    """Teacher-forced: the likeliest id at every position, and how far the given ones lie below it at most."""
    import torch

    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    return logits.argmax(1).tolist(), float((logits.amax(1) - chosen).max())


@pytest.mark.e2e
@pytest.mark.parametrize("index", [1, len(EDGES) + 2, len(EDGES) + 7])
def test_generate_says_the_same(
    prompts: list[list[int]], served: list[dict[str, Any]], reference: Any, index: int
) -> None:
    """transformers' `generate` itself, which is slow: a prompt of two tokens, digits, emoji."""
    import torch

    ids = torch.tensor([prompts[index]])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    generated = out[0, len(prompts[index]) :].tolist()
    answer = _ids(served[index])
    same = next((at for at in range(NEW_TOKENS) if answer[at] != generated[at]), NEW_TOKENS)
    assert same == NEW_TOKENS or _judge(reference, prompts[index], answer[: same + 1])[1] < TIE


@pytest.fixture(scope="module")
def short_dir(smollm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's first layers: its shapes and its vocabulary, in a third of the time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("short") / "smollm"
    AutoModelForCausalLM.from_pretrained(smollm_dir, num_hidden_layers=NUM_LAYERS).save_pretrained(directory)
    AutoTokenizer.from_pretrained(smollm_dir).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served_by_one(start_shared: Any, short_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one prefill and one decode daemon say to every prompt; they are gone then."""
    one_of_each = start_shared(
        "--model", str(short_dir), "--dtype", "float32", "--chunk-tokens", str(CHUNK), "--kv-gib", "0.1",
        "--local-prefill-tokens", "0", "--max-context", "2048",
    )  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: one_of_each.ids(prompt, NEW_TOKENS), prompts))
    one_of_each.down()
    return found


@pytest.fixture(scope="module")
def two_of_each(start_shared: Any, short_dir: Path) -> Any:
    """Two prefill and two decode daemons, with other chunks than that one and local prefill on."""
    return start_shared(
        "--model", str(short_dir), "--dtype", "float32", "--chunk-tokens", "48", "--kv-gib", "0.1",
        "--max-context", "2048", "--prefill", "2", "--decode", "2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def bfloat16_cluster(start_shared: Any, short_dir: Path) -> Any:
    return start_shared(
        "--model", str(short_dir), "--dtype", "bfloat16", "--chunk-tokens", "48", "--kv-gib", "0.1",
        "--max-context", "2048",
    )  # fmt: skip


@pytest.fixture(params=["two_of_each", "bfloat16_cluster"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.e2e
def test_two_of_each_answer_as_one_of_each(
    two_of_each: Any, prompts: list[list[int]], served_by_one: list[list[int]]
) -> None:
    """S02: the layout is not in the answer; every daemon has had work."""
    chosen = range(len(EDGES) - 7, len(EDGES) + 13)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: two_of_each.complete(prompts[index], NEW_TOKENS), chosen))
    assert [_ids(answer) for answer in answers] == [served_by_one[index] for index in chosen]
    decoders = {answer["timings"]["decode_slot"] for answer in answers}
    assert decoders == {slot for slot, _ in two_of_each.slots(Role.DECODE)}
    assert sum(answer["timings"]["local_tokens"] for answer in answers) > 0


@pytest.mark.e2e
def test_alone_is_among_eight_others_is_after_a_kill(either: Any, prompts: list[list[int]]) -> None:
    chosen = [prompts[index] for index in (5, 10, 12)]
    greedy: dict[str, Any] = {}
    sampled = {"temperature": 0.9, "seed": 11, "top_p": 0.9}
    alone = [either.ids(prompt, KILL_TOKENS, **sampled) for prompt in chosen]
    alone_greedy = [either.ids(prompt, KILL_TOKENS, **greedy) for prompt in chosen[:2]]

    stop = threading.Event()

    def noise(index: int) -> int:
        number = 0
        while not stop.is_set():
            either.ids(prompts[(index * 5 + number) % len(prompts)], 6, temperature=1.0, seed=number)
            number += 1
        return number

    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(noise, index) for index in range(8)]
        try:
            asked = [
                [pool.submit(either.ids, prompt, KILL_TOKENS, **sampler) for prompt in chosen[:2]]
                for sampler in (sampled, greedy)
            ]
            among, among_greedy = [[one.result() for one in group] for group in asked]
        finally:
            stop.set()
        assert all(other.result() >= 1 for other in others)
    assert (among, among_greedy) == (alone[:2], alone_greedy)

    with ThreadPoolExecutor(len(chosen) + 1) as pool:
        killed = pool.submit(_kill_owner, either, RowState.DECODING)
        waiting = [pool.submit(either.ids, prompt, KILL_TOKENS, **sampled) for prompt in chosen]
        killed.result()
        assert [one.result() for one in waiting] == alone
    # Prompts that nobody has seen, or there would be nothing to prefill; alone they are asked afterwards.
    fresh = [[(31 * position + 17 * number) % 40000 + 100 for position in range(800)] for number in (1, 2)]
    with ThreadPoolExecutor(3) as pool:
        killed = pool.submit(_kill_owner, either, RowState.PREFILLING)
        waiting = [pool.submit(either.ids, prompt, 4) for prompt in fresh]
        killed.result()
        after_a_kill = [one.result() for one in waiting]
    assert after_a_kill == [either.ids(prompt, 4) for prompt in fresh]


def _kill_owner(cluster: Any, state: RowState) -> None:
    """Kill the daemon of a row that is in the middle of its prompt or answer; another process takes its place."""
    role = Role.PREFILL if state is RowState.PREFILLING else Role.DECODE
    deadline = time.monotonic() + 240
    # Where it lies: copies take too long beside busy daemons.
    segment = open_to_look(cluster.state.segment_name)
    pid = None
    while pid is None:
        assert time.monotonic() < deadline, f"no row is {state.name}"
        rows = segment.rows
        for row in rows.in_state(state):
            begun = rows.get(row, R.NUM_PROMPT) + 2 if state is RowState.DECODING else 0
            if rows.get(row, R.KV_LEN) > begun:
                pid = segment.participant_word(rows.get(row, R.OWNER) - 1, P.PID)
        time.sleep(0.001)
    wanted = len(cluster.slots(role))
    os.kill(pid, signal.SIGKILL)
    while pid in (pids := [pid for _, pid in cluster.slots(role)]) or len(pids) < wanted:
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)
    segment.close()


@pytest.mark.e2e
def test_one_prefill_and_three_decode_answer_the_same(
    two_of_each: Any, prompts: list[list[int]], served_by_one: list[list[int]]
) -> None:
    """Scaled while it runs: cold, cached, cached among others, greedy and sampled in one batch."""
    scaled = two_of_each.cli("scale", "prefill=1", "decode=3")
    assert scaled.code == 0, scaled.err
    cold = range(len(EDGES) + 13, len(prompts))
    sampled = {"temperature": 0.9, "seed": 3, "top_k": 40}
    with ThreadPoolExecutor(12) as pool:
        first = list(pool.map(lambda index: two_of_each.complete(prompts[index], NEW_TOKENS), cold))
        alone = two_of_each.ids(prompts[12], NEW_TOKENS, **sampled)
        again = [pool.submit(two_of_each.complete, prompts[index], NEW_TOKENS) for index in (*cold, *range(8, 11))]
        mixed = [pool.submit(two_of_each.ids, prompts[12], NEW_TOKENS, **sampled) for _ in range(2)]
    assert [_ids(answer) for answer in first] == [served_by_one[index] for index in cold]
    assert [_ids(one.result()) for one in again] == [served_by_one[index] for index in (*cold, *range(8, 11))]
    assert [one.result() for one in mixed] == [alone, alone]
    decoders = {one.result()["timings"]["decode_slot"] for one in again}
    decoders |= {answer["timings"]["decode_slot"] for answer in first}
    assert decoders == {slot for slot, _ in two_of_each.slots(Role.DECODE)}
    assert len(decoders) == 3


@pytest.mark.e2e
def test_a_killed_prefill_is_taken_up_where_it_was(float32_cluster: Any, prompts: list[list[int]]) -> None:
    """Its row goes on from the last committed chunk; what was computed is not computed again."""
    prompt = [(31 * position + 17) % 40000 + 100 for position in range(500)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(float32_cluster.complete, prompt, 8)
        deadline = time.monotonic() + 240
        computed = 0
        while time.monotonic() < deadline and not computed > 2 * CHUNK:
            rows = take_snapshot(float32_cluster.state.segment_name).segment.rows
            computed = max([rows.get(row, R.KV_LEN) for row in rows.in_state(RowState.PREFILLING)], default=0)
        assert computed > 2 * CHUNK
        float32_cluster.kill(Role.PREFILL)
        answer = waiting.result()
    assert answer["timings"]["adoptions"] == 1
    # At most the chunk under way at the kill was computed twice; it is not counted, it was not committed.
    assert answer["timings"]["prefill_tokens"] == len(prompt) - 1
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

    def stream() -> list[str]:
        return [
            choice["text"]
            for _, chunk in Client(float32_cluster.state.url).stream("/v1/completions", body)
            for choice in chunk["choices"]
        ]

    with ThreadPoolExecutor(3) as pool:
        asked = pool.submit(float32_cluster.post, "/v1/completions", body)
        streamed = pool.submit(stream)
        printing = pool.submit(float32_cluster.cli, "generate", "--raw", "--max-tokens", "40", body["prompt"])
        (_, whole), deltas, printed = asked.result(), streamed.result(), printing.result()
    text = whole["choices"][0]["text"]
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    assert text == tokenizer.decode(whole["choices"][0]["token_ids"], skip_special_tokens=True)
    assert "".join(deltas) == text
    # The limit may cut the last character; no other is ever broken.
    assert all("\ufffd" not in delta for delta in deltas[:-1])
    assert "\ufffd" not in text[:-1]
    assert max(map(ord, text)) > 0xFFFF
    assert printed.out == text + "\n"
    assert "\x1b" not in printed.out + printed.err
