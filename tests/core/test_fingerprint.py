"""The digests of a model's files, and the private copy of its weights that is compared with them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import SHAPES, make_model, safetensors, shard_model

from pdctl.core.config import ClusterSpec
from pdctl.core.served_model import load_model, load_tokenizer
from pdctl.core.weights.fingerprint import ChangedFileError, check_config, check_tokenizer, fingerprint, model_files
from pdctl.core.weights.private_copy import read_weights
from pdctl.transport.errors import IncompatibleError, PdctlError, UsageError

SMALL = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")


def test_digests_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    (path / "README.md").write_text("not read, so not compared")
    files = model_files(path)
    assert [file.name for file in files] == sorted(one.name for one in path.iterdir() if one.name != "README.md")
    for file in files:
        data = (path / file.name).read_bytes()
        assert (file.num_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_fingerprint_is_the_contents(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    value = fingerprint(model_files(one))
    assert 0 <= value < 2**64
    assert fingerprint(model_files(two)) == value
    for name in SMALL:
        (two / name).write_text('{"changed": 1}')
        changed = fingerprint(model_files(two))
        assert changed != value
        value = changed


@pytest.mark.parametrize("at", [0, 100_000, 500_001, -1])
def test_fingerprint_sees_every_byte(at: int, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", weights=safetensors({"a": (64 * 1024, 8)}))
    before = model_files(path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[at] ^= 1
    (path / "model.safetensors").write_bytes(data)
    after = model_files(path)
    assert fingerprint(after) != fingerprint(before)
    assert [one.name for one, other in zip(before, after, strict=True) if one != other] == ["model.safetensors"]


def test_a_long_reading_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a disk that gives nothing until the first report has come."""
    from pdctl.core.weights import fingerprint as module

    path = make_model(tmp_path / "m")
    told, reports = threading.Event(), []
    really_read = module._read

    def slow(*arguments: object) -> object:
        assert told.wait(60)
        return really_read(*arguments)  # type: ignore[arg-type]

    def report(phase: str, done: int, total: int) -> None:
        reports.append((phase, done, total))
        told.set()

    monkeypatch.setattr(module, "_read", slow)
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    model_files(path, report)
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert reports[0] == ("check", 0, size_bytes)


def test_a_file_system_that_hangs_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdctl.core.weights import fingerprint as module

    path, answers = make_model(tmp_path / "m"), threading.Event()
    monkeypatch.setattr(module, "_read", lambda *arguments: answers.wait())
    monkeypatch.setattr(module, "_STALL_S", 0.1)
    with pytest.raises(PdctlError, match=r"m: reading the model got no further for 0\.1 s, after 0 of \d+ bytes"):
        model_files(path)
    answers.set()


def test_what_ends_the_reading_of_one_file_ends_all(tmp_path: Path) -> None:
    path = shard_model(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    os.mkfifo(path / "tokenizer.json")
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a regular file"):
        model_files(path)


# ---- The copy ---------------------------------------------------------------------------------------


def test_the_copy_is_what_the_library_reads(tiny_dir: Path) -> None:
    import torch
    from safetensors.torch import load_file

    theirs = load_file(tiny_dir / "model.safetensors")
    ours = read_weights(tiny_dir, torch.float32, model_files(tiny_dir))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(value.dtype == torch.bfloat16 for value in read_weights(tiny_dir, torch.bfloat16).values())


def test_no_file_stays_mapped(tiny_dir: Path) -> None:
    import torch

    weights = read_weights(tiny_dir, torch.float32)
    assert ".safetensors" not in Path("/proc/self/maps").read_text()
    assert weights


def test_shards_with_odd_tensors(tmp_path: Path) -> None:
    import torch

    shapes: dict[str, tuple[int, ...]] = {"a": (3,), "empty": (0, 4), "scalar": (), "b": (2, 2)}
    path = make_model(tmp_path / "m", weights=safetensors(shapes, fill=1))
    found = read_weights(path, torch.bfloat16, model_files(path))
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    assert len(read_weights(shard_model(tmp_path / "s"), torch.bfloat16)) == len(SHAPES)


def spoil_in_place(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(data)


def spoil_header(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"[")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil_in_place, ["sha256"]),
        (spoil_header, ["its header is another"]),
        (lambda file: file.write_bytes(b"\xff" * file.stat().st_size), ["its header is another"]),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), ["bytes; then"]),
        (lambda file: os.truncate(file, 7), ["found 7 bytes; then"]),
        (lambda file: os.truncate(file, 0), ["found 0 bytes; then"]),
    ],
)
def test_changed_weights_are_refused_by_name(
    change: Callable[[Path], object], words: list[str], tmp_path: Path
) -> None:
    import torch

    path = shard_model(tmp_path / "m")
    files = model_files(path)
    shard = path / "model-00002-of-00002.safetensors"
    change(shard)
    with pytest.raises(ChangedFileError) as caught:
        read_weights(path, torch.bfloat16, files)
    assert caught.value.message.startswith(f"{shard} is not as it was when the cluster was started: ")
    assert all(word in caught.value.message for word in words)


