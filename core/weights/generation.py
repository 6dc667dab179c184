"""What generation_config.json asks for: what of it requests get by default, and what of it pdctl does not follow.

Taken is what vLLM takes (--generation-config auto), and `do_sample: false` as transformers understands it. What
transformers' `generate` would follow beyond that is named for `pdctl up` to tell, never dropped in silence; and so
is a value that makes no sense. Knows the file's content only: no directories, no torch. Called by checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a request that does not say gets.

    Attributes:
        top_k, top_p, min_p: 0, 1 and 0 switch the filters off.
        max_tokens: output tokens; None: what there is room for (chats), or OpenAI's 16 (completions), which this
            may lower and not raise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


# Their bounds are those of requests, but for the temperature: no request may ask for more than OpenAI's 2.
_NUMBERS: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
_MAX_INT: Final = (1 << 31) - 1

# What would change a text if it were followed, and the values that ask for nothing.
_NOT_FOLLOWED: Final[dict[str, tuple[object, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
# The default of transformers 4, which some of its versions wrote out.
_UNSAID_MAX_LENGTH: Final = 20


def read_generation(
    raw: Mapping[str, Any], file_name: str, max_context: int
) -> tuple[SamplingDefaults, tuple[str, ...]]:
    """Reads a generation configuration.

    Args:
        raw: its content; null means absent everywhere.
        file_name: for the remarks.
        max_context: tokens that a request can have at most.

    Returns:
        The defaults, and a line for people about each thing that is there and not followed.
    """
    given = {key: value for key, value in raw.items() if value is not None}
    remarks: list[str] = []

    def drop(key: str, expected: str) -> None:
        remarks.append(f"{file_name}: {key} {_short(given[key])} is ignored: expected {expected}")

    values: dict[str, Any] = {}
    for key, (low, high) in _NUMBERS.items():
        if key not in given:
            continue
        if _is_number(given[key]) and low <= given[key] <= high:
            values[key] = float(given[key])
        else:
            drop(key, f"a number from {low:g} to {high:g}")
    if "top_k" in given:
        if _is_int(given["top_k"]) and -1 <= given["top_k"] <= _MAX_INT:
            values["top_k"] = max(0, given["top_k"])  # vLLM writes "all" as -1
        else:
            drop("top_k", f"an integer from -1 to {_MAX_INT}")
    if "max_new_tokens" in given:
        if _is_int(given["max_new_tokens"]) and 1 <= given["max_new_tokens"] <= _MAX_INT:
            values["max_tokens"] = given["max_new_tokens"]
        else:
            drop("max_new_tokens", f"an integer from 1 to {_MAX_INT}")
    do_sample = given.get("do_sample", True)
    if not isinstance(do_sample, bool):
        drop("do_sample", "true or false")
    elif not do_sample:
        # top_k, top_p and min_p stay: they are for a request that asks for a temperature.
        if values.get("temperature", 0.0) > 0.0:
            remarks.append(
                f"{file_name}: temperature {_short(given['temperature'])} is ignored: do_sample is false, so that "
                "requests without a temperature of their own are greedy"
            )
        values["temperature"] = 0.0

    left = [key for key in sorted(_NOT_FOLLOWED) if key in given and not _is_one_of(given[key], _NOT_FOLLOWED[key])]
    max_length = given.get("max_length", _UNSAID_MAX_LENGTH)
    if "max_new_tokens" not in given and not (
        _is_number(max_length) and (max_length == _UNSAID_MAX_LENGTH or max_length >= max_context)
    ):
        left.append("max_length")
    if left:
        shown = ", ".join(f"{key} {_short(given[key])}" for key in left)
        remarks.append(f"{file_name}: not supported, and not followed: {shown}")
    return SamplingDefaults(**values), tuple(remarks)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    """A value as JSON has it, on one line and in plain letters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
