"""What is decided before anything starts: threads, rows, and a record that survives being written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdctl.core import config
from pdctl.core.config import ClusterSpec, default_threads, rows_for
from pdctl.core.weights.fingerprint import ModelFile
from pdctl.core.weights.generation import SamplingDefaults
from pdctl.transport.errors import IncompatibleError, UsageError


def spec(**changes: object) -> ClusterSpec:
    values: dict[str, object] = {
        "name": "c",
        "state_dir": Path("/tmp/c"),
        "model_path": Path("/models/tiny"),
        "model_name": "tiny",
        "fingerprint": 1,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 100,
        "eos_token_ids": (),
    }
    return ClusterSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "environment", "cores", "expected"),
    [
        (None, None, 8, (8, 7)),
        (None, None, 1, (1, 1)),
        (None, "3", 8, (3, 2)),
        (None, "1", 8, (1, 1)),
        (None, "0", 8, (8, 7)),
        (None, "2,3", 8, (8, 7)),
        (4, "1", 8, (4, 3)),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    given: int | None,
    environment: str | None,
    cores: int,
    expected: tuple[int, int],
) -> None:
    """S48: --threads, else OMP_NUM_THREADS, else the cores; decode leaves one."""
    monkeypatch.setattr(config, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert default_threads(given) == expected


def test_every_place_of_a_batch_has_a_row() -> None:
    assert rows_for(1, 1, 32) == config.MIN_ROWS
    assert rows_for(2, 3, 100) == 302


@pytest.mark.parametrize("changes", [{"num_prefill": 2}, {"num_decode": 3}, {"local_prefill_tokens": 32}])
def test_one_process_is_one_of_each(changes: dict[str, int]) -> None:
    alone: dict[str, object] = {"colocated": True, "local_prefill_tokens": 0}
    assert spec(**alone).colocated
    with pytest.raises(UsageError, match="with --colocated"):
        spec(**alone | changes)


def test_a_record_is_read_as_it_was_written() -> None:
    made = spec(max_queue=0, max_rows=302, eos_token_ids=(2, 5), colocated=True, local_prefill_tokens=0)
    assert ClusterSpec.from_json(made.to_json()) == made
    with pytest.raises(IncompatibleError):
        ClusterSpec.from_json('{"name": "c"}')
    with pytest.raises(IncompatibleError, match="colocated: expected bool, found int"):
        ClusterSpec.from_json(made.to_json().replace('"colocated": true', '"colocated": 1'))
    with pytest.raises(UsageError, match="--max-queue -1"):
        spec(max_queue=-1)


def test_records_inside_the_record_survive_being_written_down() -> None:
    sampling = SamplingDefaults(temperature=0.6, top_k=20, max_tokens=7)
    made = spec(sampling=sampling, model_files=(ModelFile(name="config.json", num_bytes=3, sha256="ab"),))
    assert ClusterSpec.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sampling", {"temperature": "hot"}, "temperature: expected float, found str"),
        ("sampling", {"temperature": True}, "temperature: expected float, found bool"),
        ("sampling", {"max_tokens": 1.5}, "max_tokens: expected int | None, found float"),
        ("sampling", {"beams": 4}, "beams: expected None, found int"),
        ("sampling", [], "sampling: expected SamplingDefaults, found list"),
        ("model_files", [3], "model_files: expected ModelFile, found int"),
        ("model_files", {}, "model_files: expected tuple[ModelFile, ...], found dict"),
        ("model_files", [{"name": "a", "num_bytes": "3"}], "num_bytes: expected int, found str"),
        ("model_files", [{"name": "a"}], "missing"),
    ],
)
def test_a_record_inside_with_a_wrong_value_is_refused(field: str, value: object, words: str) -> None:
    values = {**json.loads(spec().to_json()), field: value}
    with pytest.raises(IncompatibleError) as caught:
        ClusterSpec.from_json(json.dumps(values))
    assert words in caught.value.message
