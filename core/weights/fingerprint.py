"""Which bytes a cluster serves: a digest of every file that is read to serve a model, taken once, at its start.

Whatever loads from these files later (a new zygote, a restarted router, a daemon started by hand) compares what it
read, and refuses what is not the same: other weights beside KV that was computed with the first ones give wrong
answers that nothing else would notice. A digest is the file's SHA-256, as `sha256sum` prints it. Knows files and
names; no torch, no clusters. Called by `pdctl up`, and by what loads.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdctl.core.checkpoint import TOKENIZER_FILES, WEIGHTS_INDEX, exists, opened, weight_files
from pdctl.transport.errors import IncompatibleError, PdctlError

CONFIG: Final = "config.json"
# Everything but the weights.
SMALL_FILES: Final = (CONFIG, "generation_config.json", *TOKENIZER_FILES, WEIGHTS_INDEX)
# What a tokenizer is made of beside the files above.
_TOKENIZER_PATTERNS: Final = ("tokenizer.*.json", "additional_chat_templates/*.jinja")

_PIECE_BYTES: Final = 4 << 20
# Of a pass that takes longer people are told.
_SILENT_S: Final = 1.0
_REPORT_S: Final = 0.2
_STALL_S: Final = 60.0


class ChangedFileError(IncompatibleError):
    """A file is not what the cluster was started with."""


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file as it was read, by its name in the model's directory."""

    name: str
    num_bytes: int
    sha256: str


def model_files(path: Path, progress: Callable[[str, int, int], None] | None = None) -> tuple[ModelFile, ...]:
    """Reads every file of a model that serving it depends on, weights and all, by name.

    Args:
        progress: called with ("check", bytes read, bytes in all) while it takes long.

    Raises:
        UsageError: a file cannot be read.
        IncompatibleError: a weight file is absent.
        PdctlError: the file system gives nothing any more.
    """
    small = [name for name in (CONFIG, "generation_config.json", WEIGHTS_INDEX) if exists(path / name)]
    names = sorted({*small, *_tokenizer_names(path), *weight_files(path)})
    total = sum((path / name).stat().st_size for name in names if exists(path / name))
    read = _Count()
    digests = _read_beside(path, names, read)
    began = moved_at = time.monotonic()
    seen = -1
    while True:
        done, waiting = wait(digests, timeout=_REPORT_S, return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()  # raises what ended it
        if not waiting:
            return tuple(one.result() for one in digests)
        now = time.monotonic()
        if read.num_bytes != seen:
            seen, moved_at = read.num_bytes, now
        if now - moved_at > _STALL_S:
            raise PdctlError(
                f"{path}: reading the model got no further for {_STALL_S:g} s, after {seen} of {total} bytes",
                hint=f"see whether its file system answers: ls -l {path}",
            )
        if progress is not None and now - began > _SILENT_S:
            progress("check", min(seen, total), total)


def _read_beside(path: Path, names: Sequence[str], read: _Count) -> list[Future[ModelFile]]:
    """Reads files in threads that nobody has to wait for, should the file system hang."""
    digests = [Future[ModelFile]() for _ in names]
    jobs = iter(zip(names, digests, strict=True))

    def work() -> None:
        for name, digest in jobs:
            try:
                digest.set_result(_read(path, name, read))
            except Exception as error:
                digest.set_exception(error)

    for _ in range(min(len(names), len(os.sched_getaffinity(0)))):
        threading.Thread(target=work, name="digest", daemon=True).start()
    return digests


def fingerprint(files: Iterable[ModelFile]) -> int:
    """64 bits that tell one model from another. It guards against mixing up models, not against a forger."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.num_bytes}:{file.sha256}\n".encode())
    return int.from_bytes(digest.digest()[:8], "little")


def is_weights(name: str) -> bool:
    """Whether one of the files that `model_files` gives holds tensors."""
    return name not in SMALL_FILES and not _is_of_tokenizer(name)


def check_config(path: Path, expected: Sequence[ModelFile]) -> None:
    """Raise ChangedFileError unless config.json is as it was; nothing is expected of an empty list."""
    _compare(path, expected, [CONFIG])


def check_tokenizer(path: Path, expected: Sequence[ModelFile]) -> None:
    """Raise ChangedFileError unless all that a tokenizer is made from is as it was, and nothing was added."""
    names = {file.name for file in expected if _is_of_tokenizer(file.name)}
    _compare(path, expected, sorted({CONFIG, *names, *_tokenizer_names(path)}))


def expected_of(path: Path, expected: Sequence[ModelFile], name: str) -> ModelFile | None:
    """What a file must be; None: nothing is expected of any.

    Raises:
        ChangedFileError: others are expected, and it was not among them.
    """
    if not expected:
        return None
    found = [file for file in expected if file.name == name]
    if not found:
        raise changed(path / name, "it was not there then")
    return found[0]


def check_same(path: Path, found: ModelFile, expected: ModelFile | None) -> None:
    """Raise ChangedFileError unless a file that was read is the expected one."""
    if expected is not None and found != expected:
        raise changed(
            path / found.name,
            f"found {found.num_bytes} bytes, sha256 {found.sha256[:16]}…; "
            f"then {expected.num_bytes} bytes, sha256 {expected.sha256[:16]}…",
        )


def changed(file: Path, how: str) -> ChangedFileError:
    """The error to raise for a file that is not what the cluster was started with."""
    return ChangedFileError(f"{file} is not as it was when the cluster was started: {how}")


def _compare(path: Path, expected: Sequence[ModelFile], names: Iterable[str]) -> None:
    for name in names if expected else ():
        if not exists(path / name):
            raise changed(path / name, "it is gone")
        check_same(path, _read(path, name, _Count()), expected_of(path, expected, name))


def _is_of_tokenizer(name: str) -> bool:
    return name in TOKENIZER_FILES or any(Path(name).match(pattern) for pattern in _TOKENIZER_PATTERNS)


def _tokenizer_names(path: Path) -> list[str]:
    names = [name for name in TOKENIZER_FILES if exists(path / name)]
    for pattern in _TOKENIZER_PATTERNS:
        names += [str(file.relative_to(path)) for file in path.glob(pattern) if exists(file)]
    return sorted(names)


class _Count:
    """Bytes read so far, by all threads of a pass: for people, so a lost increment does no harm."""

    num_bytes = 0


def _read(path: Path, name: str, read: _Count) -> ModelFile:
    digest, num_bytes, piece = hashlib.sha256(), 0, memoryview(bytearray(_PIECE_BYTES))
    with opened(path / name) as stream:
        while got := os.readv(stream.fileno(), [piece]):
            digest.update(piece[:got])
            num_bytes += got
            read.num_bytes += got
    return ModelFile(name=name, num_bytes=num_bytes, sha256=digest.hexdigest())
