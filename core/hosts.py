"""By which names a server may be called: the check of the Host header against DNS rebinding.

A web page of a stranger can give its own name our address, and have the visitor's browser send us requests that
its author could not send. What it cannot do is have the browser call us by another name than its own. Knows
nothing of HTTP beyond that header; light, for `pdctl up` asks it about --host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from pdctl.transport.errors import UsageError

_HEADER = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::[0-9]{0,5})?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host_name(text: str) -> str:
    """`text` as `Hosts` compares it: a name or an address, without a port.

    Raises:
        UsageError: it is neither.
    """
    name = _normal(text.strip().lower())
    if _address(name) is None and not (_NAME.fullmatch(name) and len(name) <= 253):
        raise UsageError(
            f"--allowed-host {text}: expected a name or an address as in a URL, without scheme and port",
            hint="--allowed-host llm.example.org",
        )
    return name


class Hosts:
    """What a Host header may say.

    Served on loopback, only names that cannot lead anywhere else, and those that were allowed. Served beyond, the
    machine's names are not known: any, unless some were allowed; then those, and addresses, which no one can give
    away.
    """

    def __init__(self, bind: str, allowed: Iterable[str] = ()) -> None:
        given = frozenset(map(check_host_name, allowed))
        self._names = given | {"localhost", "127.0.0.1", "::1", _normal(bind.lower())}
        self._any_address = not is_loopback(bind)
        self._any = self._any_address and not given

    def admits(self, headers: Iterable[bytes]) -> bool:
        """Whether a request with these Host headers may come in: exactly one, of a name that we go by."""
        if self._any:
            return True
        found = [_HEADER.fullmatch(header.decode("latin-1").strip().lower()) for header in headers]
        if len(found) != 1 or found[0] is None:
            return False
        name = _normal(found[0][1])
        return name in self._names or (self._any_address and _address(name) is not None)


def _normal(name: str) -> str:
    """One form for one name: no brackets, no final dot, addresses as short as can be."""
    name = name.removeprefix("[").removesuffix("]").removesuffix(".")
    return _address(name) or name


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
