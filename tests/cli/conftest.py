"""The cluster fixture of tests/core: importlib mode has no imports between test directories."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parent.parent / "core" / "conftest.py"
_spec = importlib.util.spec_from_file_location("pdctl_tests_core_conftest", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

cluster = _module.cluster
