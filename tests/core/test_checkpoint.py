"""Checking model directories: built by hand, most of them damaged; without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from model_files import SHAPES, make_model, safetensors, shard_model

from pdctl.core import checkpoint
from pdctl.transport.errors import IncompatibleError, PdctlError, UsageError

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
HOLD_S = 60  # of helpers that wait to be ended; a watchdog, not an expectation


def refused(path: Path, *words: object, error: type[PdctlError] = IncompatibleError) -> PdctlError:
    """Asserts that `validate` refuses the model in one line that has all the words, and says what to do."""
    with pytest.raises(error) as caught:
        checkpoint.validate(path)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert caught.value.hint
    for word in words:
        assert str(word) in caught.value.message
    return caught.value


# ---- Configuration ----------------------------------------------------------------------------------


def test_valid_model(tmp_path: Path) -> None:
    assert checkpoint.validate(make_model(tmp_path / "m")) == checkpoint.ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        hidden_size=16,
        vocab_size=32,
        max_position_embeddings=64,
        max_context=64,
        context_rope=None,
        dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_a_model_written_by_the_libraries_is_valid(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="3KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = checkpoint.validate(tmp_path)
    assert (found.architecture, found.num_layers, found.dtype) == ("Qwen2ForCausalLM", 3, "bfloat16")


def family_model(path: Path, family: str, *, weights: bytes | None = None, **changes: Any) -> Path:
    """The tiny model as one of another family."""
    if family == "Phi3" and weights is None:
        weights = safetensors(PHI3_SHAPES)
    return make_model(path, weights=weights, **{"architectures": [f"{family}ForCausalLM"], "head_dim": 4, **changes})


PHI3_SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    **{f"model.layers.{layer}.self_attn.qkv_proj.weight": (32, 16) for layer in (0, 1)},
}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3"])
def test_supported_families(family: str, tmp_path: Path) -> None:
    path = family_model(tmp_path / "m", family, sliding_window=64)
    assert checkpoint.validate(path).architecture == f"{family}ForCausalLM"


@pytest.mark.parametrize(
    ("family", "num_kv_heads", "head_dim"),
    [
        ("Llama", 64, 1),
        ("Mistral", 8, 1),
        ("Qwen2", 32, 1),
        ("Qwen3", 32, 128),
        ("Gemma2", 4, 256),
        ("Gemma3", 4, 256),
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_for(
    family: str, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    import transformers

    absent = {"num_key_value_heads": None, "head_dim": None, "num_attention_heads": 64, "hidden_size": 64}
    path = family_model(tmp_path / "m", family, **absent)
    config = checkpoint.read_config(path)
    assert (config.num_kv_heads, config.head_dim) == (num_kv_heads, head_dim)
    config_class = getattr(transformers, f"{family}ForCausalLM").config_class
    theirs = config_class(**json.loads((path / "config.json").read_text()))
    assert theirs.num_key_value_heads == num_kv_heads
    assert getattr(theirs, "head_dim", 1) == head_dim


@pytest.mark.parametrize(("family", "tied"), [("Gemma2", True), ("Gemma3", True), ("Llama", False), ("Phi3", False)])
def test_embeddings_that_are_tied_by_default(family: str, tied: bool, tmp_path: Path) -> None:
    path = family_model(tmp_path / "m", family, tie_word_embeddings=None)
    if tied:
        checkpoint.validate(path)
    else:
        refused(path, "lm_head.weight", "(32, 16)")


def test_fused_projections(tmp_path: Path) -> None:
    refused(
        family_model(tmp_path / "a", "Phi3", num_key_value_heads=4), "0.self_attn.qkv_proj", "(32, 16)", "(48, 16)"
    )
    refused(family_model(tmp_path / "b", "Phi3", weights=safetensors(SHAPES)), "no tensor", "0.self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": None}, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
    ],
)
def test_dtype(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert checkpoint.validate(make_model(tmp_path / "m", **keys)).dtype == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 3, 5], None, (5, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"temperature": 1.0}, (2,)),
        (0, None, (0,)),
    ],
)
def test_eos_token_ids(config: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert checkpoint.validate(path).eos_token_ids == expected


def test_defaults_of_heads(tmp_path: Path) -> None:
    shapes = {name: (16, 16) if "_proj" in name else shape for name, shape in SHAPES.items()}
    path = make_model(tmp_path / "m", weights=safetensors(shapes), num_key_value_heads=None, bos_token_id=None)
    config = checkpoint.validate(path)
    assert (config.num_kv_heads, config.head_dim, config.bos_token_id) == (4, 4, None)


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    shapes = {name: (16, 16) if "_proj" in name else shape for name, shape in SHAPES.items()}
    path = make_model(tmp_path / "m", weights=safetensors(shapes), head_dim=8)
    assert checkpoint.validate(path).head_dim == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"architectures": None}, ["config.json", "architectures", "None", "LlamaForCausalLM"]),
        ({"architectures": []}, ["architectures", "[]"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "expected a list"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "not a decoder", "Qwen3ForCausalLM"]),
        ({"architectures": ["T5ForConditionalGeneration"]}, ["T5ForConditionalGeneration"]),
        ({"auto_map": {"AutoModel": "x.Y"}}, ["LlamaForCausalLM", "auto_map", "trust_remote_code"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "bfloat16"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers is missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "positive"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers is True"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers is -1"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers is 2.5"]),
        ({"num_attention_heads": None}, ["num_attention_heads is missing"]),
        ({"num_attention_heads": 3}, ["num_attention_heads 3", "num_key_value_heads 2"]),
        ({"num_attention_heads": 32}, ["head_dim is 0"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads is 0"]),
        ({"hidden_size": "16"}, ["hidden_size is '16'"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings is missing"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype is 'float8_e4m3fn'", "bfloat16"]),
        ({"dtype": 3}, ["dtype is 3"]),
        ({"eos_token_id": "x"}, ["eos_token_id is 'x'"]),
        ({"bos_token_id": [1]}, ["bos_token_id is [1]"]),
        ({"model_type": "qwen2"}, ["LlamaForCausalLM", "model_type 'qwen2'", "'llama'"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder True", "decoders only"]),
        ({"is_causal": False}, ["is_causal false", "after it"]),
        ({"num_local_experts": 8}, ["num_local_experts 8", "experts"]),
        ({"num_kv_shared_layers": 2}, ["num_kv_shared_layers 2", "share"]),
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, ["per_layer_config", "differ in heads"]),
        ({"num_key_value_heads": [2, 1]}, ["num_key_value_heads is [2, 1]", "positive integer"]),
        ({"v_head_dim": 8}, ["v_head_dim 8", "head_dim 4"]),
        ({"hidden_act": "relu"}, ["hidden_act 'relu'", "only silu"]),
        ({"sliding_window": 32}, ["sliding_window 32", "has none"]),
        ({"use_sliding_window": True}, ["use_sliding_window true", "no sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["'sliding_attention'", "no sliding window"]),
        ({"query_pre_attn_scalar": 256}, ["query_pre_attn_scalar 256", "head_dim alone"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0", "does not soft-cap"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "whole heads"]),
        ({"rope_scaling": {"type": "su"}}, ["rope_scaling", "'su'", "not verified"]),
        ({"rope_scaling": {"type": "new"}}, ["'new'", "not verified", "llama3"]),
        ({"rope_scaling": {"type": ["yarn"]}}, ["['yarn']", "not verified"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "one rope for all"]),
        ({"rope_parameters": {"rope_type": "linear", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 0}}, ["embeddings 0", "positive"]),
        ({"rope_scaling": "linear"}, ["rope_scaling 'linear'", "object"]),
    ],
)
def test_refused_configurations(keys: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    refused(make_model(tmp_path / "m", **keys), *words)


def test_hints_fit_their_cause(tmp_path: Path) -> None:
    """A complete directory is not told to be incomplete, nor a damaged one to be of the wrong kind."""
    moe = make_model(tmp_path / "moe", architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    assert refused(moe).hint == "choose another model; the embedded one is --model smollm2"
    assert refused(make_model(tmp_path / "c", hidden_size="16")).hint == "correct the file, or download it again"
    other = refused(make_model(tmp_path / "w", vocab_size=33))
    assert other.hint is not None and other.hint.startswith("check that config.json and the weights belong together")
    empty = refused(make_model(tmp_path / "m", weights=b"12"))
    assert empty.hint == "download the file again"
    (tmp_path / "none").mkdir()
    assert "give a complete model directory" in str(refused(tmp_path / "none").hint)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "default"}},
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": 64},
        {"layer_types": ["full_attention"] * 2},
        {"num_local_experts": 0},
        {"is_causal": True},
        {"v_head_dim": 4},
        {"partial_rotary_factor": 1.0},
        {"model_type": "llama"},
    ],
)
def test_accepted_configurations(keys: dict[str, Any], tmp_path: Path) -> None:
    checkpoint.validate(make_model(tmp_path / "m", **keys))


SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("Mistral", {"sliding_window": 0}, ["sliding_window 0", "positive integer"]),
        ("Mistral", {"sliding_window": "8"}, ["sliding_window '8'"]),
        ("Mistral", {"sliding_window": 8, "layer_types": SLIDING}, ["'full_attention'", "all layers or none"]),
        ("Mistral", {"sliding_window": 8, "use_sliding_window": False}, ["sliding_window 8", "reads no switch"]),
        ("Qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ("Qwen2", {"sliding_window": 8, "layer_types": SLIDING}, ["'sliding_attention'", "no sliding window"]),
        ("Qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ["'chunked_attention'", "verified"]),
        ("Qwen3", {"layer_types": [["full_attention"], "full_attention"]}, ["['full_attention']", "verified"]),
        ("Qwen3", {"num_experts": 4}, ["Qwen3ForCausalLM", "num_experts 4"]),
        ("Gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping 0", "positive number"]),
        ("Gemma2", {"query_pre_attn_scalar": -1}, ["query_pre_attn_scalar -1"]),
        ("Gemma2", {"hidden_activation": "gelu"}, ["hidden_activation 'gelu'", "only gelu_pytorch_tanh"]),
        ("Gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "after it"]),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0", "does not soft-cap"]),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters with 'rope_type'", "layer type"]),
        ("Gemma3", {"rope_parameters": {"full_attention": {"rope_type": "x"}}}, ["full_attention of type 'x'"]),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, ["'linear'", "default, longrope"]),
        ("Phi3", {"rope_scaling": {"type": "su"}}, ["'su'", "default, longrope"]),
        ("Phi3", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3V"}}, ["auto_map", "trust_remote_code"]),
        ("Phi3", {"auto_map": ["modeling_phi3.Phi3ForCausalLM"]}, ["auto_map"]),
        ("Llama", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}, ["auto_map"]),
    ],
)
def test_refused_configurations_of_a_family(
    family: str, keys: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refused(family_model(tmp_path / "m", family, **keys), f"{family}ForCausalLM", *words)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_layers_that_slide_by_default_need_a_window(family: str, tmp_path: Path) -> None:
    path = family_model(tmp_path / "m", family)
    config = {**json.loads((path / "config.json").read_text()), "sliding_window": None}
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "sliding_window null", "by default")
    (path / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention"] * 2}))
    checkpoint.validate(path)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Mistral", {"max_position_embeddings": 8192}),
        ("Mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDING}),
        ("Gemma2", {"sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30}),
        ("Gemma3", {"hidden_act": "gelu"}),  # what it reads is hidden_activation
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("Phi3", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
        ("Phi3", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}),
        ("Phi3", {"auto_map": {"AutoModelForCausalLM": "org/name--modeling_phi3.Phi3ForCausalLM"}}),
    ],
)
def test_accepted_configurations_of_a_family(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    assert checkpoint.validate(family_model(tmp_path / "m", family, **keys)).context_rope is None


LONG = {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}


@pytest.mark.parametrize(
    ("family", "keys", "limit", "rope"),
    [
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 64, "dynamic"),
        ("Llama", {"rope_scaling": LONG}, 64, "longrope"),
        ("Llama", {"rope_scaling": {**LONG, "original_max_position_embeddings": 32}}, 32, "longrope"),
        ("Llama", {"rope_parameters": LONG, "original_max_position_embeddings": 16}, 16, "longrope"),
        ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 16}, 16, "longrope"),
        ("Phi3", {"rope_scaling": LONG, "max_position_embeddings": 8192}, 4096, "longrope"),
        ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 128}, 64, "longrope"),
        (
            "Gemma3",
            {
                "rope_parameters": {
                    "full_attention": {**LONG, "original_max_position_embeddings": 48},
                    "sliding_attention": {"rope_type": "dynamic", "factor": 2.0},
                }
            },
            48,
            "longrope",
        ),
    ],
)
def test_contexts_that_end_where_angles_begin_to_change(
    family: str, keys: dict[str, Any], limit: int, rope: str, tmp_path: Path
) -> None:
    """Where they begin is what transformers' own configuration says after reading the same file."""
    import transformers

    path = family_model(tmp_path / "m", family, sliding_window=64, **keys)
    config = checkpoint.validate(path)
    assert (config.max_context, config.context_rope) == (limit, rope)
    config_class = getattr(transformers, f"{family}ForCausalLM").config_class
    theirs = config_class(**json.loads((path / "config.json").read_text()))
    theirs.standardize_rope_params()  # as its rope does before it computes angles
    rope_parameters = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    original = rope_parameters.get("original_max_position_embeddings", theirs.max_position_embeddings)
    assert min(original, theirs.max_position_embeddings) == limit


