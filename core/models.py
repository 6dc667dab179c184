"""Which model is meant, and which are stored: resolve what the user wrote, list and remove what the cache holds.

Does not know what is in a model directory (checkpoint.py) nor how the embedded model is made (pull.py); of
the Hugging Face hub it knows which files to ask for. Called by `pdctl up` and `pdctl models`.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdctl.core.checkpoint import (
    PLAIN_NAME,
    WEIGHTS,
    ModelConfig,
    first_line,
    indexed_shards,
    is_complete,
    read_config,
    unreadable,
    validate,
)
from pdctl.core.model_cache import (
    is_disk_full,
    make_temporary,
    models_dir,
    name_lock,
    parse_entry,
    temporaries,
    tree_bytes,
)
from pdctl.core.pull import EMBEDDED, Progress, pull
from pdctl.core.weights.fingerprint import SMALL_FILES
from pdctl.transport.errors import CapacityError, NotFoundError, PdctlError, UsageError


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model that passed `validate`: where it lies (absolute) and the name it is served under."""

    path: Path
    name: str
    config: ModelConfig


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """An entry of the cache. Not complete: a pull in progress, one that was killed, or damaged files."""

    name: str
    path: Path
    size_bytes: int
    complete: bool


# Which revision is the newest, and its small files: seconds on a slow line.
_HUB_DEADLINE_S: Final = 30.0
# Of a wait that takes longer people are told.
_SILENT_S: Final = 2.0
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def resolve(model: str, progress: Progress | None = None, allow_pull: bool = True) -> ResolvedModel:
    """Turns what the user wrote into a validated local directory.

    Args:
        model: "smollm2"; or a directory (anything that exists, or starts with "/", "." or "~"); or a Hugging
            Face id `org/name`. A directory called smollm2 is written "./smollm2".
        progress: told of downloads and of the conversion.
        allow_pull: whether the network may be used for a model that is not on this disk.

    Raises:
        UsageError: no such directory, or it cannot be read.
        NotFoundError: not on this disk and not fetched.
        IncompatibleError: a model pdctl cannot serve.
        CapacityError: the disk is too small for a pull.
    """
    if model == EMBEDDED.name:
        path = models_dir() / EMBEDDED.name
        if not is_complete(path):
            if not allow_pull:
                raise NotFoundError(
                    f"model {model} is not in {path.parent}", hint=f"pdctl models pull {EMBEDDED.name}"
                )
            path = pull(EMBEDDED.name, progress)
        return ResolvedModel(path=path, name=EMBEDDED.served_name, config=validate(path))

    local = _local_path(model)
    if local is not None:
        return ResolvedModel(path=local, name=local.name or str(local), config=validate(local))
    if _HUB_ID.fullmatch(model) and "--" not in model and ".." not in model:
        path = _hub_snapshot(model, progress, allow_pull)
        return ResolvedModel(path=path, name=model, config=validate(path))
    known = {name.lower(): EMBEDDED.name for name in (EMBEDDED.name, EMBEDDED.served_name)}
    meant = difflib.get_close_matches(model.lower(), known, n=1)
    raise UsageError(
        f"model {model!r} is neither {EMBEDDED.name!r}, nor an existing directory, nor a Hugging Face id (org/name)",
        hint=f"did you mean --model {known[meant[0]]}?" if meant else _neighbour(Path(model)) or "pdctl models list",
    )


def list_models() -> list[StoredModel]:
    """Returns every entry of the cache, by name; interrupted pulls are listed as not complete."""
    directory = models_dir()
    found = []
    try:
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise unreadable(directory, error) from error
    for path in entries:
        name, temporary = parse_entry(path.name)
        if not PLAIN_NAME.fullmatch(name) or not path.is_dir():
            continue
        complete = not temporary and is_complete(path)
        found.append(StoredModel(name=name, path=path, size_bytes=tree_bytes(path), complete=complete))
    return sorted(found, key=lambda model: (model.name, not model.complete))


def check_name(name: str) -> str:
    """The name, if a model can be stored under it.

    Raises:
        UsageError: it is a path, or not a name at all.
    """
    if not PLAIN_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not the name of a stored model: a name has no slashes", hint="pdctl models list"
        )
    return name


def remove(name: str) -> int:
    """Removes a stored model and what interrupted pulls of it left.

    Returns:
        The bytes given back.

    Raises:
        UsageError: the name is a path, or not a name at all.
        NotFoundError: nothing is stored under it.
        PdctlError: it is being pulled, or cannot be removed.
    """
    path = models_dir() / check_name(name)
    try:
        if not path.is_dir() and not temporaries(path):
            raise NotFoundError(f"model {name} is not in {path.parent}", hint="pdctl models list")
        with name_lock(path):
            # First the rename: whoever looks meanwhile sees all of the model or none of it.
            with contextlib.suppress(FileNotFoundError):
                path.rename(make_temporary(path) / name)
            size_bytes = 0
            for left in temporaries(path):
                size_bytes += tree_bytes(left)
                shutil.rmtree(left)
    except OSError as error:
        raise PdctlError(f"cannot remove {path}: {error.strerror or error}", hint=f"ls -ld {path}") from error
    return size_bytes


