"""A model directory: its configuration, tokenizer and safetensors, checked without loading.

Reads config.json and the safetensors headers as plain bytes: no torch, no transformers, so that light commands
may import it. Does not know where a directory comes from, nor engines, segments or clusters. Called by models and
pull, which accept no directory that `validate` refuses, and by `pdctl up`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from pdctl.core.families import FAMILIES, Family, check_attention, shown
from pdctl.core.weights.end_tokens import end_token, token_id
from pdctl.core.weights.generation import SamplingDefaults, read_generation
from pdctl.transport.errors import IncompatibleError, PdctlError, UsageError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the rest of pdctl needs of config.json and generation_config.json; all numbers positive.

    Attributes:
        max_context: tokens of the longest context that can be served, at most max_position_embeddings.
        context_rope: type of the rope that keeps max_context below, or at, that: its angles change beyond; None:
            max_context is the model's own limit.
        eos_token_ids: all that end an answer; may be none. Each is below vocab_size.
        sampling: what requests get that do not say.
        remarks: what the model's files ask for and pdctl does not do, a line each, for people.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    max_context: int
    context_rope: str | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    remarks: tuple[str, ...] = ()


_SUPPORTED_NAMES: Final = ", ".join(sorted(FAMILIES))

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
WEIGHTS: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_CLASS_NAME: Final = re.compile(r"\w{1,100}", re.ASCII)
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

_DTYPES: Final = frozenset({"bfloat16", "float16", "float32"})
_STORED_DTYPES: Final = frozenset({"BF16", "F16", "F32"})
_STORED_DTYPE_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}

_LFS_MARK: Final = b"version https://git-lfs"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format

# Larger than any tokenizer: what is larger is something else, and is not read into memory.
_MAX_SMALL_BYTES: Final = 256 << 20

# Of layers, heads, positions: what is larger is damaged, and no product of it has to be computed.
_MAX_NUMBER: Final = 1 << 40

# One for each thing that a person can do about it.
_HINT_INCOMPLETE: Final = "give a complete model directory, or use the embedded model: --model smollm2"
_HINT_CONFIG: Final = "correct the file, or download it again"
_HINT_UNSUPPORTED: Final = "choose another model; the embedded one is --model smollm2"
_HINT_WEIGHTS: Final = "check that config.json and the weights belong together, or download the model again"


def validate(path: Path) -> ModelConfig:
    """Checks a model directory without loading it: configuration, tokenizer, and every weight file's header.

    Takes milliseconds whatever the model's size: of the weights only headers and file sizes are read.

    Raises:
        UsageError: the directory, or a file in it, is absent or cannot be read.
        IncompatibleError: damaged, incomplete, or nothing pdctl can serve; the message names the file and
            what was found and expected.
    """
    try:
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise unreadable(path, error) from error
    if is_empty:
        raise IncompatibleError(
            f"{path} is empty; expected config.json, tokenizer.json and safetensors", hint=_HINT_INCOMPLETE
        )
    config, tokenizer = _read_config(path)
    _check_tokenizer(path, tokenizer)
    _check_weights(path, config)
    return config


def is_complete(path: Path) -> bool:
    """Whether `validate` accepts the directory."""
    try:
        validate(path)
    except PdctlError:
        return False
    return True


def read_config(path: Path) -> ModelConfig:
    """Reads config.json, generation_config.json and the end token of the tokenizer of a model directory.

    Raises:
        UsageError: a file cannot be read.
        IncompatibleError: absent, damaged, or of a model pdctl does not serve; the message says which, why.
    """
    return _read_config(path)[0]


def _read_config(path: Path) -> tuple[ModelConfig, Mapping[str, Any] | None]:
    """`read_config`, and tokenizer.json, which may be large, if that had to be read for it."""
    raw = _read_config_json(path)
    file = path / "config.json"
    architecture = _check_architecture(file, raw)
    family = FAMILIES[architecture]
    num_heads = _positive(file, raw, "num_attention_heads")
    num_kv_heads = _positive(file, raw, "num_key_value_heads", absent=family.num_kv_heads, default=num_heads)
    hidden_size = _positive(file, raw, "hidden_size")
    head_dim = _positive(file, raw, "head_dim", absent=family.head_dim, default=hidden_size // num_heads)
    if num_heads % num_kv_heads != 0:
        raise IncompatibleError(
            f"{file}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            hint=_HINT_CONFIG,
        )
    num_layers = _positive(file, raw, "num_hidden_layers")
    max_position_embeddings = _positive(file, raw, "max_position_embeddings")

    def refuse(what: str, why: str) -> IncompatibleError:
        return IncompatibleError(f"{architecture}: {file} has {what}: {why}", hint=_HINT_UNSUPPORTED)

    if (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refuse(
            f"quantization_config ({shown(method)})", "pdctl serves weights of bfloat16, float16 or float32 only"
        )
    limit = check_attention(
        family,
        raw,
        refuse,
        num_layers=num_layers,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
    )
    vocab_size = _positive(file, raw, "vocab_size")
    # As transformers and vLLM: without the one file, the other is asked for the same keys.
    generation_file = file.with_name("generation_config.json")
    generation = _read_json_object(generation_file) if exists(generation_file) else None
    sampling, remarks = read_generation(
        raw if generation is None else generation,
        (file if generation is None else generation_file).name,
        limit.tokens,
    )
    token = end_token(
        *(
            _read_json_object(path / name) if exists(path / name) else {}
            for name in ("tokenizer_config.json", "special_tokens_map.json")
        )
    )
    tokenizer = None
    if token is not None and exists(path / "tokenizer.json"):
        tokenizer = _read_json_object(path / "tokenizer.json")
    named = _end_tokens(path, raw, generation or {})
    if token is not None and tokenizer is not None and (found := token_id(tokenizer, token)) is not None:
        named.append((found, f"tokenizer.json: the end token {shown(token)} has id {shown(found)}, which"))
    # No logit stands for an id beyond the vocabulary.
    eos_token_ids = tuple(dict.fromkeys(one for one, _ in named if 0 <= one < vocab_size))
    dropped = {one: where for one, where in named if one not in eos_token_ids}
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        max_context=limit.tokens,
        context_rope=limit.rope_type,
        dtype=_dtype(file, raw),
        eos_token_ids=eos_token_ids,
        bos_token_id=_bos_token_id(file, raw),
        sampling=sampling,
        remarks=(
            *remarks,
            *(f"{where} is ignored: the vocabulary has ids 0 to {vocab_size - 1}" for where in dropped.values()),
        ),
    )
    return config, tokenizer


def _read_config_json(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not exists(file):
        if exists(path / "adapter_config.json"):
            raise IncompatibleError(
                f"{path} holds a LoRA adapter (adapter_config.json) and no config.json; expected a whole model",
                hint="merge the adapter into its base model first",
            )
        if any(path.glob("*.gguf")):
            raise IncompatibleError(
                f"{path} holds GGUF files and no config.json; expected safetensors",
                hint="convert it with transformers (gguf_file=...) and save_pretrained first",
            )
        raise IncompatibleError(f"{file} is missing", hint=_HINT_INCOMPLETE)
    return _read_json_object(file)


def _check_architecture(file: Path, raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(first, str) or not _CLASS_NAME.fullmatch(first):
        raise IncompatibleError(
            f"{file}: architectures is {shown(architectures)}; expected a list with one of {_SUPPORTED_NAMES}",
            hint=_HINT_CONFIG,
        )
    architecture = first
    if raw.get("auto_map") is not None and not _is_adopted(FAMILIES.get(architecture), raw["auto_map"]):
        raise IncompatibleError(
            f"{architecture}: {file} has auto_map, code that comes with the model (trust_remote_code); "
            "pdctl runs none",
            hint=_HINT_UNSUPPORTED,
        )
    if architecture not in FAMILIES:
        raise IncompatibleError(
            f"{architecture}: not a decoder pdctl has verified; supported: {_SUPPORTED_NAMES}", hint=_HINT_UNSUPPORTED
        )
    expected = FAMILIES[architecture].model_type
    if raw.get("model_type", expected) != expected:
        raise IncompatibleError(
            f"{architecture}: {file} has model_type {shown(raw['model_type'])}; expected {shown(expected)}",
            hint=_HINT_CONFIG,
        )
    return architecture


def _is_adopted(family: Family | None, auto_map: object) -> bool:
    """Whether the code that comes with a model is one that transformers has as its own, and loads instead."""
    if family is None or family.adopted_code is None or not isinstance(auto_map, dict):
        return False
    # "module.Class", or "repository--module.Class" in a copy.
    return str(auto_map.get("AutoModelForCausalLM")).rpartition("--")[2] == family.adopted_code


def _positive(
    file: Path, raw: Mapping[str, Any], key: str, *, absent: int | None = None, default: int | None = None
) -> int:
    """Returns a number of config.json; `absent` is what a missing key means, `default` what null does, and both."""
    value = raw.get(key, absent)
    if value is None:
        if default is None:
            raise IncompatibleError(f"{file}: {key} is missing; expected a positive integer", hint=_HINT_CONFIG)
        value = default
    if not _is_int(value) or not 0 < value < _MAX_NUMBER:
        raise IncompatibleError(f"{file}: {key} is {shown(value)}; expected a positive integer", hint=_HINT_CONFIG)
    return int(value)


def _dtype(file: Path, raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype", raw.get("torch_dtype"))
    if value is None:
        return "float32"
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in _DTYPES:
        raise IncompatibleError(
            f"{file}: dtype is {shown(value)}; expected one of {', '.join(sorted(_DTYPES))}", hint=_HINT_UNSUPPORTED
        )
    return str(dtype)


def _end_tokens(path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> list[tuple[int, str]]:
    """What generation_config.json says ends an answer, else config.json, and where it says so."""
    file, value = path / "config.json", raw.get("eos_token_id")
    if generation.get("eos_token_id") is not None:
        file, value = path / "generation_config.json", generation["eos_token_id"]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_int(one) for one in ids):
        raise IncompatibleError(
            f"{file}: eos_token_id is {shown(value)}; expected an integer or a list of them", hint=_HINT_CONFIG
        )
    return [(one, f"{file.name}: eos_token_id {shown(one)}") for one in ids]


def _bos_token_id(file: Path, raw: Mapping[str, Any]) -> int | None:
    value = raw.get("bos_token_id")
    if value is not None and not _is_int(value):
        raise IncompatibleError(
            f"{file}: bos_token_id is {shown(value)}; expected an integer or null", hint=_HINT_CONFIG
        )
    return value


def _check_tokenizer(path: Path, tokenizer: Mapping[str, Any] | None) -> None:
    """Checks the files that a tokenizer is made from.

    Args:
        tokenizer: what tokenizer.json holds; None: it was not read yet.
    """
    for name in TOKENIZER_FILES:
        if not exists(path / name) or (name == "tokenizer.json" and tokenizer is not None):
            continue
        if name.endswith(".json"):
            _read_json_object(path / name)
        elif name.endswith(".model"):
            _refuse_lfs_pointer(path / name, _read_bytes(path / name))
        else:
            _read_text(path / name)
    if not exists(path / "tokenizer.json") and not exists(path / "tokenizer.model"):
        raise IncompatibleError(
            f"{path} has no tokenizer: neither tokenizer.json nor tokenizer.model", hint=_HINT_INCOMPLETE
        )


def _check_weights(path: Path, config: ModelConfig) -> None:
    """Checks that every weight file is whole and that together they hold the tensors config.json speaks of.

    A tensor that is absent would be filled with random numbers by the loader, which only warns.
    """
    family = FAMILIES[config.architecture]
    tied = bool(_read_json_object(path / "config.json").get("tie_word_embeddings", family.tied))
    shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for name in weight_files(path):
        for tensor, one in read_tensors(path / name).items():
            shapes[tensor] = (path / name, one.shape)
            # Read as numbers, quantized ones would be noise.
            if tensor.endswith(".weight") and one.dtype not in _STORED_DTYPES:
                raise IncompatibleError(
                    f"{path / name}: {_plain(tensor)} is stored as {_plain(one.dtype)}; "
                    f"expected one of {', '.join(sorted(_STORED_DTYPES))}",
                    hint=_HINT_UNSUPPORTED,
                )
    prefix = "model." if any(tensor.startswith("model.") for tensor in shapes) else ""

    def expected() -> Iterator[tuple[str, tuple[int, int]]]:
        # One after the other: config.json may speak of a thousand million layers.
        yield f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size)
        for layer in range(config.num_layers):
            for projection, rows in _kv_projections(family, config).items():
                yield f"{prefix}layers.{layer}.self_attn.{projection}.weight", (rows, config.hidden_size)
        if not tied:
            yield "lm_head.weight", (config.vocab_size, config.hidden_size)

    for tensor, shape in expected():
        if tensor not in shapes:
            raise IncompatibleError(
                f"{path}: no tensor {tensor} in the safetensors; config.json expects one of shape {shape}",
                hint=_HINT_WEIGHTS,
            )
        file, found = shapes[tensor]
        if found != shape:
            raise IncompatibleError(
                f"{file}: {tensor} has shape {shown(found)}; config.json expects {shape}", hint=_HINT_WEIGHTS
            )


def _kv_projections(family: Family, config: ModelConfig) -> dict[str, int]:
    """Rows of the projections that make keys and values, by name."""
    kv_rows = config.num_kv_heads * config.head_dim
    if family.has_fused_qkv:
        return {"qkv_proj": config.num_heads * config.head_dim + 2 * kv_rows}
    return {"k_proj": kv_rows, "v_proj": kv_rows}


def weight_files(path: Path) -> tuple[str, ...]:
    """Returns the names of the weight files as the loader picks them: one file, else what the index names."""
    if exists(path / WEIGHTS):
        return (WEIGHTS,)
    if shards := indexed_shards(path):
        missing = [name for name in shards if not exists(path / name)]
        if missing:
            raise IncompatibleError(
                f"{path / missing[0]} is missing: {len(missing)} of the {len(shards)} shards named by "
                f"{WEIGHTS_INDEX} are not there",
                hint="download the model again",
            )
        return shards
    pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")) + sorted(path.glob("*.pth"))
    if pickles:
        raise IncompatibleError(
            f"{pickles[0]} is a pickle, which can run code when loaded; expected {WEIGHTS} or {WEIGHTS_INDEX}",
            hint="convert it: save_pretrained of transformers writes safetensors",
        )
    raise IncompatibleError(
        f"{path} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX} is there",
        hint="download the model again",
    )


def indexed_shards(path: Path) -> tuple[str, ...]:
    """Returns the names of the weight files that the index names, there or not; () without an index.

    Raises:
        UsageError: the index cannot be read.
        IncompatibleError: it is damaged, or names a file elsewhere.
    """
    file = path / WEIGHTS_INDEX
    if not exists(file):
        return ()
    weight_map = _read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IncompatibleError(
            f"{file}: weight_map is {type(weight_map).__name__}; expected an object from tensor to shard",
            hint="download the model again",
        )
    for shard in weight_map.values():
        if not isinstance(shard, str) or not PLAIN_NAME.fullmatch(shard):
            raise IncompatibleError(
                f"{file}: shard {shown(shard)} is not a file name in the same directory",
                hint="download the model again",
            )
    return tuple(sorted(set(weight_map.values())))


def _read_header(file: Path) -> tuple[int, bytes]:
    """Returns the file's size in bytes and the header of a safetensors file.

    0        8                8 + n                     size
    | n: u64 | JSON, n bytes  | tensors, back to back   |
    """
    with opened(file) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(max(8, len(_LFS_MARK)))
        _refuse_lfs_pointer(file, prefix)
        length = int.from_bytes(prefix[:8], "little")
        if size_bytes < 8 or length > _MAX_HEADER_BYTES or 8 + length > size_bytes:
            found = f"{size_bytes:,} bytes"
            if size_bytes >= 8:
                found = f"a header length of {length:,} bytes in a file of {found}"
            raise IncompatibleError(
                f"{file}: not a safetensors file, or cut short: found {found}; "
                "expected 8 bytes of length and a header of that length",
                hint="download the file again",
            )
        stream.seek(8)
        return size_bytes, stream.read(length)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies among the data of a safetensors file, in bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensors(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name; checks that it holds exactly the bytes it announces."""
    size_bytes, header = _read_header(file)
    return parse_header(file, size_bytes, header)