def test_weights_that_are_gone_or_of_another_layout(tmp_path: Path) -> None:
    import torch

    path = shard_model(tmp_path / "m")
    files = model_files(path)
    (path / "model.safetensors").write_bytes(safetensors(SHAPES))  # would be preferred, had it been there
    assert len(read_weights(path, torch.bfloat16, files)) == len(SHAPES)
    (path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ChangedFileError, match=r"model-00001-of-00002\.safetensors is not as it was.*: it is gone"):
        read_weights(path, torch.bfloat16, files)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 100, safetensors(SHAPES)[:-1]])
def test_damaged_weights_are_no_trap_even_unchecked(content: bytes, tmp_path: Path) -> None:
    """`pdctl bench engine` compares nothing: the reader itself must not allocate what a length announces."""
    import torch

    path = make_model(tmp_path / "m", weights=content)
    with pytest.raises(IncompatibleError, match=r"model\.safetensors: "):
        read_weights(path, torch.bfloat16)


def test_unknown_storage_is_refused(tmp_path: Path) -> None:
    import torch

    path = make_model(tmp_path / "m", weights=safetensors({"a": (2, 2)}, dtype="F8_E4M3"))
    with pytest.raises(IncompatibleError, match="a is stored as F8_E4M3"):
        read_weights(path, torch.bfloat16)


# ---- Whoever loads later ----------------------------------------------------------------------------


def spec_of(path: Path, **changes: object) -> ClusterSpec:
    files = model_files(path)
    values: dict[str, object] = {
        "name": "two",
        "state_dir": Path("/tmp/pdctl-of-nobody"),
        "model_path": path,
        "model_name": "m",
        "model_files": files,
        "fingerprint": fingerprint(files),
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 384,
        "eos_token_ids": (2,),
        "dtype": "float32",
    }
    return ClusterSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def copy_of_tiny(tiny_dir: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(tiny_dir, tmp_path / "tiny"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_feels_nothing_of_its_files(copy_of_tiny: Path, dtype: str) -> None:
    """Overwritten in place they would change a mapped weight; cut short, reading it would end the process."""
    import torch

    from pdctl.core.model import load
    from pdctl.core.numerics import numerics

    decoder = load(copy_of_tiny, numerics(dtype))._decoder
    before = [parameter.clone() for parameter in decoder.parameters()]
    file = copy_of_tiny / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    os.truncate(file, 0)
    assert all(torch.equal(now, then) for now, then in zip(decoder.parameters(), before, strict=True))


def test_the_specification_remembers_the_files(copy_of_tiny: Path) -> None:
    spec = spec_of(copy_of_tiny)
    assert spec.model_files
    assert ClusterSpec.from_json(spec.to_json()) == spec


def test_later_loads_refuse_what_changed_and_say_what_to_do(copy_of_tiny: Path) -> None:
    path, spec = copy_of_tiny, spec_of(copy_of_tiny)
    load_tokenizer(spec)
    before = {name: (path / name).read_bytes() for name in ("model.safetensors", "config.json", "tokenizer.json")}
    for name, load in (
        ("model.safetensors", load_model),
        ("config.json", load_model),
        ("config.json", load_tokenizer),
        ("tokenizer.json", load_tokenizer),
    ):
        for content in (before[name][:-1] + b" ", None):
            if content is None:
                (path / name).unlink()  # as whoever tidies the hub's cache does
            else:
                (path / name).write_bytes(content)
            with pytest.raises(ChangedFileError) as caught:
                load(spec)
            assert str(path / name) in caught.value.message
            assert caught.value.hint == (
                "put the file back; or serve what is there now: "
                "pdctl down --name two --state-dir /tmp/pdctl-of-nobody && "
                "pdctl up --name two --state-dir /tmp/pdctl-of-nobody"
            )
        (path / name).write_bytes(before[name])
    load_model(spec)
    load_tokenizer(spec)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chat_template.jinja", "changed"),
        ("chat_template.jinja", "gone"),
        ("tokenizer_config.json", "changed"),
        ("special_tokens_map.json", "new"),
        ("added_tokens.json", "new"),
        ("additional_chat_templates/rag.jinja", "new"),
        ("tokenizer.5.0.0.json", "new"),
    ],
)
def test_all_that_a_tokenizer_is_made_of_is_compared(copy_of_tiny: Path, name: str, kind: str) -> None:
    files = model_files(copy_of_tiny)
    check_tokenizer(copy_of_tiny, files)
    file = copy_of_tiny / name
    if kind == "gone":
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    with pytest.raises(ChangedFileError) as caught:
        check_tokenizer(copy_of_tiny, files)
    assert str(file) in caught.value.message
    assert {"gone": "it is gone", "new": "it was not there then", "changed": "sha256"}[kind] in caught.value.message
    check_config(copy_of_tiny, files)


def test_what_nobody_loads_again_may_change(copy_of_tiny: Path) -> None:
    """generation_config.json is in the specification since the start."""
    spec = spec_of(copy_of_tiny)
    (copy_of_tiny / "generation_config.json").write_text('{"temperature": 0.1}')
    load_tokenizer(spec)
    load_model(spec)
