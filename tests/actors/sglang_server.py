"""One real SGLang server on the CPU for the tests that need one."""

from __future__ import annotations

from pathlib import Path

from needs import require

from actors.engines.locate import interpreter
from actors.engines.sglang_server import Launch
from configs.schema import SGLangConfig

INSTALL = "python -m venv .venv-sglang; .venv-sglang/bin/pip install sglang==0.5.23; export REINS_SGLANG_PYTHON=..."


def launch(model: Path, log: Path, **more) -> Launch:
    """Skips where there is no SGLang."""
    try:
        python = interpreter(SGLangConfig())
    except FileNotFoundError:
        require(False, INSTALL)
        raise
    return Launch(python, model, log, max_len=512, args=("--max-total-tokens", "8192"), **more)
