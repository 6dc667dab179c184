"""Reading a request's body: its kind, its size, its deadline.

Knows nothing of what is in it; called by api.py.
"""

from __future__ import annotations

import asyncio

from fastapi import Request

from pdctl.core.api_errors import ApiError
from pdctl.core.server.held_bytes import Held

MAX_BODY_BYTES = 8 << 20
# Of all bodies and prompts that the router holds at one time.
MAX_HELD_BYTES = 256 << 20
BODY_TIMEOUT_S = 60.0


async def read_body(http: Request, held: Held) -> bytearray:
    """All of it, counted in `held` as it comes.

    Raises:
        ApiError: it is not JSON, too large, or too slow.
    """
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content type {kind or '(none)'}: expected application/json")
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in http.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                held.set(len(body))
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    return body
