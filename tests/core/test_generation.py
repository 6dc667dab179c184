"""What generation_config.json asks for: taken as vLLM and transformers take it, or named as left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import make_model

from pdctl.core import checkpoint
from pdctl.core.weights.generation import _NOT_FOLLOWED, SamplingDefaults, read_generation
from pdctl.transport.errors import IncompatibleError

MAX_CONTEXT = 64


def read(**raw: Any) -> tuple[SamplingDefaults, tuple[str, ...]]:
    return read_generation(raw, "generation_config.json", MAX_CONTEXT)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"transformers_version": "5", "bos_token_id": 1, "chat_format": "raw"}, SamplingDefaults()),
        ({"temperature": None, "do_sample": None, "num_beams": None}, SamplingDefaults()),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.6, top_p=0.9)),
        # vLLM takes them whatever do_sample is; in transformers, absent, it is no wish either.
        ({"temperature": 0.6, "top_k": 20}, SamplingDefaults(temperature=0.6, top_k=20)),
        ({"repetition_penalty": 1.3, "min_p": 0.05}, SamplingDefaults(repetition_penalty=1.3, min_p=0.05)),
        ({"max_new_tokens": 2048}, SamplingDefaults(max_tokens=2048)),
        ({"temperature": 0}, SamplingDefaults(temperature=0.0)),
        ({"top_k": -1, "top_p": 1, "min_p": 0}, SamplingDefaults()),
        ({"top_k": 0, "top_p": 0}, SamplingDefaults(top_p=0.0)),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.5}, SamplingDefaults(temperature=0.0, top_p=0.5)),
        ({"max_length": 20, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}, SamplingDefaults()),
        ({"max_length": MAX_CONTEXT}, SamplingDefaults()),
        ({"max_length": 5, "max_new_tokens": 7}, SamplingDefaults(max_tokens=7)),
    ],
)
def test_what_is_taken(raw: dict[str, Any], expected: SamplingDefaults) -> None:
    assert read(**raw) == (expected, ())


def test_do_sample_false_beside_a_temperature_is_greedy_and_said() -> None:
    defaults, (remark,) = read(do_sample=False, temperature=0.6, top_p=0.9)
    assert defaults == SamplingDefaults(temperature=0.0, top_p=0.9)
    assert "generation_config.json: temperature 0.6 is ignored: do_sample is false" in remark


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("temperature", value) for value in ("hot", -1, 101, float("nan"), float("inf"), True, [0.5], 10**400)],
        *[("top_p", value) for value in (1.1, -0.1, "1", {})],
        *[("top_k", value) for value in (-2, 50.0, True, "all", 1 << 31)],
        *[("min_p", value) for value in (2, -1)],
        *[("repetition_penalty", value) for value in (0, -1, 1e9, float("nan"))],
        *[("max_new_tokens", value) for value in (0, -1, 1.5, True, "many", 1 << 31)],
        *[("do_sample", value) for value in ("yes", 0, 1)],
    ],
)
def test_values_that_make_no_sense_are_named_and_dropped(key: str, value: object) -> None:
    defaults, (remark,) = read(**{key: value})
    assert defaults == SamplingDefaults()
    assert remark.startswith(f"generation_config.json: {key} ")
    assert "is ignored: expected " in remark
    assert len(remark) < 200
    assert "\n" not in remark


def test_what_would_change_the_text_and_is_not_followed_is_named_with_its_value() -> None:
    asked = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "typical_p": 0.9,
        "suppress_tokens": [1, 2],
        "forced_bos_token_id": 0,
        "bad_words_ids": [[3]],
        "stop_strings": ["\x1b[31m", "END"],
        "remove_invalid_values": True,
        "max_length": 30,
        "min_new_tokens": 3,
    }
    defaults, (remark,) = read(**asked)
    assert defaults == SamplingDefaults()
    assert remark.startswith("generation_config.json: not supported, and not followed: ")
    for key, value in asked.items():
        assert f"{key} {json.dumps(value)}" in remark
    assert "\x1b" not in remark


def test_every_key_of_transformers_is_taken_named_or_known_to_change_nothing() -> None:
    """So that a new one is noticed, instead of being left out without a word."""
    from transformers import GenerationConfig

    taken = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "do_sample"}
    read_elsewhere = {"eos_token_id", "max_length"}
    without_effect = {
        # Only beams and groups of beams, which are named, read these.
        *("early_stopping", "length_penalty", "low_memory", "renormalize_logits"),
        # How, not what, is computed; what is handed back beside the text; ids that a decoder's answer never has.
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight"),
    }
    known = taken | read_elsewhere | without_effect | set(_NOT_FOLLOWED)
    theirs = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
    assert theirs <= known, theirs - known


# ---- In a directory ---------------------------------------------------------------------------------


def test_without_the_file_config_json_is_asked_as_in_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", repetition_penalty=1.3, num_beams=2)
    found = checkpoint.validate(path)
    assert found.sampling == SamplingDefaults(repetition_penalty=1.3)
    assert found.remarks == ("config.json: not supported, and not followed: num_beams 2",)
    (path / "generation_config.json").write_text("{}")
    found = checkpoint.validate(path)
    assert (found.sampling, found.remarks) == (SamplingDefaults(), ())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_what_transformers_cannot_read_is_refused_at_once(name: str, encoding: str, tmp_path: Path) -> None:
    """json takes a byte order mark and UTF-16; whoever loads the model later does not."""
    path = make_model(tmp_path / "m")
    text = (path / name).read_text() if (path / name).exists() else "{}"
    (path / name).write_text(text, encoding=encoding)
    with pytest.raises(IncompatibleError, match=f"{name} is not JSON"):
        checkpoint.validate(path)


def test_a_huge_file_is_not_read_into_memory(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    with (path / "generation_config.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(IncompatibleError, match=r"generation_config\.json has 1,099,511,627,776 bytes"):
        checkpoint.validate(path)


# ---- End tokens -------------------------------------------------------------------------------------


def with_tokenizer(path: Path, tokenizer: dict[str, Any], config: object, **changes: Any) -> checkpoint.ModelConfig:
    make_model(path, **changes)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": config}))
    return checkpoint.validate(path)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 6, "content": "<unk>"}, {"id": 7, "content": "<|im_end|>"}]},
        {"model": {"type": "BPE", "vocab": {"a": 0, "<|im_end|>": 7}}},
        {"model": {"type": "Unigram", "vocab": [[str(piece), 0.0] for piece in range(7)] + [["<|im_end|>", 0.0]]}},
    ],
)
@pytest.mark.parametrize("named", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_an_end_token_that_only_the_tokenizer_names(tokenizer: dict[str, Any], named: object, tmp_path: Path) -> None:
    assert with_tokenizer(tmp_path / "a", tokenizer, named).eos_token_ids == (2, 7)
    assert with_tokenizer(tmp_path / "b", tokenizer, named, eos_token_id=None).eos_token_ids == (7,)
    assert with_tokenizer(tmp_path / "c", tokenizer, named, eos_token_id=[7, 2]).eos_token_ids == (7, 2)
    assert with_tokenizer(tmp_path / "d", tokenizer, "nowhere").eos_token_ids == (2,)


def test_an_older_tokenizer_names_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"</s>": 5}}}')
    (path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert checkpoint.validate(path).eos_token_ids == (2, 5)


def test_the_id_is_the_one_that_transformers_finds(tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    ids = checkpoint.read_config(tiny_dir).eos_token_ids
    assert ids == (AutoTokenizer.from_pretrained(tiny_dir, trust_remote_code=False).eos_token_id,)


@pytest.mark.parametrize(
    ("eos", "kept", "dropped"),
    [
        ([2, 32, -1], (2,), ["32", "-1"]),
        (40_000, (), ["40000"]),
        (-1, (), ["-1"]),
        (10**30, (), ["1" + "0" * 30]),
        ([31, 31], (31,), []),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_outside_the_vocabulary_are_dropped_by_name(
    file: str, eos: Any, kept: tuple[int, ...], dropped: list[str], tmp_path: Path
) -> None:
    path = make_model(tmp_path / "m", **({"eos_token_id": eos} if file == "config.json" else {}))
    if file != "config.json":
        (path / file).write_text(json.dumps({"eos_token_id": eos}))
    found = checkpoint.validate(path)
    assert found.eos_token_ids == kept
    assert list(found.remarks) == [
        f"{file}: eos_token_id {one} is ignored: the vocabulary has ids 0 to 31" for one in dropped
    ]


def test_an_end_token_of_the_tokenizer_outside_the_vocabulary_is_dropped_by_name(tmp_path: Path) -> None:
    found = with_tokenizer(tmp_path / "m", {"added_tokens": [{"id": 32, "content": "</s>"}]}, "</s>")
    assert found.eos_token_ids == (2,)
    assert found.remarks == (
        "tokenizer.json: the end token '</s>' has id 32, which is ignored: the vocabulary has ids 0 to 31",
    )


@pytest.mark.parametrize("eos", ["x", 2.0, True, [True], [[2]], {}])
def test_end_tokens_that_are_no_numbers_are_refused(eos: Any, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(IncompatibleError, match="eos_token_id is"):
        checkpoint.validate(path)
