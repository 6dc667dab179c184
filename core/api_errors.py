"""Errors as clients of the HTTP interface see them: OpenAI's error object, for whoever has to refuse.

Knows no routes and no requests; used by api.py, by gate.py before it and by connection.py below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

encode = json.JSONEncoder(separators=(",", ":")).encode

_ERROR_TYPES = {
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal or failure as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def values(self) -> dict[str, object]:
        """What it can be made of again, in another process; without headers."""
        return {"status": self.status, "message": self.message, "param": self.param, "code": self.code}

    def body(self) -> dict[str, object]:
        return error_body(self.status, self.message, param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, media_type="application/json")
