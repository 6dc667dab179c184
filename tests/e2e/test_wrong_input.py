"""What a person can get wrong at `pdctl up`: a documented exit code, one line that says why, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdctl.cli.main import main
from pdctl.transport.names import segments_of

pytestmark = pytest.mark.e2e

DEADLINE_S = 120
SMALL = ["--kv-blocks", "64", "--threads", "1", "--max-context", "512", "--dtype", "float32"]
LAYER = "model.layers.1.mlp.up_proj.weight"


class Refusal(NamedTuple):
    """How a command ended that ran in this process."""

    code: object
    out: str
    err: str


def named(start: Any) -> Any:
    """A cluster that was not started: its name, and taken down at the end all the same."""
    return start("--dtype", "none", expect_up=False)


@pytest.fixture(scope="module")
def cluster(start_shared: Any) -> Any:
    """One that no test can start, for what is refused at once."""
    return named(start_shared)


def assert_one_line(err: str) -> None:
    """One line of error and at most one of advice; or the usage error of the command line's own parser, in a box."""
    assert "Traceback" not in err
    if "Usage: " in err or "╭─ Error" in err:
        return
    lines = [line for line in err.splitlines() if not re.match(r"[a-z0-9-]+: [0-9.]+ (s|MiB)$", line)]
    assert lines[0].startswith("pdctl: "), err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("  try: ")), err


