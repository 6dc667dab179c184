"""What a cluster was started with, loaded once more: the weights for a daemon, the tokenizer for the router.

A cluster serves what its files were at `pdctl up`. Whoever loads later compares, and refuses files that are not the
same. Knows the cluster's specification, not its processes. Called by zygote, daemon and router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdctl.core.cluster import command
from pdctl.core.config import ClusterSpec
from pdctl.core.weights.fingerprint import ChangedFileError, check_tokenizer

if TYPE_CHECKING:
    from pdctl.core.model import Model
    from pdctl.core.tokenizer import Tokenizer


def load_model(spec: ClusterSpec, progress: Callable[[int, int], None] | None = None) -> Model:
    """The weights, as they were when the cluster was started.

    Raises:
        ChangedFileError: they are not the same any more; the message names the file, the hint the ways out.
        PdctlError: they cannot be loaded.
    """
    from pdctl.core.model import load
    from pdctl.core.numerics import numerics

    with _with_remedy(spec):
        return load(spec.model_path, numerics(spec.dtype), progress, spec.model_files)


def load_tokenizer(spec: ClusterSpec) -> Tokenizer:
    """The tokenizer and its chat template, as they were when the cluster was started.

    Raises:
        ChangedFileError: they are not the same any more; the message names the file, the hint the ways out.
        PdctlError: they cannot be loaded.
    """
    from pdctl.core.tokenizer import Tokenizer

    with _with_remedy(spec):
        # Twice: see `model.load`.
        check_tokenizer(spec.model_path, spec.model_files)
        tokenizer = Tokenizer.load(spec.model_path)
        check_tokenizer(spec.model_path, spec.model_files)
        return tokenizer


@contextmanager
def _with_remedy(spec: ClusterSpec) -> Iterator[None]:
    try:
        yield
    except ChangedFileError as error:
        down, up = (command(verb, spec.name, spec.state_dir) for verb in ("down", "up"))
        error.hint = f"put the file back; or serve what is there now: {down} && {up}"
        raise
