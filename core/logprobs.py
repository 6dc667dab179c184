"""Log-probabilities in OpenAI's two shapes: lists side by side in completions, a list of objects in chats.

A token that is not whole characters by itself is shown as `bytes:\\xe2\\x9c`, as OpenAI's completions do: two
different halves of characters never look the same. Knows nothing of rows; called by api.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.core.tokenizer import Tokenizer
from pdctl.transport.rows import TokenLogprobs

# JSON has no infinity: OpenAI's stand-in for a probability of zero.
_LOWEST = -9999.0


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], text_offsets: Sequence[int]
) -> dict[str, object]:
    """The object of a completion's choice, or of one chunk of it: chunks join to the whole, list by list."""
    return {
        "tokens": [_shown(tokenizer, one.token) for one in logprobs],
        "token_logprobs": [_number(one.logprob) for one in logprobs],
        # The sampled token is always there, which may make one more than was asked for.
        "top_logprobs": [
            {_shown(tokenizer, token): _number(value) for token, value in (*one.top, (one.token, one.logprob))}
            for one in logprobs
        ],
        "text_offset": list(text_offsets),
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
    """The object of a chat's choice, or of one chunk of it."""
    content = []
    for one in logprobs:
        top = [_entry(tokenizer, token, value) for token, value in one.top]
        content.append(_entry(tokenizer, one.token, one.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": _shown(tokenizer, token),
        "logprob": _number(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _shown(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)
