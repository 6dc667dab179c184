"""A bound on what all requests together hold in the router's memory: their bodies, then the ids of their prompts.

Knows nothing of requests; used by body.py while a body comes in, and by whoever has the request from then on.
"""

from __future__ import annotations

from pdctl.core.api_errors import ApiError


class HeldBytes:
    """The memory that there is for requests.

    Attributes:
        taken: of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0


class Held:
    """One request's part of it."""

    def __init__(self, whole: HeldBytes) -> None:
        self._whole = whole
        self._taken = 0

    def set(self, number: int) -> None:
        """Hold so many bytes from now on, not as many as before.

        Raises:
            ApiError: all requests together would hold more than they may.
        """
        self._whole.taken += number - self._taken
        self._taken = number
        if self._whole.taken > self._whole.limit:
            message = f"more than {self._whole.limit} bytes of requests are on their way in"
            raise ApiError(503, message, code="too_many_bodies", retry_after_s=1)

    def release(self) -> None:
        self._whole.taken -= self._taken
        self._taken = 0