def assert_refused(cluster: Any, result: Any, code: int, *says: str) -> None:
    assert result.code == code, result
    assert result.out == ""
    assert_one_line(result.err)
    flat = re.sub(r"[│\s]+", " ", result.err)
    for words in says:
        assert words in flat
    cluster.assert_clean()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--kv-blocks 0", 2, "--kv-blocks 0: expected 2 to"),
        ("--kv-blocks -1", 2, "--kv-blocks -1: expected 2 to"),
        ("--kv-blocks 1", 2, "--kv-blocks 1: expected 2 to"),
        ("--kv-blocks 1000000000000", 2, "--kv-blocks 1000000000000: expected 2 to"),
        ("--kv-blocks 4294967296", 5, "wants"),
        ("--kv-blocks abc", 2, "--kv-blocks"),
        ("--kv-blocks 64 --kv-gib 1", 2, "--kv-gib and --kv-blocks"),
        ("--kv-gib 0", 2, "--kv-gib 0"),
        ("--kv-gib -1", 2, "--kv-gib -1"),
        ("--kv-gib nan", 2, "--kv-gib nan"),
        ("--kv-gib inf", 2, "--kv-gib inf"),
        ("--kv-gib 1e9", 2, "--kv-gib 1e+09"),
        ("--kv-gib 100000", 2, "--kv-gib 100000"),
        ("--kv-gib 1e-6", 5, "at least 2 are needed"),
        ("--kv-gib 1000", 5, "wants"),
        ("--block-size 0", 2, "--block-size 0: expected one of"),
        ("--block-size 3", 2, "--block-size 3: expected one of"),
        ("--prefill 0", 2, "--prefill 0: expected 1 to"),
        ("--decode 0", 2, "--decode 0: expected 1 to"),
        ("--decode 999", 2, "--decode 999: expected 1 to"),
        ("--port -1", 2, "--port -1: expected 0 to 65535"),
        ("--port 70000", 2, "--port 70000: expected 0 to 65535"),
        ("--port abc", 2, "--port"),
        ("--threads 0", 2, "--threads 0: expected 1 to"),
        ("--max-context 0", 2, "--max-context 0: expected 2 to 2048"),
        ("--max-context 1", 2, "--max-context 1: expected 2 to 2048"),
        ("--max-context 1000000000", 2, "--max-context 1000000000: expected 2 to 2048"),
        ("--dtype int4", 2, "--dtype int4: expected one of"),
        ("--local-prefill-tokens -1", 2, "--local-prefill-tokens -1: expected 0 to"),
        ("--colocated --decode 2", 2, "--decode 2 with --colocated"),
        ("--colocated --local-prefill-tokens 32", 2, "--local-prefill-tokens 32 with --colocated"),
        ("--chunk-tokens 0", 2, "--chunk-tokens 0: expected 1 to"),
        ("--max-batch 0", 2, "--max-batch 0: expected 1 to"),
        ("--max-queue -1", 2, "--max-queue -1: expected 0 to"),
        ("--no-such-option", 2, "--no-such-option"),
        ("--model ''", 2, "model ''"),
        ("--model no-such-model", 2, "no-such-model"),
        ("--model ./no-such-directory", 2, "./no-such-directory does not exist"),
    ],
)
def test_nonsense_is_refused(
    cluster: Any,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    says: str,
) -> None:
    """S27: before there is a second process, so the first can be this one."""
    place = ["--name", cluster.name, "--state-dir", str(cluster.state_dir)]
    given = ["up", "--model", str(tiny_dir), "--port", "0", *shlex.split(arguments), *place]
    monkeypatch.setattr(sys, "argv", ["pdctl", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert_refused(cluster, Refusal(code=ended.value.code, out=out, err=err), code, says)


@pytest.mark.parametrize("host", ["not-an-address", "203.0.113.7", ""])
def test_an_address_that_cannot_be_served(cluster: Any, tiny_dir: Path, host: str) -> None:
    """The supervisor finds it out."""
    result = cluster.cli("up", "--model", str(tiny_dir), "--port", "0", "--host", host)
    assert_refused(cluster, result, 2, f"--host {host}".strip())


@pytest.mark.parametrize("name", ["../x", "", "A", "logs", "a/b", "x" * 33, "-x", "ä"])
def test_a_name_that_could_be_no_cluster(cluster: Any, tiny_dir: Path, name: str) -> None:
    before = sorted(cluster.state_dir.parent.rglob("*"))
    commands = [["up", "--model", str(tiny_dir)], ["down"], ["status"], ["logs"], ["generate", "hello"]]
    for command in commands if name == "../x" else commands[:1]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pdctl.cli.main",
                *command,
                f"--name={name}",
                "--state-dir",
                str(cluster.state_dir),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 2, done
        assert "cluster name" in done.stderr
        assert_one_line(done.stderr)
    assert sorted(cluster.state_dir.parent.rglob("*")) == before


def test_state_directories_that_cannot_be(cluster: Any, tiny_dir: Path, tmp_path: Path) -> None:
    """S40; each message names the directory and how to choose another."""
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    else:
        foreign = Path("/usr")
    impossible = {
        tmp_path / ("x" * 300): "File name too long",
        file: "is not a directory",
        file / "below": "Not a directory",
        link: "is not a directory",
        foreign: "belongs to user",
        Path("/proc/pdctl"): "/proc/pdctl",
    }
    for state_dir, says in impossible.items():
        result = type(cluster)(cluster.name, state_dir).cli("up", "--model", str(tiny_dir), "--port", "0", *SMALL)
        assert result.code == 2, result
        assert str(state_dir) in result.err
        assert says in result.err
        assert "--state-dir" in result.err
        assert_one_line(result.err)
    assert segments_of(cluster.name) == []


# --- models ------------------------------------------------------------------------------------------------


def _cut_off(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1024])


def _pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _shard_gone(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {LAYER: "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _of_another_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["T5ForConditionalGeneration"]}))


def _empty(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()


def _tensor_gone(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors[LAYER]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _tensor_of_wrong_shape(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors[LAYER] = tensors[LAYER][:64].copy()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


Spoil = Callable[[Path], None]


def _spoiled(tiny_dir: Path, tmp_path: Path, spoil: Spoil) -> Path:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    spoil(model)
    return model


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (_cut_off, 4, "model.safetensors: found"),
        (_pointer, 4, "model.safetensors is a git-lfs pointer"),
        (_shard_gone, 4, "model-00001-of-00002.safetensors is missing"),
        (lambda model: (model / "config.json").unlink(), 4, "config.json is missing"),
        (lambda model: (model / "config.json").write_text("{"), 4, "config.json is not JSON"),
        (lambda model: (model / "tokenizer.json").unlink(), 4, "no tokenizer"),
        (_empty, 4, "is empty"),
        (_of_another_kind, 4, "T5ForConditionalGeneration"),
    ],
    ids=["cut off", "pointer", "shard", "no config", "bad config", "no tokenizer", "empty", "architecture"],
)
def test_a_damaged_model_is_refused_before_anything_starts(
    cluster: Any, tiny_dir: Path, tmp_path: Path, spoil: Spoil, code: int, says: str
) -> None:
    """S39."""
    cluster = type(cluster)(cluster.name, tmp_path / "state")
    model = _spoiled(tiny_dir, tmp_path, spoil)
    result = cluster.cli("up", "--model", str(model), "--port", "0", *SMALL)
    assert_refused(cluster, result, code, says)
    # Not even the supervisor was started.
    assert list(cluster.state_dir.rglob("*.log")) == []


def test_a_file_instead_of_a_model(cluster: Any, tiny_dir: Path) -> None:
    result = cluster.cli("up", "--model", str(tiny_dir / "config.json"), "--port", "0", *SMALL)
    assert_refused(cluster, result, 2, "config.json is a file")


@pytest.mark.parametrize("spoil", [_tensor_gone, _tensor_of_wrong_shape])
def test_a_model_that_fails_in_loading(start: Any, tiny_dir: Path, tmp_path: Path, spoil: Spoil) -> None:
    """S39: weights that are not there must never be made up; the traceback is in the log, not on the terminal."""
    cluster = named(start)
    model = _spoiled(tiny_dir, tmp_path, spoil)
    result = cluster.cli("up", "--model", str(model), "--port", "0", *SMALL)
    assert result.code != 0, result
    assert_refused(cluster, result, result.code, str(model), LAYER, "pdctl logs zygote")
    assert "Traceback" in cluster.cli("logs", "zygote").out


def test_a_tokenizer_that_cannot_be_read_is_named_by_the_router(start: Any, tiny_dir: Path, tmp_path: Path) -> None:
    cluster = named(start)
    model = _spoiled(tiny_dir, tmp_path, lambda model: (model / "tokenizer.json").write_text('{"version": "1.0"}'))
    result = cluster.cli("up", "--model", str(model), "--port", "0", *SMALL)
    assert_refused(cluster, result, 4, f"tokenizer of {model}", "pdctl logs router")


# --- room --------------------------------------------------------------------------------------------------


def test_a_small_shm_is_told_before_the_start_and_its_advice_works(
    start: Any, tiny_dir: Path, tmp_path: Path
) -> None:
    """S25, S26: in a mount namespace whose /dev/shm has 16 MiB. S21: after a crash, with no room for a second."""
    cluster = named(start)
    place = f"--name {cluster.name} --state-dir {shlex.quote(str(cluster.state_dir))}"
    options = f"--model {shlex.quote(str(tiny_dir))} --port 0 --threads 1 --max-context 512 --dtype float32"
    pdctl = f"{shlex.quote(sys.executable)} -m pdctl.cli.main"
    script = f"""
        mount -t tmpfs -o size=16m t /dev/shm || exit 99
        cd {shlex.quote(str(tmp_path))}
        {pdctl} up {place} {options} --kv-blocks 4096 2> refused; echo $? > code
        find /dev/shm -type f > left
        advised=$(sed -n 's/^  try: pdctl up \\(--kv-blocks [0-9]*\\) --name.*/\\1/p' refused)
        echo "$advised" > advice
        {pdctl} up {place} {options} $advised 2> up; echo $? > up_code
        df --output=used -B1 /dev/shm | tail -1 > used
        kill -9 $(cut -d' ' -f1 {shlex.quote(str(cluster.state_dir))}/{cluster.name}/lock)
        {pdctl} up {place} {options} $advised 2> up_again; echo $? > up_again_code
        df --output=used -B1 /dev/shm | tail -1 > used_again
        {pdctl} generate hello --max-tokens 3 {place} > text 2> generate_err; echo $? > generate_code
        {pdctl} down {place}
        find /dev/shm -type f > left_at_the_end
        cat {shlex.quote(str(cluster.state_dir))}/logs/*/*.log > logs
    """
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )

    def read(name: str) -> str:
        return (tmp_path / name).read_text(errors="replace").strip()

    assert done.returncode != 99, done.stderr
    assert read("code") == "5", read("refused")
    assert_one_line(read("refused"))
    wanted, available = (int(number) for number in re.findall(r"(\d+) bytes", read("refused")))
    assert wanted > available > 0
    assert available <= 16 << 20
    assert "/dev/shm" in read("refused")
    assert read("left") == read("left_at_the_end") == ""
    assert re.fullmatch(r"--kv-blocks \d+", read("advice"))
    assert read("up_code") == "0", read("up")
    # Really in there, and a good part of what there is.
    assert int(read("used")) > available // 2
    assert read("up_again_code") == "0", read("up_again")
    assert "stale segment" in read("up_again")
    assert read("used_again") == read("used")
    assert read("generate_code") == "0", read("generate_err")
    for text in (read("logs"), read("up"), done.stderr):
        assert "Bus error" not in text
        assert "SIGBUS" not in text
    cluster.assert_clean()
