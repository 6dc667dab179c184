"""What the supervisor hands to a process that it starts: the cluster's specification and its segment, by descriptor.

    supervisor: handed_over() -> --spec FILE --spec-fd 5 --segment NAME --segment-fd 6 -> router, zygote: receive()

Neither is looked up by its name again: files and names may have vanished since. On the command line both names stay,
to tell people and pdctl itself whose process this is. Daemons inherit the zygote's descriptors by fork.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdctl.core.config import ClusterSpec


@contextmanager
def handed_over(
    spec: ClusterSpec, spec_path: Path, segment: str, segment_fd: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Arguments for the new process, and the descriptors that it must inherit; both for the time of its start.

    Args:
        segment_fd: leads to the segment and holds no lock: `Mapping.door`.

    Raises:
        OSError: no descriptors or no memory are left.
    """
    fd = os.memfd_create("pdctl-spec", os.MFD_CLOEXEC)
    try:
        with open(fd, "w", closefd=False) as file:
            file.write(spec.to_json())
        names = ["--spec", str(spec_path), "--segment", segment]
        yield [*names, "--spec-fd", str(fd), "--segment-fd", str(segment_fd)], [fd, segment_fd]
    finally:
        os.close(fd)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", help="tells whose process this is")
    parser.add_argument("--spec-fd", type=int, required=True, help="the cluster's specification")
    parser.add_argument("--segment", help="tells which segment it works in")
    parser.add_argument("--segment-fd", type=int, required=True, help="leads to the segment")


def receive(given: argparse.Namespace) -> tuple[ClusterSpec, int]:
    """The specification, and a descriptor that leads to the segment.

    Raises:
        IncompatibleError: it is no specification.
    """
    with open(given.spec_fd) as file:
        file.seek(0)
        return ClusterSpec.from_json(file.read()), int(given.segment_fd)
