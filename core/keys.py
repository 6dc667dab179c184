"""The API key: where it comes from, and how one that a client sends is compared with it.

Never taken from a command line, which every user of the machine can read, and never shown: only `reveal` gives
the text, to the cluster's own files (mode 0600) and to the request that needs it. Knows nothing of HTTP.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from pathlib import Path

from pdctl.transport.errors import UsageError

KEY_VARIABLE = "PDCTL_API_KEY"
_MAX_KEY_CHARS = 512
# What an Authorization header can carry without doubt about its ends.
_KEY = re.compile(rf"[!-~]{{1,{_MAX_KEY_CHARS}}}")
_MAKE_ONE = "(umask 077; openssl rand -hex 32 > FILE), then --api-key-file FILE"


class ApiKey:
    """A key that does not show itself: not in a repr, a log line or a JSON of whatever holds it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def matches(self, given: bytes) -> bool:
        """Whether a client's key is this one; how long it takes does not tell how much of it is right."""
        return hmac.compare_digest(given, self._text.encode())

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "ApiKey(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKey) and self.matches(other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)


def parse_key(text: str, source: str) -> ApiKey:
    """A key as somebody wrote it down; spaces and line ends around it do not count.

    Args:
        source: where it was found, for the message.

    Raises:
        UsageError: it is empty, too long, or has characters that a header cannot carry. Says nothing of its text.
    """
    text = text.strip()
    if not text:
        raise UsageError(f"{source}: is empty; expected an API key", hint=_MAKE_ONE)
    if not _KEY.fullmatch(text):
        raise UsageError(
            f"{source}: expected one API key of 1 to {_MAX_KEY_CHARS} visible ASCII characters, without spaces",
            hint=_MAKE_ONE,
        )
    return ApiKey(text)


def given_key(file: Path | None) -> ApiKey | None:
    """The key that a person gave: in `file`, else in $PDCTL_API_KEY; None if in neither.

    Raises:
        UsageError: the file cannot be read, or what was given is no key. Set but empty is an error: whoever
            wrote `PDCTL_API_KEY=$KEY` does not want to serve without one.
    """
    if file is not None:
        source = f"--api-key-file {file}"
        try:
            with file.open("rb") as opened:
                text = opened.read(16 * _MAX_KEY_CHARS)
        except OSError as error:
            raise UsageError(f"{source}: {error.strerror}", hint=_MAKE_ONE) from error
        return parse_key(text.decode(errors="replace"), source)
    if (given := os.environ.get(KEY_VARIABLE)) is not None:
        return parse_key(given, KEY_VARIABLE)
    return None


def others_can_read(file: Path) -> bool:
    try:
        return bool(stat.S_IMODE(file.stat().st_mode) & 0o077)
    except OSError:
        return False