def _local_path(model: str) -> Path | None:
    """Returns the absolute directory that `model` means, or None when it is no path."""
    if not model:  # Path("") would be the current directory
        return None
    path = Path(model)
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        # "models/tiny" where there is a directory models: a mistyped path, and no hub's organisation.
        is_path = model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1
        if is_path or (model.count("/") == 1 and path.parent.is_dir()):
            raise UsageError(
                f"model directory {model} does not exist (looked for {path.absolute()})",
                hint=_neighbour(path) or f"ls -d {path.parent}",
            ) from error
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except (RuntimeError, ValueError) as error:  # an unknown ~user; a NUL byte
        raise UsageError(f"model {model!r}: {error}", hint="give a directory") from error
    if not stat.S_ISDIR(mode):
        raise UsageError(
            f"model {model} is a file; expected a directory with config.json, tokenizer.json and safetensors",
            hint=f"give the directory: {path.absolute().parent}",
        )
    return path.resolve()


def _neighbour(path: Path) -> str | None:
    """A hint at what is like it and beside it; None: nothing is."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except (OSError, ValueError):
        return None
    found = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean --model {path.parent / found[0]}/?" if found else None


# ---- Hugging Face ids ----------------------------------------------------------------------------


def _hub_snapshot(repo_id: str, progress: Progress | None, allow_download: bool) -> Path:
    """Returns the snapshot directory of a hub model, downloading what is missing.

    The small files come first, so that a model pdctl cannot serve is refused before its weights are fetched,
    and so that of the weights only the files named by the index are.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    local_only = constants.HF_HUB_OFFLINE or not allow_download

    def fetch(*weights: str, revision: str | None = None, local_only: bool = local_only) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=[*SMALL_FILES, *weights],
                local_files_only=local_only,
                tqdm_class=_reporting_tqdm(progress),
            )
        )

    def ask() -> Path:
        if not local_only:
            try:
                huggingface_hub.HfApi().repo_info(repo_id)
            except HfHubHTTPError:
                pass  # it answers: what it means is for `fetch` to say
            except Exception as error:
                raise _NoHubError(f"was not reached: {type(error).__name__}: {first_line(error)}") from error
        return fetch()

    silence: _NoHubError | None = None
    where = f"not (completely) in the Hugging Face cache {constants.HF_HUB_CACHE}"
    try:
        try:
            path = _within_deadline(ask, progress)
        except _NoHubError as error:
            silence, local_only = error, True
            path = fetch(local_only=True)
        read_config(path)
        # The snapshot's directory has the revision's name: the hub need not be asked again which one it is.
        path = fetch(WEIGHTS, *indexed_shards(path), revision=path.name, local_only=local_only)
        if silence is not None and progress is not None:
            progress("cached", 0, 0)
        return path
    except PdctlError:
        raise
    except LocalEntryNotFoundError as error:
        if silence is not None:
            raise NotFoundError(
                f"model {repo_id}: {where}, and the hub {constants.ENDPOINT} {silence}",
                hint=f"check the network and HF_ENDPOINT, or use the embedded model: --model {EMBEDDED.name}",
            ) from error
        if constants.HF_HUB_OFFLINE:
            raise NotFoundError(
                f"model {repo_id}: {where}, and HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, or set HF_HOME to the cache that has it",
            ) from error
        if local_only:
            raise NotFoundError(f"model {repo_id}: {where}", hint="allow it to be downloaded") from error
        cause = error.__cause__ or error
        raise NotFoundError(
            f"model {repo_id}: {where}, and the hub refuses it: {type(cause).__name__}: {first_line(cause)}",
            hint="check HF_ENDPOINT and HF_TOKEN, or try again later",
        ) from error
    except RepositoryNotFoundError as error:
        # Gated repositories come here too; the hub does not tell private from absent.
        raise NotFoundError(
            f"model {repo_id}: no such repository on the hub, or no access to it ({first_line(error)}); "
            f"and no directory of this name here",
            hint="check the spelling, or set HF_TOKEN",
        ) from error
    except Exception as error:
        # Whatever the hub's HTTP stack raises: its exceptions have no common base class.
        if is_disk_full(error):
            raise CapacityError(
                f"model {repo_id}: the disk is full at {constants.HF_HUB_CACHE}",
                hint="free some space, or set HF_HOME",
            ) from error
        raise PdctlError(
            f"model {repo_id}: {type(error).__name__}: {first_line(error)}",
            hint="check the network and HF_ENDPOINT, HF_TOKEN, HF_HOME",
        ) from error


class _NoHubError(Exception):
    """There is no hub to ask; says why."""


def _within_deadline(ask: Callable[[], Path], progress: Progress | None) -> Path:
    """Asks the hub: which revision is the newest, and for its small files. Its library waits for an answer for ever.

    Raises:
        _NoHubError: it takes longer than with any hub that answers; says how long.
    """
    outcome: Future[Path] = Future()

    def run() -> None:
        try:
            outcome.set_result(ask())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon thread: one that waits for ever must not keep the process.
    threading.Thread(target=run, name="hub", daemon=True).start()
    if not wait((outcome,), timeout=_SILENT_S).done and progress is not None:
        progress("hub", 0, 0)
    if not wait((outcome,), timeout=_HUB_DEADLINE_S - _SILENT_S).done:
        raise _NoHubError(f"did not answer within {_HUB_DEADLINE_S:g} s")
    return outcome.result()


def _reporting_tqdm(progress: Progress | None) -> Any:
    """Returns a tqdm class that draws nothing and hands the byte counts of a download to `progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class ReportingTqdm(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub opens several bars: of these one counts the bytes received.
            self._reports = progress is not None and str(kwargs.get("desc", "")).startswith("Downloading bytes")
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._reports and progress is not None:
                progress("download", int(self.n), int(self.total or 0))

    return ReportingTqdm