def parse_header(file: Path, size_bytes: int, header: bytes) -> dict[str, StoredTensor]:
    """Returns the tensors that a header announces, in the order of their bytes: without gaps, up to the file's end.

    Raises:
        IncompatibleError: it is damaged, or speaks of another file.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        raw = json.loads(header)
        raw.pop("__metadata__", None)
        for name, entry in raw.items():
            shape = tuple(map(int, entry["shape"]))
            start, end = map(int, entry["data_offsets"])
            tensors[name] = StoredTensor(dtype=str(entry["dtype"]), shape=shape, start=start, end=end)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise IncompatibleError(
            f"{file}: the safetensors header is damaged: {type(error).__name__}: {first_line(error)}",
            hint="download the file again",
        ) from error
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end, item[0])))
    at = 0
    for name, one in tensors.items():
        item_bytes = _STORED_DTYPE_BYTES.get(one.dtype)
        num_bytes = one.end - one.start
        is_impossible = num_bytes < 0 or any(length < 0 for length in one.shape)
        if one.start != at or is_impossible or (item_bytes and num_bytes != math.prod(one.shape) * item_bytes):
            raise IncompatibleError(
                f"{file}: tensor {_plain(name)} ({_plain(one.dtype)}, shape {shown(one.shape)}) has bytes "
                f"{_plain(str(one.start))} to {_plain(str(one.end))}; "
                f"expected them to start at {at} and to fit the shape",
                hint="download the file again",
            )
        at = one.end
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
        # As those decode it who read it later: json itself would take UTF-16, and a byte order mark.
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(f"{file} is not JSON: {first_line(error)}", hint="download the file again") from error
    if not isinstance(value, dict):
        raise IncompatibleError(
            f"{file} holds a JSON {type(value).__name__}; expected an object", hint="download the file again"
        )
    return value


def _read_text(file: Path) -> str:
    data = _read_bytes(file)
    _refuse_lfs_pointer(file, data)
    try:
        return data.decode()
    except ValueError as error:
        raise IncompatibleError(f"{file} is not UTF-8: {first_line(error)}", hint=_HINT_CONFIG) from error


def _read_bytes(file: Path) -> bytes:
    with opened(file) as stream:
        if (size_bytes := os.fstat(stream.fileno()).st_size) > _MAX_SMALL_BYTES:
            raise IncompatibleError(
                f"{file} has {size_bytes:,} bytes; expected at most {_MAX_SMALL_BYTES:,}", hint=_HINT_CONFIG
            )
        return stream.read()


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Opens a regular file for reading; an OSError in the block is taken for one of reading it.

    Raises:
        UsageError: it is not a regular file, or cannot be read.
    """
    try:
        # A FIFO would block for ever in open.
        if not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(f"{file} is not a regular file", hint=f"ls -l {file}")
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise unreadable(file, error) from error


def exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: OSError) -> UsageError:
    """Returns the error to raise for a path that could not be read."""
    return UsageError(f"cannot read {path}: {error.strerror or error}", hint=f"ls -ld {path}")


def first_line(error: BaseException) -> str:
    """Returns what an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _plain(text: str) -> str:
    """A name out of a file that anybody may have written: as it is, if it fits one line of an error."""
    return text if text.isprintable() and len(text) <= 120 else shown(text)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
