"""What `pdctl up` decides and says before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.cli.up import exposure_of
from pdctl.core.config import ClusterSpec
from pdctl.core.keys import ApiKey


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
