"""Votes on disk: what was asked in exactly the same words is not paid for again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder with a file for each vote. Several processes may use it at the same time."""

    folder: Path

    def _path(self, question: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"

    def get(self, question: dict[str, Any]) -> str | None:
        """The answer to ``question``, where there is one; a file that is damaged is none."""
        try:
            found = json.loads(self._path(question).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        answer = found.get("answer") if isinstance(found, dict) else None
        return answer if isinstance(answer, str) else None

    def put(self, question: dict[str, Any], answer: str) -> None:
        path = self._path(question)
        path.parent.mkdir(parents=True, exist_ok=True)
        opened, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            json.dump({"model": question["model"], "answer": answer}, file)
        Path(name).replace(path)
