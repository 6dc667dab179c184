"""A model's weights, read into memory of this process: what happens to the files afterwards changes nothing.

A mapped file would do the opposite: overwritten in place, it changes the arithmetic of running daemons beside KV
that was computed before; cut short, it kills them (SIGBUS). Processes forked after the reading share the copy. What
is compared with the digest are the bytes that were read. Needs torch; knows no models. Called by model.py.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from pdctl.core.checkpoint import StoredTensor, exists, opened, parse_header, read_tensors, weight_files
from pdctl.core.weights.fingerprint import ModelFile, changed, check_same, expected_of, is_weights
from pdctl.transport.errors import IncompatibleError

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PIECE_BYTES: Final = 8 << 20
_LARGE_BYTES: Final = 1 << 20


def read_weights(path: Path, dtype: torch.dtype, expected: Sequence[ModelFile] = ()) -> dict[str, Tensor]:
    """Reads all tensors of a model, those of floating point as `dtype`.

    Args:
        expected: what the files must be; empty: nothing is compared.

    Raises:
        UsageError: a file cannot be read.
        IncompatibleError: a file is damaged.
        ChangedFileError: it is not the expected one.
    """
    names = [file.name for file in expected if is_weights(file.name)] or weight_files(path)
    tensors: dict[str, Tensor] = {}
    for name in names:
        for tensor, value in _read_file(path, name, expected_of(path, expected, name)):
            tensors[tensor] = value.to(dtype) if value.is_floating_point() else value
    return tensors


def _read_file(path: Path, name: str, expected: ModelFile | None) -> Iterator[tuple[str, Tensor]]:
    file = path / name
    if expected is not None and not exists(file):
        raise changed(file, "it is gone")
    with opened(file) as stream, _digest_of(expected) as digest:
        size_bytes = os.fstat(stream.fileno()).st_size
        if expected is not None and size_bytes != expected.num_bytes:
            raise changed(file, f"found {size_bytes} bytes; then {expected.num_bytes}")
        try:
            stored = _read_header(file, stream, size_bytes, digest)
        except IncompatibleError as error:
            if expected is None:
                raise
            raise changed(file, "its header is another") from error
        for tensor, one in stored.items():
            if one.dtype not in _DTYPES:
                raise IncompatibleError(f"{file}: {tensor} is stored as {one.dtype}; expected {', '.join(_DTYPES)}")
            data, memory = _allocate(one.end - one.start)
            for at in range(0, len(memory), _PIECE_BYTES):
                piece = memory[at : at + _PIECE_BYTES]
                _fill(file, stream, piece)
                digest.add(piece)
            yield tensor, data.view(_DTYPES[one.dtype]).reshape(one.shape)
        found = digest.value()
        if expected is not None and found is not None:
            check_same(path, ModelFile(name=name, num_bytes=size_bytes, sha256=found), expected)


def _read_header(file: Path, stream: IO[bytes], size_bytes: int, digest: _Digest) -> dict[str, StoredTensor]:
    prefix = _read(file, stream, min(8, size_bytes))
    if (length := int.from_bytes(prefix, "little")) > size_bytes - 8:
        read_tensors(file)  # says what is wrong
        raise IncompatibleError(f"{file} is being written", hint="try again when it is whole")
    header = _read(file, stream, length)
    for part in (prefix, header):
        digest.add(part)
    return parse_header(file, size_bytes, bytes(header))


def _allocate(num_bytes: int) -> tuple[Tensor, memoryview]:
    """Memory for one tensor. A large one that is only converted goes back to the system, not to the heap."""
    if num_bytes < _LARGE_BYTES:
        data = torch.empty(num_bytes, dtype=torch.uint8)
        return data, data.numpy().data
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)


def _read(file: Path, stream: IO[bytes], num_bytes: int) -> memoryview:
    memory = memoryview(bytearray(num_bytes))
    _fill(file, stream, memory)
    return memory


def _fill(file: Path, stream: IO[bytes], memory: memoryview) -> None:
    """Read exactly so many bytes. Not through the stream's buffer: it would copy them once more."""
    done = 0
    while done < len(memory):
        got = os.readv(stream.fileno(), [memory[done:]])
        if got == 0:
            raise IncompatibleError(f"{file}: cut short while it was read", hint="download the file again")
        done += got


class _Digest:
    """SHA-256 of what is added, computed on a thread while the next piece is read."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self._digest = hashlib.sha256()

    def add(self, piece: memoryview) -> None:
        if self._pool is not None:
            self._pool.submit(self._digest.update, piece)

    def value(self) -> str | None:
        """Of all pieces; None: nobody asked for it."""
        return None if self._pool is None else self._pool.submit(self._digest.hexdigest).result()


@contextmanager
def _digest_of(expected: ModelFile | None) -> Iterator[_Digest]:
    if expected is None:
        yield _Digest(None)
        return
    # One thread: pieces are added in order. It has ended when the block has: whoever forks next has none.
    with ThreadPoolExecutor(1) as pool:
        yield _Digest(pool)