def test_mistral_with_a_null_window_is_accepted(tmp_path: Path) -> None:
    path = family_model(tmp_path / "m", "Mistral")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    checkpoint.validate(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["is not JSON"]),
        (b"", ["is not JSON"]),
        (b"\xff\xfe\xfa", ["is not JSON"]),
        (b"[" * 100_000, ["is not JSON"]),
        (b"[1]", ["list", "object"]),
        (LFS_POINTER, ["git-lfs pointer"]),
    ],
)
def test_damaged_json(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / name).write_bytes(content)
    error = refused(path, path / name, *words)
    assert (error.hint == "git lfs pull") == (content == LFS_POINTER)


@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "special_tokens_map.json", "vocab.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe{}", LFS_POINTER])
def test_damaged_parts_of_a_tokenizer(name: str, content: bytes, tmp_path: Path) -> None:
    """A pointer instead of a template would be every chat's prompt."""
    path = make_model(tmp_path / "m")
    (path / name).write_bytes(content)
    refused(path, path / name, "git-lfs pointer" if content == LFS_POINTER else "is not")


NASTY = "x\x1b[31m\n" + "y" * 100_000


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": [NASTY]},
        {"architectures": NASTY},
        {"model_type": NASTY},
        {"dtype": NASTY},
        {"hidden_size": NASTY},
        {"hidden_size": 10**4000},
        {"eos_token_id": NASTY},
        {"bos_token_id": NASTY},
        {"quantization_config": {"quant_method": NASTY}},
        {"rope_scaling": NASTY},
        {"rope_scaling": {"type": NASTY}},
        {"rope_parameters": {NASTY: {}}},
        {"sliding_window": NASTY},
        {"layer_types": [NASTY, NASTY]},
        {"final_logit_softcapping": NASTY},
        {"query_pre_attn_scalar": NASTY},
        {"partial_rotary_factor": NASTY},
        {"v_head_dim": NASTY},
        {"use_bidirectional_attention": NASTY},
    ],
)
def test_values_of_any_content_are_told_in_one_plain_line(keys: dict[str, Any], tmp_path: Path) -> None:
    """A terminal must not be steered, nor flooded, by a file that somebody downloaded."""
    message = refused(make_model(tmp_path / "m", **keys)).message
    assert message.isprintable()
    assert len(message.removeprefix(str(tmp_path))) < 500


