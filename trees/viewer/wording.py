"""Token ids to the text that each of them stands for.

Invariant: the texts of a run's tokens, one after the other, are the decoded run, but for bytes that are no text. Where
several tokens share a character, the first of them carries it and the run says how many belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from tokenizers import Tokenizer

FILE = "tokenizer.json"
_MARK = re.compile(r"[<\[]\S*[>\]]")
_CUT = "\ufffd"
_LONGEST_GROUP = 8
"""Tokens that are tried together to find whole characters, of at most 4 bytes each."""


class Wording:
    """A tokenizer as a table of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids
        self._skip = len(self._decode(self._before))
        self._pieces: dict[int, str] = {}
        added = tokenizer.get_added_tokens_decoder().items()
        self.marks = frozenset(token for token, word in added if _MARK.fullmatch(word.content))
        """Ids of the marks of turns, tools and thoughts; words may be added to a vocabulary too, and are none."""

    def piece(self, token: int) -> str:
        """The text of one token; with U+FFFD where it is only a part of a character."""
        piece = self._pieces.get(token)
        if piece is None:
            known = token >= 0 and self._tokenizer.id_to_token(token) is not None
            piece = self._pieces[token] = self._inside([token]) if known else f"[{token}?]"
        return piece

    def groups(self, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """(first position, tokens, text) of every group of tokens that only together are characters."""
        start = 0
        while start < len(ids):
            length = 1
            if _CUT in self.piece(ids[start]):
                length = next(
                    (n for n in range(2, _LONGEST_GROUP + 1) if _CUT not in self._inside(ids[start : start + n])), 1
                )
            if length > 1:
                yield start, length, self._inside(ids[start : start + length])
            start += length

    def text(self, ids: Sequence[int]) -> str:
        """The text of a run of ids; an id beyond the vocabulary stands as its number."""
        known = all(token >= 0 and self._tokenizer.id_to_token(token) is not None for token in ids)
        return self._inside(ids) if known else "".join(map(self.piece, ids))

    def _inside(self, ids: Sequence[int]) -> str:
        """The text of ids in the middle of a text: some decoders strip the blank before the first word."""
        return self._decode([*self._before, *ids])[self._skip :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def find(place: Path) -> Path | None:
    """The tokenizer of the run that ``place`` is or lies in: of its newest checkpoint, else of ``model.path``."""
    for folder in (place, *list(place.resolve().parents)[:3]):
        kept = sorted((folder / "checkpoints").glob(f"step_*/{FILE}"))
        for path in (*reversed(kept), folder / "model" / FILE, folder / FILE, _of_settings(folder)):
            if path is not None and path.is_file():
                return path
    return None


def _of_settings(folder: Path) -> Path | None:
    settings = folder / "config.yaml"
    if not settings.is_file():
        return None
    try:
        found = yaml.safe_load(settings.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError):
        # It need not be a run's.
        return None
    model = found.get("model") if isinstance(found, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    return Path(path).expanduser() / FILE if isinstance(path, str) else None
