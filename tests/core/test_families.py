"""Every family that is served: logits of tiny random checkpoints against transformers and against themselves.

Windows are shorter than the sequence, and its length, the chunks and the windows lie on and beside the edges of
blocks (16) and of ranges (128).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pdctl.core import attention, families
from pdctl.core.activations import GeluTanh, Silu
from pdctl.core.attention import TokenRun
from pdctl.core.checkpoint import ModelConfig, validate
from pdctl.core.config import DEFAULT_MAX_CONTEXT, context_of
from pdctl.core.model import Model, load
from pdctl.core.numerics import numerics
from pdctl.transport.errors import IncompatibleError, UsageError

BLOCK = 16
LENGTH = 19 * BLOCK
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LENGTH}),
    "mistral": ("Mistral", {"sliding_window": 130, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", {**WINDOWED, "sliding_window": 40, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**WINDOWED, "sliding_window": 127, "num_key_value_heads": 4}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": BLOCK,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": None},
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 128,
            "pad_token_id": 0,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            # As published; the file it names does not exist here.
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": LENGTH, "pad_token_id": 0},
    ),
}


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """One thread hides differences in order; many would split layers as narrow as these."""
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, checkpoint_maker: Callable[..., Path]) -> Callable[..., Path]:
    """The checkpoint of a case, made once."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            family, changes = CASES[case]
            made[case] = checkpoint_maker(tmp_path_factory.mktemp("family") / case, family, **changes)
        return made[case]

    return of