def test_a_thousand_million_layers(tmp_path: Path) -> None:
    """Refused for the first that is not there, without a list of all."""
    refused(make_model(tmp_path / "m", num_hidden_layers=10**9), "model.layers.2.self_attn.k_proj.weight")


# ---- The directory ----------------------------------------------------------------------------------


def test_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, tmp_path, "empty", "config.json")


def test_absent_directory(tmp_path: Path) -> None:
    refused(tmp_path / "no", tmp_path / "no", "No such file", error=UsageError)


@pytest.mark.parametrize(
    ("other", "word"),
    [("adapter_config.json", "LoRA"), ("model.gguf", "GGUF"), ("README.md", "config.json is missing")],
)
def test_no_config(other: str, word: str, tmp_path: Path) -> None:
    (tmp_path / other).write_text("")
    refused(tmp_path, tmp_path, word)


def test_no_tokenizer(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    refused(path, path, "tokenizer.json", "tokenizer.model")
    (path / "tokenizer.model").write_bytes(LFS_POINTER)
    refused(path, path / "tokenizer.model", "git-lfs")
    (path / "tokenizer.model").write_bytes(b"\n\x0e")
    checkpoint.validate(path)


def test_broken_symlink_is_missing(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("gone")
    refused(path, path / "config.json", "missing")


def test_fifo_does_not_block(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    refused(path, path / "config.json", "not a regular file", error=UsageError)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(".", 0o000), (".", 0o400), ("config.json", 0), ("tokenizer.json", 0), ("model.safetensors", 0)],
)
def test_unreadable(name: str, mode: int, tmp_path: Path) -> None:
    """Root reads everything, so as root the check runs in a child that is nobody, who owns the model."""
    path = make_model(tmp_path / "m")
    target = (path / name).resolve()
    target.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        for file in path.iterdir():
            os.chown(file, 65534, 65534)
        for parent in (tmp_path, *tmp_path.parents):
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    code = f"""
        import os
        from pdctl.core import checkpoint
        from pdctl.core.weights.fingerprint import model_files
        from pdctl.transport.errors import UsageError
        from pathlib import Path
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        for check in checkpoint.validate, model_files:
            try:
                check(Path({str(path)!r}))
            except UsageError as error:
                print(error.message)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=HOLD_S
    )
    target.chmod(0o700)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 2)
    assert all("Permission denied" in line and str(target) in line for line in lines)


# ---- Weights ----------------------------------------------------------------------------------------


def test_no_weights(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "model.safetensors").unlink()
    refused(path, path, "no weights", "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "model.safetensors").rename(path / name)
    refused(path, path / name, "pickle", "model.safetensors")


def test_shards(tmp_path: Path) -> None:
    checkpoint.validate(shard_model(tmp_path / "m"))


def test_missing_shard(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    (path / "model-00002-of-00002.safetensors").unlink()
    refused(path, "model-00002-of-00002.safetensors is missing", "1 of the 2 shards")


def test_truncated_shard(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    shard = path / "model-00002-of-00002.safetensors"
    size_bytes = shard.stat().st_size
    os.truncate(shard, size_bytes - 10)
    refused(path, shard, f"found {size_bytes - 10:,} bytes", f"expected {size_bytes:,}", "cut short")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, ["weight_map", "NoneType"]),
        ({"weight_map": {}}, ["weight_map"]),
        ({"weight_map": {"a": "../other.safetensors"}}, ["'../other.safetensors'", "same directory"]),
        ({"weight_map": {"a": "/etc/passwd"}}, ["'/etc/passwd'"]),
        ({"weight_map": {"a": 3}}, ["shard 3"]),
    ],
)
def test_damaged_index(index: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "model.safetensors.index.json", *words)


def header_of(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["found 0 bytes", "expected 8 bytes"]),
        (b"1234567", ["found 7 bytes"]),
        ((1 << 60).to_bytes(8, "little"), [f"{1 << 60:,}", "file of 8 bytes"]),
        ((100).to_bytes(8, "little") + b"{}", ["100 bytes", "file of 10 bytes"]),
        (LFS_POINTER, ["git-lfs pointer"]),
        (header_of(b"nonsense"), ["header is damaged", "JSONDecodeError"]),
        (header_of(b"[1, 2]"), ["header is damaged"]),
        (header_of(b'{"a": 1}'), ["header is damaged"]),
        (header_of(b'{"a": {"dtype": "F32", "shape": [1]}}'), ["header is damaged", "data_offsets"]),
        (header_of(b'{"a": {"dtype": "F32", "shape": [Infinity]}}'), ["header is damaged", "OverflowError"]),
        (
            header_of(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"),
            ["tensor a", "(2,)", "0 to 4"],
        ),
        (
            header_of(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', bytes(8)),
            ["tensor a", "4 to 8", "start at 0"],
        ),
        (
            header_of(b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', b"1234"),
            ["tensor a", "(-1, -1)"],
        ),
        (
            header_of(json.dumps({NASTY: {"dtype": NASTY, "shape": [1], "data_offsets": [1, 2]}}).encode()),
            ["start at 0"],
        ),
        (safetensors(SHAPES) + b"x", ["too long"]),
        (safetensors(SHAPES)[:-1], ["cut short"]),
    ],
)
def test_damaged_weights(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", weights=content)
    error = refused(path, path / "model.safetensors", *words)
    assert error.message.isprintable()
    assert (error.hint == "git lfs pull") == (content == LFS_POINTER)


def test_shape_of_the_embedding(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", vocab_size=33)
    refused(path, "model.embed_tokens.weight", "(32, 16)", "(33, 16)")


def test_no_embedding(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if "embed" not in name}
    refused(make_model(tmp_path / "m", weights=safetensors(shapes)), "model.embed_tokens.weight", "(32, 16)")


def test_fewer_layers_than_announced(tmp_path: Path) -> None:
    refused(make_model(tmp_path / "m", num_hidden_layers=3), "model.layers.2.self_attn.k_proj.weight")


def test_shape_of_the_kv_heads(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", num_key_value_heads=4)
    refused(path, "model.layers.0.self_attn.k_proj.weight", "(8, 16)", "(16, 16)")


def test_absent_output_layer(tmp_path: Path) -> None:
    refused(make_model(tmp_path / "m", tie_word_embeddings=False), "lm_head.weight", "(32, 16)")


def test_quantized_storage_of_any_layer(tmp_path: Path) -> None:
    """transformers would read the integers as numbers, and answer noise."""
    path = make_model(tmp_path / "m")
    data = (path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["model.layers.0.mlp.up_proj.weight"] = {"dtype": "I8", "shape": [4], "data_offsets": [at, at + 4]}
    (path / "model.safetensors").write_bytes(header_of(json.dumps(header).encode(), bytes(at + 4)))
    refused(path, "mlp.up_proj.weight", "stored as I8", "BF16")


def test_quantized_storage(tmp_path: Path) -> None:
    weights = safetensors(SHAPES, dtype="I16")
    refused(make_model(tmp_path / "m", weights=weights), "embed_tokens", "stored as I16", "BF16")
