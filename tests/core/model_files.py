"""Model directories built by hand, whole ones, for the tests of checkpoint, pull and models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
