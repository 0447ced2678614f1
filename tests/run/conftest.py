from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveRun


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy before its cold start: good for everything but success."""
    from transformers import AutoTokenizer

    from algos.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("untrained")
    build_tokenizer(folder)
    build_model(len(AutoTokenizer.from_pretrained(folder)), seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    """Start runs that do not outlive the test."""
    runs: list[LiveRun] = []

    def start(*arguments: str, module: str = "algos.run") -> LiveRun:
        runs.append(LiveRun(tmp_path, *arguments, module=module))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
