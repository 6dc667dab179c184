"""Values of a results document, each with its place in it: whatever does not fit is named.

A document comes from a file that somebody may have cut off, edited or sent: nothing in it is trusted, neither types
nor sizes nor what a text holds. A number that was not measured is None. Pure; called by report.py and its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pdctl.transport.errors import IncompatibleError

# Milliseconds of 30 years, bytes of a petabyte: nothing that is measured here is larger.
_LARGEST = 1e15
_LONGEST_TEXT = 2000


class Found:
    """A value somewhere in a document."""

    def __init__(self, value: Any, place: str) -> None:
        """place: for people; of a whole document, its file and a colon."""
        self.value = value
        self.place = place

    def __getitem__(self, key: str) -> Found:
        """What an object holds under a key; of a missing key, a missing value."""
        self._expect(dict, "an object")
        return Found(self.value.get(key), self._place_of(key))

    def __iter__(self) -> Iterator[Found]:
        """Values of a list."""
        self._expect(list, "a list")
        return (Found(value, f"{self.place}[{index}]") for index, value in enumerate(self.value))

    def items(self) -> Iterator[tuple[str, Found]]:
        """Keys, fit to be shown, and values of an object."""
        self._expect(dict, "an object")
        return ((printable(key), Found(value, self._place_of(key))) for key, value in self.value.items())

    @property
    def is_missing(self) -> bool:
        return self.value is None

    def number(self) -> float | None:
        """None: it was not measured."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._misfit("a number")
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return None
        if abs(self.value) > _LARGEST:
            raise IncompatibleError(f"{self.place}: expected a number of at most {_LARGEST:g}")
        return float(self.value)

    def measured(self) -> float:
        """A number that must be there."""
        number = self.number()
        if number is None:
            raise self._misfit("a number")
        return number

    def count(self) -> int:
        """A number that must be there, and whole."""
        number = self.measured()
        if number != int(number) or number < 0:
            raise self._misfit("a whole number")
        return int(number)

    def flag(self) -> bool:
        self._expect(bool, "true or false")
        return bool(self.value)

    def text(self) -> str:
        """Fit to be shown; must be there."""
        self._expect(str, "a text")
        return printable(self.value)

    def shown(self) -> str:
        """Whatever it is, in words."""
        if self.value is None:
            return "none"
        if isinstance(self.value, str):
            return printable(self.value)
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        if isinstance(self.value, int | float):
            number = self.number()
            return "n/a" if number is None else f"{number:.10g}"
        if isinstance(self.value, list):
            return ", ".join(one.shown() for one in self)
        return "; ".join(f"{key.replace('_', ' ')}: {one.shown()}" for key, one in self.items()) or "none"

    def _place_of(self, key: str) -> str:
        between = " " if self.place.endswith(":") else "."
        return f"{self.place}{between}{printable(key, 60)}"

    def _expect(self, kind: type, words: str) -> None:
        if not isinstance(self.value, kind):
            raise self._misfit(words)

    def _misfit(self, words: str) -> IncompatibleError:
        found = "nothing" if self.value is None else repr(self.value)
        return IncompatibleError(f"{self.place}: expected {words}, found {printable(found, 60)}")


def printable(text: str, length: int = _LONGEST_TEXT) -> str:
    """A foreign text that does nothing but be read: no control, no surrogate, no change of direction; bounded."""
    head = "".join(
        one if one.isprintable() else " " if one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text[:length]
    )
    return head + "…" if len(text) > length else head
