"""Light commands stay light, and the layers point one way: cli -> core -> transport."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "fastapi", "uvicorn", "tokenizers", "safetensors", "gguf", "accelerate"}
HEAVY |= {"aiohttp", "plotly", "plotext"}
# What a layer may not import, directly.
FORBIDDEN = {
    "transport": {"pdctl.core", "pdctl.cli", "torch", "transformers", "numpy", "typer", "rich", "psutil"},
    "core": {"pdctl.cli", "typer", "rich"},
    "cli": {"torch", "transformers", "numpy"},
}
MODULES = sorted(path for folder in FORBIDDEN for path in (ROOT / folder).rglob("*.py"))

# Run the command as the console script does, and say at its end which modules there are.
PROBE = """
import json, sys
sys.argv = ["pdctl", *json.loads(sys.argv[1])]
from pdctl.cli.main import main
try:
    main()
except SystemExit as ended:
    code = ended.code
else:
    code = 0
print("MODULES", json.dumps([code or 0, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def _run(arguments: list[str], state_dir: Path, **env: str) -> tuple[int, set[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PDCTL_STATE_DIR": str(state_dir), **env},
        timeout=120,
        check=False,
    )
    assert "MODULES " in done.stdout, done.stderr
    out, _, modules = done.stdout.rpartition("MODULES ")
    code, names = json.loads(modules)
    return code, set(names), out + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "up"),
        (["--version"], 0, "pdctl"),
        (["up", "--help"], 0, "--model"),
        (["status"], 3, "not running"),
        (["inspect", "shm", "--help"], 0, "Usage"),
        (["logs"], 3, "no logs"),
        (["down"], 0, "nothing running"),
        (["generate", "hello"], 3, "not running"),
        (["scale", "decode=2"], 3, "not running"),
        (["drain", "decode-0"], 3, "not running"),
        (["restart"], 3, "not running"),
        (["bench"], 3, "not running"),
        (["bench", "--help"], 0, "--prompt-tokens"),
        (["bench", "report", "--help"], 0, "--html"),
        (["bench", "report", "nothing.json"], 3, "No such file"),
        (["bench", "engine", "--help"], 0, "--contexts"),
        (["bench", "handoff", "--tokens", "16", "--kv-bytes-per-token", "512", "--rounds", "1"], 0, "hand-over"),
        (["ls"], 0, ""),
        (["gc", "--dry-run"], 0, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_light_command_imports_nothing_heavy(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    ended, modules, text = _run(arguments, tmp_path / "state")
    assert (ended, modules & HEAVY) == (code, set()), text
    assert says in text
    assert "pdctl" in modules


def test_completion_imports_nothing_heavy(tmp_path: Path) -> None:
    ended, modules, text = _run(
        [], tmp_path / "state", _PDCTL_COMPLETE="complete_bash", COMP_WORDS="pdctl gen", COMP_CWORD="1"
    )
    assert (ended, modules & HEAVY) == (0, set()), text
    assert "generate" in text.split()


def test_the_probe_sees_heavy_modules() -> None:
    probe = PROBE.replace("import json, sys", "import json, sys, numpy")
    done = subprocess.run(
        [sys.executable, "-c", probe, '["--version"]'], capture_output=True, text=True, timeout=120, check=True
    )
    assert '"numpy"' in done.stdout


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, level) of every import, those inside functions too; `import a.b` and `from a import b` give a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module or ''}.{alias.name}".strip("."), node.level) for alias in node.names)


def _within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_there_are_modules_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(FORBIDDEN)
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for module, level in _imports(path):
        assert level == 0, f"{path}: relative import of {module}"
        assert not _within(module, FORBIDDEN[layer]), f"{layer} may not import {module}"
        # By another name it would be a second copy of every class in it.
        assert not _within(module, set(FORBIDDEN)), f"{path}: import pdctl.{module}"


# What runs code that comes with data.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "copyreg"}
UNSAFE_MODULES |= {"multiprocessing", "yaml", "xmlrpc"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "torch.hub.load", "os.system"}


def _unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield ast.unparse(node.func)
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "weights_only"):
            wanted = node.arg == "weights_only"
            if not (isinstance(node.value, ast.Constant) and node.value.value is wanted):
                yield f"{node.arg}={ast.unparse(node.value)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_is_ever_run(path: Path) -> None:
    """Sockets, segments and checkpoints carry numbers, JSON and text; nothing that is unpickled or evaluated."""
    assert not [module for module, _ in _imports(path) if _within(module, UNSAFE_MODULES)]
    assert not list(_unsafe(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "line",
    ["eval(x)", "torch.load(f)", "f(trust_remote_code=True)", "f(trust_remote_code=x)"],
)
def test_unsafe_calls_are_seen(line: str) -> None:
    assert list(_unsafe(ast.parse(line)))


def test_remote_code_is_refused_wherever_a_model_is_loaded() -> None:
    """transformers asks for it by default only on a terminal: every call says no."""
    loaders = [
        call
        for path in MODULES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith((".from_pretrained", ".from_config"))
    ]
    assert loaders
    for call in loaders:
        assert "trust_remote_code" in [keyword.arg for keyword in call.keywords], ast.unparse(call)


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_a_layer_is_only_itself_as_part_of_pdctl(layer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {layer}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert f"import this package as pdctl.{layer}" in done.stderr
