"""Checking and fingerprinting model directories: built by hand, most of them damaged; without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from model_files import CONFIG, SHAPES, make_model, safetensors, shard_model

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


@pytest.mark.parametrize("architecture", sorted(checkpoint.SUPPORTED))
def test_supported_architectures(architecture: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", architectures=[architecture], sliding_window=64)
    assert checkpoint.validate(path).architecture == architecture


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
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 32},
            ["MistralForCausalLM", "sliding_window 32", "64"],
        ),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
            ["sliding_window 4096", "8192"],
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, ["use_sliding_window"]),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]}, ["sliding_attention"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["rope_scaling", "dynamic", "length"]),
        ({"rope_scaling": {"type": "longrope"}}, ["rope_scaling", "longrope"]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope_parameters", "dynamic"]),
        ({"rope_scaling": {"type": "new"}}, ["'new'", "not verified", "llama3"]),
        ({"rope_scaling": "linear"}, ["rope_scaling 'linear'", "object"]),
    ],
)
def test_refused_configurations(keys: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    refused(make_model(tmp_path / "m", **keys), *words)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "default"}},
        {"sliding_window": 8, "use_sliding_window": False},
        {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096},
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_accepted_configurations(keys: dict[str, Any], tmp_path: Path) -> None:
    checkpoint.validate(make_model(tmp_path / "m", **keys))


def test_mistral_with_a_null_window_is_accepted(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
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
        from pdctl.transport.errors import UsageError
        from pathlib import Path
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        for check in checkpoint.validate, checkpoint.fingerprint:
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
        (safetensors(SHAPES) + b"x", ["too long"]),
        (safetensors(SHAPES)[:-1], ["cut short"]),
    ],
)
def test_damaged_weights(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", weights=content)
    error = refused(path, path / "model.safetensors", *words)
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


def test_quantized_storage(tmp_path: Path) -> None:
    weights = safetensors(SHAPES, dtype="I16")
    refused(make_model(tmp_path / "m", weights=weights), "embed_tokens", "stored as I16", "BF16")


# ---- Fingerprint ------------------------------------------------------------------------------------


def test_fingerprint_is_the_contents(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    value = checkpoint.fingerprint(one)
    assert 0 <= value < 2**64
    assert checkpoint.fingerprint(two) == value
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (two / name).write_text('{"changed": 1}')
        changed = checkpoint.fingerprint(two)
        assert changed != value
        value = changed


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_fingerprint_sees_each_sample(where: float, tmp_path: Path) -> None:
    rows = 64 * 1024
    path = make_model(tmp_path / "m", weights=safetensors({"a": (rows, 8)}))
    file = path / "model.safetensors"
    before = checkpoint.fingerprint(path)
    size_bytes = file.stat().st_size
    start = size_bytes - rows * 16
    with file.open("r+b") as stream:
        stream.seek(min(start + int(where * rows * 16), size_bytes - 1))
        stream.write(b"x")
    assert checkpoint.fingerprint(path) != before


def test_fingerprint_of_a_sparse_giant_reads_little(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    text = b'{"a": {"dtype": "BF16", "shape": [5000000000], "data_offsets": [0, 10000000000]}}'
    file = path / "model.safetensors"
    file.write_bytes(header_of(text))
    os.truncate(file, 8 + len(text) + 10_000_000_000)
    before_bytes = int(Path("/proc/self/io").read_text().split()[1])
    checkpoint.fingerprint(path)
    assert int(Path("/proc/self/io").read_text().split()[1]) - before_bytes < 2_000_000


def test_fingerprint_covers_every_shard(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    before = checkpoint.fingerprint(path)
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert checkpoint.fingerprint(path) != before
