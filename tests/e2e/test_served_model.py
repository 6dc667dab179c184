"""What was loaded at `pdctl up` is what is served, whatever happens to the model's files afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdctl.core.cluster import spec_path
from pdctl.transport.segment import Role

pytestmark = pytest.mark.e2e

WATCHDOG_S = 120
SMALL = ("--kv-blocks", "128", "--dtype", "float32", "--threads", "1")
PROMPTS = ("the first prompt, which has so many tokens that prefill has to do something", "and another one", "c")


def status(cluster: Any) -> dict[str, Any]:
    result = cluster.cli("status", "--json")
    found: dict[str, Any] = json.loads(result.out)
    return found


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WATCHDOG_S} s: {what}"
        time.sleep(0.1)


def zygote_pid(cluster: Any) -> int:
    return next((one["pid"] for one in status(cluster)["processes"] if one["name"] == "zygote"), 0)


def causes(cluster: Any) -> str:
    return "\n".join(status(cluster)["causes"])


def greedy_of_transformers(model: Path, prompt: str) -> list[int]:
    """What `generate` makes of the prompt by the model's own generation_config.json, up to its end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = loaded.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), pad_token_id=2)
    return [int(token) for token in answer[0, prompt_ids.shape[1] :]]


def other_bytes(file: Path) -> bytes:
    """The same header and length, other weights."""
    data = file.read_bytes()
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def test_the_files_are_changed_in_every_way_under_a_running_cluster(
    start: Any, tiny_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_dir, tmp_path / "served"))
    weights, tokenizer = model / "model.safetensors", model / "tokenizer_config.json"
    whole, whole_tokenizer, spoilt = weights.read_bytes(), tokenizer.read_bytes(), other_bytes(weights)
    asked = {"eos_token_id": [2, 10_000], "repetition_penalty": 1.3, "max_new_tokens": 9, "do_sample": False}
    (model / "generation_config.json").write_text(json.dumps(asked))
    oracle = greedy_of_transformers(model, PROMPTS[0])
    cluster = start("--model", str(model), *SMALL)
    # The model's own defaults, for requests and for `pdctl generate`; then explicit values, which win.
    silent = cluster.post("/v1/completions", {"prompt": PROMPTS[0], "return_token_ids": True})[1]["choices"][0]
    assert silent["token_ids"] == oracle
    assert cluster.cli("generate", "--raw", PROMPTS[0], "--max-tokens", "9").out == silent["text"] + "\n"
    assert cluster.ids(PROMPTS[0], 9, repetition_penalty=1.0) != oracle
    # The end token that is none of the vocabulary was dropped: nothing looks for its logit.
    assert cluster.post("/v1/completions", {"prompt": PROMPTS[0], "min_tokens": 5})[0] == 200
    # Afterwards a prompt's beginning is in the cache; what follows is computed with the weights all the same.
    expected = [cluster.ids(prompt, 12) for prompt in PROMPTS]

    def assert_serves_the_same() -> None:
        assert [cluster.ids(prompt, 12) for prompt in PROMPTS] == expected
        assert cluster.ids("x" + PROMPTS[0], 12) == new

    new = cluster.ids("x" + PROMPTS[0], 12)
    daemons = [cluster.pid(Role.PREFILL), cluster.pid(Role.DECODE)]

    # Overwritten in place, and cut short: no daemon looks at the file again, and none dies of it.
    for content in (spoilt, spoilt[:1000], b""):
        weights.write_bytes(content)
        assert_serves_the_same()
    assert [cluster.pid(Role.PREFILL), cluster.pid(Role.DECODE)] == daemons
    # A successor is forked from what was loaded.
    cluster.kill(Role.DECODE)
    assert_serves_the_same()
    assert cluster.pid(Role.DECODE) != daemons[1]

    # Another file under the same name, and a new zygote: it refuses, the daemons serve on, `status` says why.
    replacement = model / "new"
    replacement.write_bytes(spoilt)
    replacement.rename(weights)
    os.kill(zygote_pid(cluster), signal.SIGKILL)
    until("status names the file", lambda: str(weights) in causes(cluster))
    result = cluster.cli("status")
    assert result.code == 8
    said = " ".join(result.out.split())
    assert "zygote does not start:" in said
    assert "is not as it was when the cluster was started" in said
    assert f"pdctl down --name {cluster.name}" in said
    assert_serves_the_same()

    # A daemon that somebody starts by hand refuses as well.
    spec = spec_path(cluster.state_dir, cluster.name)
    by_hand = [sys.executable, "-m", "pdctl.core.daemon", "decode", "--spec", str(spec)]
    done = subprocess.run(
        [*by_hand, "--segment", cluster.state.segment],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 4, done
    assert f"{weights} is not as it was" in done.stderr
    assert "(put the file back; or serve what is there now: pdctl down" in done.stderr

    # So does a router that has to start again beside another tokenizer or template.
    changed = {**json.loads(whole_tokenizer), "eos_token": "<s>"}
    tokenizer.write_text(json.dumps(changed))
    cluster.kill(Role.ROUTER)
    until("status names the tokenizer", lambda: str(tokenizer) in causes(cluster))
    assert "router does not start:" in causes(cluster)

    # Put back, they are loaded with the next attempt.
    tokenizer.write_bytes(whole_tokenizer)
    weights.write_bytes(whole)

    def are_back() -> bool:
        for name in ("zygote", "router"):
            if f"{name} gave up" in causes(cluster):  # on a machine that is slow enough
                cluster.cli("restart", name)
        return zygote_pid(cluster) > 0 and status(cluster)["health"] == "healthy"

    until("both are back", are_back)
    assert_serves_the_same()
