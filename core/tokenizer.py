"""A model's tokenizer, as the router needs it: text and chats to ids, ids to text.

A thin layer over transformers, without torch (the router blocks that import, see router.py). Ids are what
transformers gives, never touched: a completion gets the tokenizer's own special tokens, a chat those that its
template writes and no others. Knows nothing of HTTP; errors carry the words to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pdctl.core.checkpoint import first_line
from pdctl.core.detokenizer import IncrementalDetokenizer, byte_token_ids
from pdctl.transport.errors import IncompatibleError


class PromptError(Exception):
    """The client's text or chat cannot be turned into tokens; says why."""


class Tokenizer:
    """Wraps a transformers tokenizer. Its methods may be called from several threads."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._byte_ids = byte_token_ids(inner.get_vocab()) if _falls_back_to_bytes(inner) else frozenset()
        self._added = {token: str(added.content) for token, added in inner.added_tokens_decoder.items()}
        self._special_ids = frozenset(inner.all_special_ids) | {
            token for token, added in inner.added_tokens_decoder.items() if added.special
        }
        self._byte_of = _byte_alphabet() if _decoder_has(inner, b"ByteLevel") else {}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a model directory; nothing is fetched and no code of the model runs.

        Raises:
            IncompatibleError: there is none that transformers can read; says why.
        """
        from transformers import AutoTokenizer

        try:
            inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise IncompatibleError(f"tokenizer of {path}: {reason}", hint="another --model") from error
        return cls(inner)

    def __len__(self) -> int:
        return len(self._inner)

    @cached_property
    def longest_token_chars(self) -> int:
        """Of all tokens: no text of so many tokens is longer than so many times this."""
        return max(map(len, (*self._inner.get_vocab(), *self._added.values())))

    @property
    def end_token_id(self) -> int | None:
        """The token that ends a text; its class may have one that no file names. None: there is none."""
        token = self._inner.eos_token_id
        return token if isinstance(token, int) else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """The ids of a completion's prompt, with the special tokens that the tokenizer adds itself."""
        try:
            # verbose: no warning about lengths, the router says what is too long.
            return list(self._inner(text, verbose=False).input_ids)
        except (TypeError, ValueError, UnicodeError) as error:
            raise PromptError(f"cannot be tokenized: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a chat, up to where the assistant's answer begins.

        Raises:
            PromptError: there is no template, or it refuses; in its own words.
        """
        if not self.has_chat_template:
            raise PromptError("this model has no chat template: use /v1/completions")
        try:
            ids = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # whatever a template's code raises is the template's answer
            raise PromptError(f"the chat template refuses: {error}") from error
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        """The reference: all ids at once, special tokens skipped, spaces left alone."""
        return str(self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself: perhaps half a character. Nothing for an id without a token."""
        piece = self._inner.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._byte_ids:
            return bytes.fromhex(piece[3:5])
        if token in self._added:
            return self._added[token].encode()
        if self._byte_of and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        return str(piece).replace("▁", " ").encode()

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.decode, self._byte_ids, self._special_ids)


def _falls_back_to_bytes(inner: Any) -> bool:
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return True
    return _decoder_has(inner, b"ByteFallback")


def _decoder_has(inner: Any, part: bytes) -> bool:
    backend = getattr(inner, "backend_tokenizer", None)
    return backend is not None and backend.decoder is not None and part in backend.decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (GPT-2's `bytes_to_unicode`, read backwards)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
