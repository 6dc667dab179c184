"""What `pdctl up` decides and says before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import make_model

from pdctl.cli.up import _spec, exposure_of
from pdctl.core.config import ClusterSpec
from pdctl.core.keys import ApiKey
from pdctl.core.models import resolve
from pdctl.core.weights.fingerprint import fingerprint, model_files
from pdctl.core.weights.generation import SamplingDefaults


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.168.0.7", None, True),
        ("llm.example", None, True),
        ("0.0.0.0", ApiKey("key"), False),
    ],
)
def test_who_serves_everybody_is_warned(host: str, key: ApiKey | None, warned: bool) -> None:
    spec = ClusterSpec(
        name="c",
        state_dir=Path("/tmp/c"),
        model_path=Path("/models/tiny"),
        model_name="tiny",
        fingerprint=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=9,
        eos_token_ids=(),
        host=host,
        api_key=key,
    )
    warning = exposure_of(spec)
    assert (warning is not None) is warned
    assert warning is None or (f"--host {host}" in warning and "--api-key-file" in warning)


def test_what_the_model_asks_for_is_decided_once_and_what_is_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path / "m")
    asked = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.3, "num_beams": 4, "min_p": "some"}
    (path / "generation_config.json").write_text(json.dumps({**asked, "eos_token_id": [2, 99]}))
    files = model_files(path)
    spec = _spec(
        resolve(str(path)),
        files,
        name="c",
        state_dir=tmp_path / "state",
        dtype="float32",
        kv_gib=None,
        kv_blocks=8,
        max_context=None,
        threads=1,
    )
    assert spec.sampling == SamplingDefaults(temperature=0.0, repetition_penalty=1.3)
    assert spec.eos_token_ids == (2,)
    assert (spec.model_files, spec.fingerprint) == (files, fingerprint(files))
    said = capsys.readouterr().err
    for words in (
        'min_p "some" is ignored: expected a number from 0 to 1',
        "temperature 0.6 is ignored: do_sample is false",
        "not supported, and not followed: num_beams 4",
        "eos_token_id 99 is ignored: the vocabulary has ids 0 to 31",
    ):
        assert f"generation_config.json: {words}" in said
