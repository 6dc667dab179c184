"""The gate before the HTTP interface: who may come in, decided before anything of a request is read.

Refuses by size of the head, Host header (hosts.py) and API key (keys.py). Closed unless opened: a route that is not
named here needs the key. Knows no model, row or route but the two that say whether we live.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from pdctl.core.api_errors import ApiError, json_response
from pdctl.core.connection import MAX_HEAD_BYTES
from pdctl.core.hosts import Hosts
from pdctl.core.keys import ApiKey

log = logging.getLogger(__name__)

# Load balancers ask these, and they say no more than whether daemons are there.
OPEN_PATHS = frozenset({"/health", "/health/ready"})


class Gate:
    """ASGI middleware.

    Args:
        hosts: None: any Host will do.
        key: None: everybody may come in.
    """

    def __init__(self, app: ASGIApp, *, hosts: Hosts | None, key: ApiKey | None) -> None:
        self._app = app
        self._hosts = hosts
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope)
        except ApiError as error:
            # Nothing of the request is shown: whoever is refused writes nothing into our logs.
            log.info("refused %s: %s", (scope.get("client") or ("?",))[0], error.code)
            await json_response(error.body(), error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        # The parser bounds a head that comes in pieces; one that is there at once it takes as it is.
        if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
            raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")
        hosts = [value for name, value in headers if name == b"host"]
        # HTTP/1.0 knows no Host, and probes speak it. A browser always sends one.
        probe = scope["path"] in OPEN_PATHS and not hosts
        if self._hosts is not None and not probe and not self._hosts.admits(hosts):
            raise ApiError(
                421,
                "this server does not go by the name in the Host header: call it localhost, by its address, or by a "
                "name that it was started with (--allowed-host)",
                code="host_not_allowed",
            )
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in headers if name == b"authorization"]
            scheme, _, key = given[0].strip().partition(b" ") if len(given) == 1 else (b"", b"", b"")
            if scheme.lower() != b"bearer" or not self._key.matches(key.strip()):
                said = "is not this server's" if given else "is missing"
                raise ApiError(
                    401,
                    f"the API key {said}: send the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
