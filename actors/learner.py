"""The learner: a step's trees in, new weights with the next version number out.

Invariant: ``train(s)`` takes the policy from version ``s`` to ``s + 1`` and depends on nothing but the state
at ``s``, the trees of the named episodes, the settings and the seed. Whoever loads the checkpoint of version
``s`` and trains the same steps again gets the same weights bit by bit (same machine, same number of threads).

``Learner`` is a plain class, of which a run has one on each rank of ``actors.learner_group``. It keeps in memory only
what has not been trained: trees lie on disk as well, so a restarted learner reads again what it was sent before.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from actors import checkpoints
from actors.engines import weights
from actors.trained_critic import critic_of, loss_settings
from actors.trained_model import TrainedModel, check_shape, shape_of
from algos.advantages import ESTIMATORS, has_spread
from algos.batching import Sample, sample_of
from algos.episodes import flat, nested, without_rejected
from algos.ranks import ALONE, Ranks
from algos.statistics import mismatch_statistics, ratio_statistics
from algos.step import Pass, accumulate, with_old
from configs.learner import LearnerConfig
from trees import codec
from trees.linearise import linearise
from trees.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class _Episode:
    """An episode that counts in its group's baseline, whether or not the filters left tokens to train."""

    id: str
    group: str
    reward: float
    tree: Tree


@dataclass(slots=True)
class _Moved:
    """What the optimiser steps of a training step gave: those taken, and how many of each other kind."""

    passes: list[Pass] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    idle: int = 0
    """Left out because no token of the minibatch has an advantage."""
    broken: int = 0
    """Not taken because loss or gradient were not finite."""
    critic: list[tuple[float, float]] = field(default_factory=list)
    """Value loss and gradient norm of each step of the critic; the norm of one not taken is NaN."""
    optimiser_s: float = 0.0
    critic_s: float = 0.0


