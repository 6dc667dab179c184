"""The token that ends a text, as the tokenizer's own files name it: read without transformers.

A checkpoint may name its end-of-turn token only there, so vLLM ends answers by it, beside those of
generation_config.json. transformers takes the token from tokenizer_config.json, else from special_tokens_map.json;
its id is that of tokenizer.json. (Else its class may have one: that only the router knows, which loads it.)
Knows the content of these files only. Called by checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def end_token(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> str | None:
    """The token that ends a text; None: these files name none."""
    for source in (tokenizer_config, special_tokens_map):
        if "eos_token" in source:
            token = source["eos_token"]
            if isinstance(token, Mapping):
                token = token.get("content")
            return token if isinstance(token, str) else None
    return None


def token_id(tokenizer: Mapping[str, Any], token: str) -> int | None:
    """The id of a token in tokenizer.json; None: it is not there."""
    added = tokenizer.get("added_tokens")
    for one in added if isinstance(added, list) else ():
        if isinstance(one, Mapping) and one.get("content") == token:
            return _as_id(one.get("id"))
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        return _as_id(vocab.get(token))
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...] in the order of their ids
        for at, one in enumerate(vocab):
            if isinstance(one, list) and one and one[0] == token:
                return at
    return None


def _as_id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
