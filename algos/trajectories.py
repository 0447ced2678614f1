"""What supervised fine-tuning imitates, from files: prefix trees of runs, and JSON lines of messages.

Invariant: every trajectory that was asked for is either returned or counted with the reason why not; a broken one
stops everything before it begins, named by file, line or episode, and field, unless broken ones are to be left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from actors.rendering import Rendering
from algos.batching import Sample
from algos.conversations import reward_of, row_of, tree_of
from algos.supervised import samples_of
from configs.loader import ConfigError
from configs.sft import SftDataConfig
from envs.protocols.errors import WireError
from trees import codec, filters
from trees.build import UNTOLD
from trees.tree import Tree

SHOWN = 20
"""Faults that are told one by one."""


class DataError(ConfigError):
    """Data that the settings name and that cannot be trained: a line per fault, with place, got and expected."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode or one row."""

    where: str
    """File, and line or episode."""
    prompt: str
    """Equal where the same was asked; a prompt is either trained or held out."""
    samples: tuple[Sample, ...]

    @cached_property
    def tokens(self) -> int:
        """Of all paths, one by one."""
        return sum(len(sample.ids) for sample in self.samples)

    @cached_property
    def trained(self) -> int:
        return sum(len(sample.targets) for sample in self.samples)

    @cached_property
    def digest(self) -> bytes:
        """Of the ids and of which are trained."""
        parts = [part.cpu().numpy().tobytes() for sample in self.samples for part in (sample.ids, sample.mask)]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


@dataclass(slots=True)
class Loaded:
    """What a reading gave."""

    trajectories: list[Trajectory] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """How many were not taken, by reason."""
    faults: list[str] = field(default_factory=list)
    """Of what is broken, place and reason of each."""

    @property
    def repeated(self) -> int:
        """Trajectories that are there already, token by token."""
        return len(self.trajectories) - len({each.digest for each in self.trajectories})

    def told(self) -> list[str]:
        """A line for each fault, and one for those beyond ``SHOWN``."""
        more = len(self.faults) - SHOWN
        return self.faults[:SHOWN] + ([f"and {more} more"] if more > 0 else [])


def load(
    settings: SftDataConfig, rendering: Callable[[], Rendering], longest: int, vocabulary: int, device: str = "cpu"
) -> Loaded:
    """All trajectories, in the order of their files.

    Args:
        settings: which, and what to do with broken and long ones.
        rendering: gives the model's; only asked where there are messages.
        longest: tokens that a trajectory may have.
        vocabulary: ids of the model, from 0.
        device: of the samples.

    Raises:
        DataError: a path is not there or holds nothing, something is broken and not to be left out, or nothing is left.
    """
    reader = _Reader(settings, rendering, longest, vocabulary, device)
    for path in settings.path:
        for file in _files(path):
            if file.suffix == ".tree":
                reader.trees(file)
            else:
                reader.rows(file)
    loaded = reader.loaded
    if loaded.faults and not settings.skip_bad:
        raise DataError("\n".join([*loaded.told(), "mend them, or leave them out with --skip-bad"]))
    if not loaded.trajectories:
        why = ", ".join(f"{count} {reason}" for reason, count in loaded.left_out.items()) or "the files are empty"
        named = ", ".join(map(str, settings.path))
        raise DataError(f"data.path: got nothing to train in {named} ({why}), expected a trajectory at least")
    return loaded


