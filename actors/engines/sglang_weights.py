"""Weights on their way into an SGLang server.

Invariant: what a server is given is whole and of its model; it takes anything else without a word.
"""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from actors.engines import weights as published

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 1 << 28
_TIED = {"lm_head.weight"}
"""May be left out, or be there beside what it is tied to."""


@dataclass(frozen=True, slots=True)
class Held:
    """The weights of a server. ``path`` None: those of the model that it was started with."""

    version: int
    path: Path | None


class Fitting:
    """Which weights fit a model, by the names and shapes of its tensors."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._shapes = _shapes(model)

    def verified(self, path: Path) -> Path:
        """The folder of whole weights of this model, links resolved.

        Raises ``ValueError`` or ``FileNotFoundError`` as ``weights.verify``, and ``ValueError`` for another model's.
        """
        folder = published.verify(path)
        found, own = _shapes(folder), self._shapes
        other = [name for name in found if found[name] != own.get(name) and (name in own or name not in _TIED)]
        wrong = [f"{name}: got {found[name]}, expected {own.get(name)}" for name in other]
        wrong += [f"{name}: missing" for name in own.keys() - found.keys() - _TIED]
        if wrong:
            raise ValueError(
                f"{path}: the weights do not fit {self._model} ({'; '.join(sorted(wrong)[:8])}); "
                "publish the state_dict of the same architecture. The weights in use stay."
            )
        return folder

    def newest(self, held: Held) -> Held:
        """What is published newest beside ``held``, or where that is not whole ``held`` itself; raises likewise."""
        if held.path is None:
            return held
        newest = published.latest(held.path.parent)
        if newest is not None and newest[0] > held.version:
            try:
                return Held(newest[0], self.verified(newest[1]))
            except (ValueError, FileNotFoundError) as error:
                logger.error("version %d is left out: %s", newest[0], error)
        return Held(held.version, self.verified(held.path))


def buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[bool, str]]:
    """Tensors in portions, pickled as the server takes them, in base64; True with the last."""
    portion: list[tuple[str, torch.Tensor]] = []
    size = 0
    names = list(tensors)
    for name in names:
        portion.append((name, tensors[name]))
        size += tensors[name].nbytes
        last = name == names[-1]
        if last or size >= _BUCKET_BYTES:
            yield last, base64.b64encode(pickle.dumps(portion)).decode()
            portion, size = [], 0


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors in a folder; only the heads of its files are read."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found
