"""The tree builder: call records in, filtered and packed trees out to the learner.

Invariant: an episode's tree leaves this actor only when every call that the proxy recorded is in it; a builder
that restarted knows nothing, says so, and is told again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayActorError

from actors.engines.published import flush
from configs.schema import TreesConfig
from trees import codec, filters
from trees.build import RecordError, TreeBuilder
from trees.tree import Tree

logger = logging.getLogger(__name__)


class TreeSink(Protocol):
    """Where finished trees go; in a run, the learner."""

    async def add(self, data: bytes) -> None: ...


class TreeBuilderActor:
    """One shard; all calls of one session go to the same shard.

    What it holds of unfinished sessions is bounded by ``trees.builder_mb``: above it the session that nobody added to
    for longest is forgotten, and told again by the proxy when it ends.
    """

    def __init__(self, run_dir: Path, learner: TreeSink | None, config: TreesConfig) -> None:
        """``learner``: None where nothing is trained."""
        self._run_dir = run_dir
        self._learner = learner
        self._config = config
        self._building: dict[str, TreeBuilder] = {}
        self._refused: dict[str, set[int]] = {}
        self._told_again: set[str] = set()
        """Sessions that have ended and of which records are missing."""
        self._gathered: set[int] = set()
        self._held: dict[str, int] = {}
        """Bytes of records of each session, the one added to last at the end."""

    def ping(self) -> bool:
        return True

    def add(self, data: bytes) -> None:
        """Take packed call records (``trees.codec.encode_records``); a record seen before changes nothing."""
        records = codec.decode_records(data)
        for record in records:
            builder = self._building.setdefault(record.session, TreeBuilder(record.session))
            try:
                new = builder.add(record)
            except RecordError:
                new = True
                # Without exact log-probabilities a call cannot be trained: it is left out and counted.
                self._refused.setdefault(record.session, set()).add(record.ordinal)
            size = record.prompt_ids.nbytes + record.sampled_ids.nbytes + record.logprobs.nbytes if new else 0
            self._held[record.session] = self._held.pop(record.session, 0) + size
        self._forget_down_to(self._config.builder_mb << 20)

    def _forget_down_to(self, most: int) -> None:
        while sum(self._held.values()) > most:
            # A session that is being told again has ended: it goes as soon as it is whole. The last one was just added.
            others = [session for session in list(self._held)[:-1] if session not in self._told_again]
            if not others:
                return
            self.discard(others[0])

    def discard(self, session: str) -> None:
        """Forget a session."""
        self._building.pop(session, None)
        self._refused.pop(session, None)
        self._held.pop(session, None)
        self._told_again.discard(session)

    async def finish(self, session: str, n_calls: int, meta: dict[str, Any]) -> dict[str, Any] | None:
        """Build, filter and pack the tree of an ended session; send it to the learner if its split is ``train``.

        Returns:
            A flat report (``version`` and ``version_last``, the oldest and the newest that sampled, ``leaves``,
            ``dropped``, ``tokens_trained`` and counts named with a slash, which a step adds up), or None when records
            are missing.
        """
        builder = self._building.get(session) or TreeBuilder(session)
        refused = self._refused.get(session, set())
        if not refused.issuperset(builder.missing(n_calls)):
            self._told_again.add(session)
            return None
        tree = builder.tree()
        tree.meta |= meta
        tree, report = filters.apply(tree, max_leaves=self._config.max_leaves, train_kinds=self._config.train_kinds)
        self.discard(session)
        learnt = meta["split"] == "train"
        if learnt or self._config.keep == "all":
            data = self._store(tree, meta)
            if learnt and not report.dropped:
                await self._send(data)
        return flat_report(tree, report, len(refused) + len(builder.waiting()))

    def _store(self, tree: Tree, meta: dict[str, Any]) -> bytes:
        data = codec.encode(tree)
        folder = self._run_dir / "trees" / f"step_{meta['step']:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{meta['episode']}.partial"
        partial.write_bytes(data)
        # Else a power cut may leave the name without the bytes.
        flush(partial)
        partial.rename(folder / f"{meta['episode']}.tree")
        if self._config.keep_steps is not None:
            old = self._run_dir / "trees" / f"step_{meta['step'] - self._config.keep_steps:06d}"
            shutil.rmtree(old, ignore_errors=True)
        return data

    async def gather(self, before: int) -> None:
        """Put the trees of each group of the steps before ``before`` into one file, where they share their prompt.

        For steps that nobody trains again: a learner looks for one file per episode. A step that cannot be gathered
        stays as it is, to be tried again.
        """
        for folder in (self._run_dir / "trees").glob("step_*"):
            number = folder.name.removeprefix("step_")
            if not number.isdecimal() or int(number) >= before or int(number) in self._gathered:
                continue
            try:
                await asyncio.to_thread(_gather, folder)
                self._gathered.add(int(number))
            except OSError as error:
                # It only saves room: no reason to end a run.
                logger.warning("the trees of %s stay as they are: %s", folder, error)

    async def _send(self, data: bytes) -> None:
        if self._learner is None:
            return
        try:
            await self._learner.add(data)
        except RayActorError:
            # The learner is restarting: it will read the file.
            return


def _gather(folder: Path) -> None:
    """Doing it again changes nothing, wherever the last time ended. Only files that hold one tree and have the name of
    its episode are taken; a group of which a file is damaged stays as it is. Raises OSError.
    """
    single: dict[str, dict[str, Tree]] = {}
    whole: dict[Path, list[Tree]] = {}
    for path in sorted(path for path in folder.glob("*.tree") if path.is_file()):
        try:
            with path.open("rb") as file:
                trees = list(codec.read(file))
        except codec.CodecError as error:
            logger.warning("%s is left out: %s", path, error)
            continue
        groups = {tree.meta.get("group") for tree in trees}
        if len(trees) == 1 and path.stem == trees[0].meta.get("episode") and trees[0].meta.get("group") != path.stem:
            single.setdefault(str(trees[0].meta.get("group", "")), {})[path.stem] = trees[0]
        elif groups == {path.stem}:
            whole[path] = trees
    for group, episodes in single.items():
        target = folder / f"{group}.tree"
        if not group or group in episodes or (target.exists() and target not in whole):
            continue
        # What stands alone is newer than what was gathered before.
        merged = {tree.meta["episode"]: tree for tree in whole.get(target, [])} | episodes
        partial = target.with_suffix(".partial")
        partial.write_bytes(codec.encode_group([merged[name] for name in sorted(merged)]))
        partial.rename(target)
        for name in episodes:
            (folder / f"{name}.tree").unlink(missing_ok=True)


def flat_report(tree: Tree, report: filters.Report, refused: int) -> dict[str, Any]:
    """The report of one tree as flat rows: tokens sampled by kind, kept and removed by reason, add up."""
    versions = [span.version for node in tree.calls() for span in node.versions]
    row: dict[str, Any] = {
        "version": min(versions, default=None),
        "version_last": max(versions, default=None),
        "leaves": report.leaves,
        "dropped": report.dropped,
        "tokens_trained": report.kept.tokens,
        "tokens/sampled": report.total.tokens,
        "filter/kept": report.kept.tokens,
        "calls/recorded": report.total.nodes,
        "calls/refused": refused,
    }
    for reason, count in report.removed.items():
        row[f"filter/removed: {reason}"] = count.tokens
    for node in tree.calls():
        key = f"kind/{node.kind}"
        row[key] = row.get(key, 0) + len(node)
        if node.fork:
            row["calls/forked"] = row.get("calls/forked", 0) + 1
        row["calls/drift_chars"] = row.get("calls/drift_chars", 0) + node.drift
    return row