def split(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(trained, held out): a share of the prompts, at least one where ``share`` is above 0, chosen by the seed.

    Raises DataError where nothing would be left to train.
    """
    prompts = {each.prompt for each in trajectories}
    order = sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed} {prompt}".encode()).digest())
    count = max(1, round(share * len(order))) if share else 0
    if count >= len(order):
        raise DataError(
            f"data.heldout: got a share of {share} of {len(order)} prompts, expected a prompt left to train: give more "
            "data, or data.heldout=0"
        )
    chosen = set(order[:count])
    return [t for t in trajectories if t.prompt not in chosen], [t for t in trajectories if t.prompt in chosen]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in (".tree", ".jsonl"):
            raise DataError(f"data.path: got {path}, expected a .tree or a .jsonl file, or a folder of them")
        return [path]
    if not path.is_dir():
        raise DataError(
            f"data.path: {path} is not there; expected a .tree or .jsonl file, a folder of them, or a run folder"
        )
    found = sorted(file for file in path.rglob("*.tree") if file.is_file())
    if not (found and (path / "metrics.jsonl").is_file()):
        # The JSON lines of a run folder are no messages.
        found += sorted(path.glob("*.jsonl"))
    if not found:
        raise DataError(
            f"data.path: {path} holds no .tree and no .jsonl file; expected either, or a run folder whose first "
            "training step has ended"
        )
    return found


class _Reader:
    def __init__(
        self,
        settings: SftDataConfig,
        rendering: Callable[[], Rendering],
        longest: int,
        vocabulary: int,
        device: str,
    ) -> None:
        self.loaded = Loaded()
        self._settings = settings
        self._rendering = rendering
        self._longest = longest
        self._vocabulary = vocabulary
        self._device = device

    def trees(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                for number, tree in enumerate(codec.read(opened)):
                    name = str(tree.meta.get("episode", number + 1))
                    if self._wanted(tree):
                        self._take(f"{file}: episode {name}", str(tree.meta.get("task") or ""), self._marked(tree))
        except codec.CodecError as error:
            self._fault(f"{file}: {error}")

    def rows(self, file: Path) -> None:
        before = len(self.loaded.trajectories) + len(self.loaded.faults) + self.loaded.left_out.total()
        for number, line in _lines(file):
            where = f"{file}: line {number}"
            try:
                row = row_of(line)
                reward = reward_of(row)
                if self._rewarded(reward):
                    self._take(where, "", tree_of(row, self._rendering()))
            except WireError as error:
                self._fault(f"{where}: {error.message}")
        if len(self.loaded.trajectories) + len(self.loaded.faults) + self.loaded.left_out.total() == before:
            self._fault(f"{file}: got no row, expected JSON lines with messages")

    def _wanted(self, tree: Tree) -> bool:
        splits = self._settings.splits
        if splits is not None and tree.meta.get("split") not in splits:
            self.loaded.left_out["of another split"] += 1
            return False
        return self._rewarded(tree.meta.get("reward"))

    def _rewarded(self, reward: float | None) -> bool:
        least = self._settings.min_reward
        if least is None or (reward is not None and reward >= least):
            return True
        self.loaded.left_out["without a reward" if reward is None else f"with a reward below {least:g}"] += 1
        return False

    def _marked(self, tree: Tree) -> Tree:
        kinds: Sequence[str] | None = self._settings.kinds
        if kinds is None and any(node.reason == UNTOLD for node in tree.nodes):
            # To be imitated an answer needs no log-probabilities; the other marks are then those of a run's default.
            kinds = ("main",)
        if kinds is None or any(node.reason == filters.OVER_BRANCHING for node in tree.nodes):
            return tree
        # What the run left out for its kind may be wanted here, so the marks are made anew.
        nodes = tuple(replace(node, trained=node.sampled and len(node) > 0, reason="") for node in tree.nodes)
        marked, _ = filters.dead_leaves(Tree(nodes, dict(tree.meta)))
        return filters.auxiliary(marked, kinds)[0]

    def _take(self, where: str, prompt: str, tree: Tree) -> None:
        try:
            samples = tuple(samples_of(tree, self._settings.train_on == "all", self._device))
        except ValueError as error:
            self._fault(f"{where}: {error}")
            return
        if not samples:
            self.loaded.left_out["without a token to train"] += 1
            return
        highest = max(int(sample.ids.max()) for sample in samples)
        if highest >= self._vocabulary:
            self._fault(
                f"{where}: got token id {highest}, expected ids below {self._vocabulary}: it was made with "
                "another tokenizer than that of model.path"
            )
            return
        length = max(len(sample.ids) for sample in samples)
        if length > self._longest:
            if self._settings.long == "drop":
                self.loaded.left_out[f"of more than {self._longest} tokens"] += 1
            else:
                self._fault(
                    f"{where}: got {length} tokens, expected at most {self._longest} (data.max_len): leave such out "
                    "with data.long=drop"
                )
            return
        self.loaded.trajectories.append(Trajectory(where, prompt or _asked(tree), samples))

    def _fault(self, text: str) -> None:
        self.loaded.faults.append(text)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of those that are not blank."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                yield number, line


def _asked(tree: Tree) -> str:
    """What stands before the first call's own tokens."""
    return hashlib.sha256(tree.prompt_ids(tree.calls()[0].call).tobytes()).hexdigest()
