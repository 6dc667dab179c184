"""Text out of tokens as they come, and where a stop string cuts it.

The reference is the decoding of all ids at once; what is handed out piece by piece joins to exactly that, and
no piece ends in half a character. Knows nothing of rows or HTTP; called by the router, once per choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Re-decoding starts over from a recent character boundary once the window is this long.
_LONGEST_WINDOW = 24
# Tokens kept in a shortened window: context for tokenizers whose first piece decodes differently.
_KEPT_TOKENS = 4


def byte_token_ids(vocab: dict[str, int]) -> frozenset[int]:
    """The ids that stand for one byte each (`<0x0A>`), as SentencePiece vocabularies have them.

    Their runs decode all or nothing: one bad byte turns the whole run into replacement characters.
    """
    return frozenset(token for piece, token in vocab.items() if _BYTE_TOKEN.fullmatch(piece))


class IncrementalDetokenizer:
    """Decodes a window of the last tokens instead of all of them: the cost per token does not grow.

    The window begins at a character boundary (its own text is the end of the longer text, and starts with a
    whole character), so what is decoded from there on is what the reference has there, including the spaces
    that SentencePiece drops only from the very first piece.

    Args:
        decode: ids -> text, special tokens skipped, spaces not cleaned up.
        byte_ids: see `byte_token_ids`; empty for tokenizers whose text is bytes all through, where an
            unfinished character decodes to one replacement character at the end.
        skipped_ids: special tokens, which `decode` does not see: they do not end a run of bytes.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_ids: frozenset[int] = frozenset(),
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._skipped_ids = skipped_ids
        self._in_byte_run = False
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text already handed out
        self._shorten_at = _LONGEST_WINDOW

    def push(self, ids: Sequence[int]) -> str:
        """Take tokens; returns the text that is certain now."""
        self._window.extend(ids)
        if self._byte_ids:
            for token in ids:
                if token not in self._skipped_ids:
                    self._in_byte_run = token in self._byte_ids
            if self._in_byte_run:
                return ""
        text = self._decode(self._window)
        end = len(text)
        if not self._byte_ids and text.endswith(REPLACEMENT):
            end -= 1
        delta = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._window) >= self._shorten_at:
            self._shorten(text)
        return delta

    def flush(self) -> str:
        """No more tokens come; returns what was held back, half characters included."""
        delta = self._decode(self._window)[self._emitted :] if self._window else ""
        self._window.clear()
        self._emitted = 0
        return delta

    def _shorten(self, text: str) -> None:
        held = len(text) - self._emitted
        for kept in range(_KEPT_TOKENS, min(2 * _KEPT_TOKENS, len(self._window))):
            window = self._window[-kept:]
            tail = self._decode(window)
            if len(tail) <= held or not text.endswith(tail):
                continue
            # A first character that is whole starts a character in the longer text as well. Half a one does if what
            # is before it decodes as it did with it: nothing there waits for more bytes, be that text all rubbish.
            if tail[0] != REPLACEMENT or self._decode(self._window[:-kept]) + tail == text:
                self._window = window
                self._emitted = len(tail) - held
                self._shorten_at = _LONGEST_WINDOW
                return
        self._shorten_at = 2 * len(self._window)


class StopChecker:
    """Cuts text before the first occurrence of any stop string, however it is spread over pieces.

    Of occurrences that overlap, the one that begins first wins, whatever the order of `stops` and however
    the text is cut into tokens; the end of a later one is therefore not yet the end while an earlier one may
    still be completed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._exempt = 0  # characters held that no stop string may end in
        self.stopped = False

    def push(self, delta: str, *, exempt: bool = False) -> tuple[str, bool]:
        """Take text; returns the text that can be shown, and whether a stop string ended it.

        Args:
            exempt: a stop string that is complete by now is text. One that only begins here still counts.
        """
        if not self._stops or self.stopped:
            return ("" if self.stopped else delta), self.stopped
        text = self._held + delta
        if exempt:
            self._exempt = len(text)
        hit = self._first_hit(text)
        begun = self._possible_start(text)
        if hit >= 0 and hit <= begun:
            self._held, self.stopped = "", True
            return text[:hit], True
        self._held, self._exempt = text[begun:], max(0, self._exempt - begun)
        return text[:begun], False

    def flush(self) -> tuple[str, bool]:
        """No more text comes: a stop string that was only begun is plain text, a complete one cuts."""
        hit = self._first_hit(self._held)
        rest, self._held = self._held[: hit if hit >= 0 else None], ""
        self.stopped = self.stopped or hit >= 0
        return rest, self.stopped

    def _first_hit(self, text: str) -> int:
        """Where the first complete stop string stands that counts; -1: there is none."""
        found = [text.find(stop, max(0, self._exempt - len(stop) + 1)) for stop in self._stops]
        return min((at for at in found if at >= 0), default=-1)

    def _possible_start(self, text: str) -> int:
        """Where the earliest unfinished beginning of a stop string stands; the text's length if nowhere."""
        earliest = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while at >= 0:
                if stop.startswith(text[at:]):
                    earliest = at
                    break
                at = text.find(stop[0], at + 1, earliest)
        return earliest
