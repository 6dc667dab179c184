"""JSON of an object whose lists come piece by piece: encoded as it comes, so that the whole is never built at once.

Knows nothing of what is in the lists; used by answer.py for answers of many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdctl.core.api_errors import encode

_Part = list[str]


class JoinedLists:
    """An object of lists, each joined from those of all pieces; what is no list is as the last piece has it."""

    def __init__(self) -> None:
        self._lists: dict[str, _Part] = {}
        self._others: dict[str, object] = {}

    def add(self, piece: Mapping[str, object]) -> None:
        for name, value in piece.items():
            if isinstance(value, list):
                parts = self._lists.setdefault(name, [])
                if value:
                    parts.append(encode(value)[1:-1])
            else:
                self._others[name] = value

    def parts(self) -> Iterator[str]:
        """The object's text. All its names are known after the first piece, even of empty lists."""
        comma = "{"
        for name, parts in self._lists.items():
            yield f"{comma}{encode(name)}:["
            for number, part in enumerate(parts):
                yield "," + part if number else part
            yield "]"
            comma = ","
        for name, value in self._others.items():
            yield f"{comma}{encode(name)}:{encode(value)}"
            comma = ","
        yield "{}" if comma == "{" else "}"
