"""Prompts to token ids, with bounds that keep this work in proportion: what can be no prompt is not tokenized.

Knows what a prompt is, not what it came in; called by api.py, in the router or in a reader's process.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pdctl.core.api_errors import ApiError
from pdctl.core.tokenizer import PromptError, Tokenizer

Ids: TypeAlias = "array[int]"


class PromptReader:
    """One model's.

    Args:
        max_context: tokens that a row holds, prompt and answer together.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._max_chars = max_context * tokenizer.longest_token_chars

    def warm_up(self) -> None:
        """Have all that is made at first use: templates are compiled, modules imported."""
        self._tokenizer.encode("warm")
        try:
            self._tokenizer.encode_chat([{"role": "user", "content": "warm"}])
        except PromptError:
            pass  # no template, or one that has something to say to that

    def read_prompts(self, prompts: Sequence[str | list[int]]) -> list[Ids]:
        """The ids of a completion's prompts, none empty and none outside the vocabulary.

        Raises:
            ApiError: names what is wrong with one of them.
        """
        return [self._read(prompt) for prompt in prompts]

    def read_chat(self, messages: Sequence[Mapping[str, str]]) -> list[Ids]:
        """The ids of a chat, in the same form."""
        self._check_length("messages", sum(len(one["content"]) + len(one.get("name", "")) for one in messages))
        try:
            return [self._checked("messages", self._tokenizer.encode_chat(messages))]
        except PromptError as error:
            raise _refusal("messages", str(error)) from None

    def _read(self, prompt: str | list[int]) -> Ids:
        if not isinstance(prompt, str):
            return self._checked("prompt", prompt)
        self._check_length("prompt", len(prompt))
        try:
            return self._checked("prompt", self._tokenizer.encode(prompt))
        except PromptError as error:
            raise _refusal("prompt", str(error)) from None

    def _check_length(self, param: str, num_chars: int) -> None:
        """Whether so many characters could be few enough tokens, if each were the longest that there is."""
        if num_chars > self._max_chars:
            raise ApiError(
                400,
                f"this model's context is {self._max_context} tokens, and no token has more than "
                f"{self._tokenizer.longest_token_chars} characters: the {param} may have {self._max_chars}, "
                f"not {num_chars}",
                param=param,
                code="context_length_exceeded",
            )

    def _checked(self, param: str, ids: list[int]) -> Ids:
        if not ids:
            raise _refusal(param, "has no tokens")
        if not (min(ids) >= 0 and max(ids) < self._vocab_size):
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise outside_vocabulary(param, bad, self._vocab_size)
        return array("I", ids)


def outside_vocabulary(param: str, token: int, vocab_size: int) -> ApiError:
    return _refusal(param, f"token id {str(token)[:40]} is not one of 0 to {vocab_size - 1}")


def _refusal(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
