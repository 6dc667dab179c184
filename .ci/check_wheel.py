"""Install a wheel into an environment of its own: its files are the tree's, and its command runs.

python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "core", "transport")


def main(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.startswith("pdctl/")}
        others = [name for name in archive.namelist() if not name.startswith(("pdctl/", "pdctl-"))]
    expected = {
        f"pdctl/{path.relative_to(ROOT)}": path.read_bytes()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    if others or found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        sys.exit(f"wheel and tree differ: {differing}; outside pdctl/: {others}")
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        python = Path(directory) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # What `--help` needs; torch and transformers are not among it, and must not be.
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
        subprocess.run([*pip, "typer", "rich", "psutil"], check=True)
        shown = subprocess.run(
            [Path(directory) / "bin" / "pdctl", "--help"], check=True, capture_output=True, text=True, cwd=directory
        )
        if "generate" not in shown.stdout:
            sys.exit(f"pdctl --help of the wheel: {shown.stdout}")
    print(f"{wheel.name}: {len(found)} files, equal to the tree; pdctl --help runs without torch")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