class Pages:
    """A model on pages of its own, which hold garbage, and rows of 20 blocks in them."""

    def __init__(self, model: Model, config: ModelConfig, rows: int) -> None:
        self.model = model
        shape = (rows * 20, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
        self._pages = torch.full(shape, float("nan"), dtype=model.dtype)
        model.use_pages(self._pages)

    def run(self, *parts: tuple[int, list[int], int]) -> list[torch.Tensor]:
        """One packed forward of (row, its tokens from 0 on, start of what is computed); the logits of each."""
        tokens = [token for _, row_tokens, start in parts for token in row_tokens[start:]]
        # Blocks in an order that no position has.
        runs = [
            TokenRun(block_table=self._table(row), start=start, length=len(row_tokens) - start)
            for row, row_tokens, start in parts
        ]
        logits = self.model.forward(tokens, runs, list(range(len(tokens))))
        assert logits is not None
        return list(logits.split([run.length for run in runs]))

    def kv(self, row: int) -> torch.Tensor:
        return self._pages[self._table(row)[: LENGTH // BLOCK]].clone()

    @staticmethod
    def _table(row: int) -> list[int]:
        return list(range(20 * row + 19, 20 * row - 1, -1))


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def of_transformers(path: Path, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab] of transformers' own attention and masks."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return module(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers_own(directory: Callable[..., Path], case: str) -> None:
    path = directory(case)
    tokens = tokens_of(1)
    (logits,) = Pages(load(path, numerics("float32")), validate(path), 1).run((0, tokens, 0))
    expected = of_transformers(path, tokens)
    # A window off by one, or no soft-cap, moves them by far more.
    assert float((logits - expected).abs().max()) < 1e-4
    chosen = expected.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    assert float((expected.amax(1) - chosen).max()) < 1e-3
    assert float(expected.std(1).min()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same_in_chunks_among_others_and_step_by_step(
    directory: Callable[..., Path], case: str, dtype: str
) -> None:
    path = directory(case)
    config = validate(path)
    model = load(path, numerics(dtype))
    tokens, other, third = tokens_of(1), tokens_of(2), tokens_of(3)
    alone = Pages(model, config, 1)
    (whole,) = alone.run((0, tokens, 0))
    kv = alone.kv(0)
    assert bool(whole.isfinite().all())

    chunked = Pages(model, config, 1)
    at, parts = 0, []
    for length in (BLOCK - 1, 1, BLOCK + 1, 2, 93, 1, 127, LENGTH):
        parts += chunked.run((0, tokens[: at + length], at))
        at += length
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(chunked.kv(0), kv)

    # Steps over the edges, in a batch whose other rows are far ahead, far behind, or chunks.
    among = Pages(model, config, 3)
    among.run((1, other[:280], 0), (2, third[:9], 0))
    parts = [among.run((2, third[:70], 9), (0, tokens[:120], 0), (1, other[:281], 280))[1]]
    for number, at in enumerate(range(120, 180)):
        rows = [(1, other[: 282 + number % 20], 281 + number % 20), (0, tokens[: at + 1], at)]
        if number % 2:
            rows.append((2, third[: 71 + number], 70 + number))
        parts.append(among.run(*rows)[1])
        if not number % 2:
            among.run((2, third[: 71 + number], 70 + number))
    parts += among.run((0, tokens[: LENGTH - 30], 180))
    parts += [among.run((0, tokens[: at + 1], at))[0] for at in range(LENGTH - 30, LENGTH)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(among.kv(0), kv)


def test_every_family_has_a_case() -> None:
    assert {f"{family}ForCausalLM" for family, _ in CASES.values()} == set(families.FAMILIES)


# ---- Ropes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "rope"), [("llama-dynamic", "dynamic"), ("phi3-longrope", "longrope")])
def test_a_context_ends_where_angles_begin_to_change(directory: Callable[..., Path], case: str, rope: str) -> None:
    """Up to the limit the cases above hold; one token more changes what transformers computes of those before."""
    path = directory(case)
    config = validate(path)
    assert (config.max_context, config.context_rope) == (LENGTH, rope)
    assert context_of(config, None) == LENGTH
    assert context_of(config, LENGTH) == LENGTH
    with pytest.raises(UsageError, match=rf"--max-context {LENGTH + 1}: expected 2 to {LENGTH}, .*{rope}"):
        context_of(config, LENGTH + 1)
    tokens = tokens_of(1, LENGTH + 1)
    shorter, longer = of_transformers(path, tokens[:-1]), of_transformers(path, tokens)
    assert float((shorter - longer[:-1]).abs().max()) > 1e-3


def test_the_models_own_limit(directory: Callable[..., Path]) -> None:
    config = validate(directory("llama"))
    assert (config.max_context, config.context_rope) == (2048, None)
    assert context_of(config, None) == 2048
    with pytest.raises(UsageError, match="--max-context 2049: expected 2 to 2048, the model's own limit"):
        context_of(config, 2049)
    with pytest.raises(UsageError, match="--max-context 0"):
        context_of(config, 0)
    assert DEFAULT_MAX_CONTEXT > 2048


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LINEAR, LLAMA3, YARN])
def test_static_ropes_do_not_see_how_long_a_forward_is(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)
    embedding = LlamaRotaryEmbedding(config=config)
    x = torch.zeros(1)
    alone = embedding(x, torch.arange(50).unsqueeze(0))
    packed = embedding(x, torch.cat([torch.arange(50), torch.arange(5000)]).unsqueeze(0))
    for one, other in zip(alone, packed, strict=True):
        assert torch.equal(one, other[:, :50])


# ---- Activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Silu(), functional.silu), (GeluTanh(), lambda x: functional.gelu(x, approximate="tanh"))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_do_not_depend_on_place_or_threads(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    # With torch's own in float32 a few of these elements differ.
    x = torch.randn(131, 4864, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([ours(row) for row in x.split(1)])
    assert torch.allclose(alone, theirs(x), atol=2e-6, rtol=2e-6 if dtype == torch.float32 else 8e-3)
    for threads in (3, 7):
        torch.set_num_threads(threads)
        for start, length in ((0, 131), (3, 77), (1, 5)):
            assert torch.equal(ours(x[start : start + length, 7:].clone()), alone[start : start + length, 7:])


def test_both_ends_of_activations() -> None:
    x = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30])
    assert Silu()(x).tolist() == GeluTanh()(x).tolist() == [0, 0, 0, 0, 200, x[-1]]


@pytest.mark.parametrize(
    ("case", "kind"), [("llama", Silu), ("phi3", Silu), ("gemma2", GeluTanh), ("gemma3", GeluTanh)]
)
def test_loaded_models_have_them(directory: Callable[..., Path], case: str, kind: type) -> None:
    path = directory(case)
    module = load(path, numerics("float32"))._decoder
    assert sum(type(child) is kind for child in module.modules()) == validate(path).num_layers


# ---- What attention is asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"s_aux": torch.zeros(4)}, "wants s_aux"),
        ({"dropout": 0.1}, "wants dropout"),
        ({"is_causal": False}, "wants is_causal"),
        ({"attention_mask": torch.zeros(1)}, "mask of its own"),
        ({"value": torch.zeros(1, 2, 4, 8)}, r"values of \(1, 2, 4, 8\)"),
    ],
)
def test_nothing_that_is_asked_for_is_left_out(
    directory: Callable[..., Path], given: dict[str, Any], words: str
) -> None:
    path = directory("llama")
    Pages(load(path, numerics("float32")), validate(path), 1)
    call = {"key": torch.zeros(1, 2, 4, 16), "value": torch.zeros(1, 2, 4, 16), "attention_mask": None, **given}
    with pytest.raises(IncompatibleError, match=f"Linear: .*{words}"):
        attention.attention_function(torch.nn.Linear(1, 1), torch.zeros(1, 4, 4, 16), **call)


def test_attention_that_is_not_causal_is_refused(directory: Callable[..., Path]) -> None:
    path = directory("llama")
    model = load(path, numerics("float32"))
    model._decoder.layers[1].self_attn.is_causal = False
    with pytest.raises(IncompatibleError, match=r"LlamaAttention: .*not causal"):
        Pages(model, validate(path), 1).run((0, tokens_of(1, 5), 0))