class Learner:
    """Holds the policy, its optimiser and the trees that wait to be trained.

    Args:
        model_path: folder of a Hugging Face causal language model with its tokenizer.
        run_dir: the run's folder; ``weights/``, ``checkpoints/`` and ``trees/`` in it are used.
        settings: see ``LearnerConfig``.
        total_steps: steps of the whole run, over which the learning rate decays.
        seed: of the order in which episodes fall into minibatches.
        keep: newest checkpoints that stay on disk.
        keep_best: checkpoints of the highest score that stay besides.
        keep_weights: newest published versions that stay on disk.
        ranks: with whom it works together; with several, every method but ``add`` is called on all of them in the same
            order, and each gives the same.

    Starts at policy version 0; ``load`` goes on from a checkpoint.
    """

    def __init__(
        self,
        model_path: Path,
        run_dir: Path,
        settings: LearnerConfig,
        *,
        total_steps: int,
        seed: int = 0,
        keep: int = 3,
        keep_best: int = 0,
        keep_weights: int = 3,
        ranks: Ranks = ALONE,
    ) -> None:
        torch.set_num_threads(settings.threads)
        # Progress bars of loading and saving would tear the run's own display.
        transformers_logging.disable_progress_bar()
        self._source = Path(model_path)
        self._run_dir = Path(run_dir)
        self._settings = settings
        self._seed = seed
        self._keep_weights = keep_weights
        self._ranks = ranks
        self._checkpoints = checkpoints.Checkpoints(self._run_dir / "checkpoints", keep, keep_best, ranks)
        self._trees: dict[str, Tree] = {}
        self._version = 0
        self._published: int | None = None
        self._last: tuple[int, dict[str, float]] | None = None
        self._whole = True
        self._used = False
        self._policy = TrainedModel(self._source, settings, total_steps, ranks=ranks)
        self._loss = loss_settings(settings, self._policy.layout)
        self._critic = critic_of(self._source, settings, total_steps, self._policy, self._loss, ranks)

    @property
    def policy_version(self) -> int:
        """Training steps behind the present weights."""
        return self._version

    def ping(self) -> bool:
        """True, as soon as nothing else runs."""
        return True

    def add(self, data: bytes) -> None:
        """Take a packed tree; a tree of the same episode replaces the one held. Raises CodecError."""
        tree = codec.decode(data)
        self._trees[str(tree.meta["episode"])] = tree

    def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        """Learn from exactly these episodes (id -> group) and publish version ``step + 1``.

        Advantages are computed over the episodes named, without those cut by a budget when
        ``train_truncated`` is off. With no spread in any group there is no optimiser step, and the version
        is published all the same. Naming the step trained last again changes nothing and returns the same
        metrics.

        Returns:
            Flat metrics: ``train/...`` and ``seconds/learner_...``. Ratios and clip shares are over tokens
            with an advantage, everything else over all trained tokens; what has no value is left out.

        Raises:
            ValueError: ``step`` is not the policy's version, or an episode's tree has no finite reward.
            FileNotFoundError: an episode's tree is neither held nor on disk.
            RuntimeError: an earlier step was broken off after it had touched the weights.
        """
        if self._last is not None and self._last[0] == step:
            return dict(self._last[1])
        if not self._whole:
            raise RuntimeError(
                f"training of step {self._version} was broken off, so the weights are of no version: load a "
                "checkpoint and train again from there"
            )
        if step != self._version:
            raise ValueError(
                f"got step {step} with policy version {self._version}, expected them equal: load a "
                "checkpoint at or before the step and train the steps between again"
            )
        self._used = True
        began = time.perf_counter()
        episodes, truncated = self._kept(step, groups)
        samples, metrics = self._samples(episodes)
        metrics["train/episodes_truncated_left_out"] = truncated
        prepared = time.perf_counter()
        every = flat(samples)
        head = self._critic.head if self._critic else None
        filled, entropies, computed = with_old(self._policy.model, every, self._loss, self._ranks, head)
        metrics["train/tokens_of_paths"] = sum(len(sample.ids) for sample in every)
        metrics["train/tokens_computed"] = computed
        metrics |= self._sampling_statistics(filled, entropies)
        samples = nested(filled, samples)
        if self._critic:
            samples, found = self._critic.judged(samples, [episode.reward for episode in episodes])
            metrics |= found
        samples, rejected = without_rejected(samples, self._settings.reject_mean, self._settings.reject_max)
        metrics["train/episodes_rejected"] = rejected
        scored = time.perf_counter()
        self._whole = False
        moved = self._optimise(step, samples)
        self._whole = True
        metrics |= self._step_statistics(step, moved)
        published = time.perf_counter()
        self._version = step + 1
        self.publish()
        ended = time.perf_counter()
        metrics |= {
            "seconds/learner_prepare": prepared - began,
            "seconds/learner_old": scored - prepared,
            "seconds/learner_forward": sum(p.forward_s for p in moved.passes),
            "seconds/learner_backward": sum(p.backward_s for p in moved.passes),
            "seconds/learner_optimiser": moved.optimiser_s,
            "seconds/learner_critic": moved.critic_s,
            "seconds/learner_publish": ended - published,
            "seconds/learner": ended - began,
        }
        self._trees = {name: tree for name, tree in self._trees.items() if tree.meta["step"] > step}
        self._last = (step, metrics)
        return dict(metrics)

    def publish(self) -> Path:
        """Write the present weights as the present version into ``run_dir/weights``; returns their folder."""
        folder = self._run_dir / "weights"
        tensors = self._policy.weights()
        if self._ranks.rank == 0:
            weights.publish(tensors, folder, self._version, keep=self._keep_weights)
        self._published = self._version
        return folder / f"v{self._version:08d}"

    def save(self, step: int, score: float | None = None, wait: bool = True) -> int:
        """Checkpoint the state after ``step`` training steps, the present one; returns the newest step that is whole.

        ``score``: by which the best are told. With ``wait`` off it is written while training goes on, and is there
        under its name once it is whole. Nothing in a training step draws from a global generator; its state is kept
        for what is yet to come. Raises ValueError for another step than the present one, and what went wrong with the
        writing of the one before.
        """
        if step != self._version:
            raise ValueError(f"got step {step}, expected {self._version}: only the present state can be saved")
        if self._published != self._version:
            self.publish()
        stepped = self._policy.stepped
        trainer: dict[str, Any] = {
            "steps": step,
            "seed": self._seed,
            "stepped": stepped,
            "score": score,
            "rng": torch.get_rng_state(),
        }
        trainer["shape"] = shape_of(self._settings)
        published = (self._run_dir / "weights" / f"v{step:08d}").resolve()
        state = self._policy.state(stepped)
        if self._critic:
            trainer["critic_stepped"] = self._critic.stepped
            state["critic"] = self._critic.state(self._critic.stepped)
        before = self._checkpoints.finish()
        self._checkpoints.save(step, state, trainer, published, self._source, self._settings.dtype)
        return self._checkpoints.finish() if wait else before

    def load(self, step: int | None = None) -> int:
        """Go on from the checkpoint after ``step`` steps, or from the newest, and publish its weights.

        With no step named and no checkpoint there, the start is the model given, as version 0; publishing it
        makes sure that nobody takes what an earlier run left in the folder for the newest. Returns the policy
        version. Raises FileNotFoundError when a step was named that has no checkpoint, and ValueError when the
        settings train other tensors than the checkpoint has.
        """
        self._checkpoints.finish()
        # One rank looks: what it finds may be gone when the next one looks.
        mine = checkpoints.find(self._run_dir / "checkpoints", step) if self._ranks.rank == 0 else None
        found = self._ranks.exchange(mine)[0]
        if self._used:
            self._policy.open(self._source)
            if self._critic:
                self._critic.open(self._source)
        self._used = True
        self._version = 0
        if found:
            self._version, path = found
            trainer = checkpoints.read_trainer(path)
            if "shape" in trainer:
                check_shape(path, trainer["shape"], self._settings)
            state = self._policy.state(trainer["stepped"])
            if self._critic:
                state["critic"] = self._critic.state(trainer["critic_stepped"])
            checkpoints.load(path, state, self._ranks)
            if self._critic:
                self._critic.restore(state.pop("critic"))
            self._policy.restore(state)
            torch.set_rng_state(trainer["rng"])
        self._last = None
        self._whole = True
        self.publish()
        return self._version

    def _kept(self, step: int, groups: Mapping[str, str]) -> tuple[list[_Episode], int]:
        """The episodes to train, in an order that does not depend on arrival, and how many were left out."""
        kept = []
        for name in sorted(groups):
            tree = self._tree(step, name)
            if tree.meta["status"] == "truncated" and not self._settings.train_truncated:
                continue
            reward = tree.meta["reward"]
            if reward is None or not math.isfinite(reward):
                raise ValueError(
                    f"episode {name}: got reward {reward} and status {tree.meta['status']!r}, expected a "
                    "finite reward: train only episodes that were graded"
                )
            kept.append(_Episode(name, groups[name], float(reward), tree))
        return kept, len(groups) - len(kept)

    def _tree(self, step: int, name: str) -> Tree:
        if name in self._trees:
            return self._trees[name]
        path = self._run_dir / "trees" / f"step_{step:06d}" / f"{name}.tree"
        if not path.is_file():
            raise FileNotFoundError(
                f"episode {name}: got no tree in memory, expected {path}: send it by add(), or keep the "
                "trees of all steps since the last checkpoint (trees.keep_steps)"
            )
        return codec.decode(path.read_bytes())

    def _samples(self, episodes: Sequence[_Episode]) -> tuple[list[list[Sample]], dict[str, float]]:
        """The samples of each episode, with its advantage, and what there is to count before the step."""
        names = sorted({episode.group for episode in episodes})
        number = {name: i for i, name in enumerate(names)}
        rewards = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
        groups = torch.tensor([number[episode.group] for episode in episodes], dtype=torch.int64)
        # The critic's advantages replace the ones: what is left of them is each token's credit.
        estimate = ESTIMATORS.get(self._settings.advantage, lambda rewards, groups: torch.ones_like(rewards))  # noqa: ARG005
        advantages = estimate(rewards, groups)
        spread = len(set(groups[has_spread(rewards, groups)].tolist()))
        samples = []
        kinds: Counter[str] = Counter()
        for episode, advantage in zip(episodes, advantages.tolist(), strict=True):
            paths = linearise(episode.tree, self._settings.aux_credit)
            found = [sample_of(p, advantage, self._settings.device) for p in paths]
            samples.append([sample for sample in found if sample is not None])
            for node in episode.tree.nodes:
                kinds[node.kind] += len(node) if node.trained else 0
        metrics: dict[str, float] = {
            "train/episodes": len(episodes),
            "train/groups": len(names),
            "train/groups_without_spread": len(names) - spread,
            "train/groups_without_spread_share": (len(names) - spread) / max(1, len(names)),
            "train/paths": sum(map(len, samples)),
            "train/tokens": sum(kinds.values()),
        }
        metrics |= {f"train/tokens_{kind}": count for kind, count in sorted(kinds.items()) if count}
        if episodes and not self._critic:
            metrics["train/advantage_mean"] = advantages.mean().item()
            metrics["train/advantage_std"] = advantages.std(correction=0).item()
            metrics["train/advantage_max"] = advantages.abs().max().item()
        return samples, metrics

    def _sampling_statistics(self, samples: Sequence[Sample], entropies: torch.Tensor) -> dict[str, float]:
        if not samples:
            return {}
        old = torch.cat([sample.old for sample in samples])
        mu = torch.cat([sample.mu for sample in samples])
        behind = self._version - torch.cat([sample.versions for sample in samples])
        statistics = mismatch_statistics(old, mu, self._loss.objective)
        statistics["entropy"] = entropies.mean().item()
        statistics["staleness_mean"] = behind.double().mean().item()
        statistics["staleness_max"] = behind.max().item()
        return {f"train/{key}": value for key, value in statistics.items()}

    def _optimise(self, step: int, episodes: Sequence[Sequence[Sample]]) -> _Moved:
        """Optimiser steps over shares of the episodes, whose order depends on the seed and the step only."""
        self._policy.begin(step)
        alone = self._critic is not None and self._critic.begin(step)
        head = self._critic.head if self._critic else None
        shuffler = random.Random(f"critic/{self._seed}/{step}")
        moved = _Moved()
        for mine in self._minibatches(step, episodes):
            done = None
            if not alone:
                done = accumulate(self._policy.model, mine, self._loss, self._ranks, head)
                self._apply(done, moved)
            if self._critic:
                began = time.perf_counter()
                moved.critic.append(self._critic.learn(mine, done, shuffler))
                moved.critic_s += time.perf_counter() - began
        return moved

    def _apply(self, done: Pass, moved: _Moved) -> None:
        if not done.ran:
            moved.idle += 1
            return
        began = time.perf_counter()
        norm = self._policy.apply(done.loss + done.value_loss)
        moved.optimiser_s += time.perf_counter() - began
        if math.isnan(norm):
            moved.broken += 1
        else:
            moved.passes.append(done)
            moved.norms.append(norm)

    def _minibatches(self, step: int, episodes: Sequence[Sequence[Sample]]) -> Iterator[list[list[Sample]]]:
        order = [list(episode) for episode in episodes if episode]
        shuffler = random.Random(f"{self._seed}/{step}")
        for _ in range(self._settings.epochs):
            shuffler.shuffle(order)
            for share in range(min(self._settings.minibatches, len(order))):
                yield order[share :: self._settings.minibatches]

    def _step_statistics(self, step: int, moved: _Moved) -> dict[str, float]:
        metrics: dict[str, float] = {
            "train/learning_rate": self._policy.learning_rate(step),
            "train/optimiser_steps": len(moved.passes),
            "train/optimiser_steps_without_advantage": moved.idle,
            "train/optimiser_steps_not_finite": moved.broken,
        }
        if moved.passes:
            tokens = sum(done.tokens for done in moved.passes)
            metrics["train/loss"] = sum(done.loss * done.tokens for done in moved.passes) / tokens
            metrics["train/grad_norm"] = sum(moved.norms) / len(moved.norms)
            metrics["train/grad_norm_max"] = max(moved.norms)
            theta, old, advantages, sequence = (
                [part for done in moved.passes for part in getattr(done, name)]
                for name in ("theta", "old", "advantages", "sequence")
            )
            statistics = ratio_statistics(
                torch.cat(theta),
                torch.cat(old),
                torch.cat(advantages),
                self._loss.objective,
                torch.cat(sequence) if sequence else None,
            )
            metrics |= {f"train/{key}": value for key, value in statistics.items()}
        if moved.critic:
            metrics["train/value_loss"] = sum(loss for loss, _ in moved.critic) / len(moved.critic)
            metrics["train/critic_grad_norm"] = sum(norm for _, norm in moved.critic) / len(moved.critic)
        return metrics
