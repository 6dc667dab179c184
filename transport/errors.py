"""Every error a person can see: what it names, the exit code it ends in, and what to run next.

Raised by all layers; turned into one line on stderr by `pdctl.cli.main`.
"""

from __future__ import annotations


class PdctlError(Exception):
    """Something the user can act on.

    Args:
        message: one line that names the thing, what was found and what was expected.
        hint: the next command to run, or the setting to change.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PdctlError):
    """A value the user gave is not usable."""

    exit_code = 2


class NotFoundError(PdctlError):
    """Nothing by that name is running or stored."""

    exit_code = 3


class IncompatibleError(PdctlError):
    """Two things that must agree do not: a model pdctl cannot serve, a segment of another layout or geometry."""

    exit_code = 4


class OtherSegmentError(IncompatibleError):
    """A cluster's segment was made by another version, or for another model, than wants to work in it."""


class CapacityError(PdctlError):
    """Memory, /dev/shm, disk or the pool is too small."""

    exit_code = 5


class NoRoomError(CapacityError):
    """A segment does not fit.

    Attributes:
        fitting_blocks: a pool of so many blocks would; 0: none would.
    """

    def __init__(self, message: str, *, fitting_blocks: int) -> None:
        super().__init__(message)
        self.fitting_blocks = fitting_blocks


class DeadlineError(PdctlError):
    """A wait ended without its condition."""

    exit_code = 6


class AlreadyRunningError(PdctlError):
    """The cluster's name or address is taken."""

    exit_code = 7


class CorruptSegmentError(PdctlError):
    """A segment's content contradicts itself."""

    exit_code = 4
