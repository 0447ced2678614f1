"""Where SGLang is. Light to import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from configs.schema import SGLangConfig


def interpreter(config: SGLangConfig) -> Path:
    """The Python that has SGLang. Raises ``FileNotFoundError`` where none is known."""
    named = config.python or os.environ.get("REINS_SGLANG_PYTHON")
    if named is None and importlib.util.find_spec("sglang") is not None:
        named = sys.executable
    if named is None or not _has_sglang(named):
        raise FileNotFoundError(
            f"engine.kind=sglang: got {'no interpreter with SGLang' if named is None else named}, expected one that "
            "runs and has it; make an environment of its own (python -m venv .venv-sglang; .venv-sglang/bin/pip "
            "install sglang==0.5.23) and name its python in engine.sglang.python or REINS_SGLANG_PYTHON"
        )
    # Whoever starts it may stand in another folder; links stay, since an environment is found by its own.
    return Path(named).absolute()


def _has_sglang(python: str | Path) -> bool:
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    return os.access(python, os.X_OK) and subprocess.run([python, "-c", question], check=False).returncode == 0
