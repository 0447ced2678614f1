"""The learner: a step's trees in, new weights with the next version number out.

Invariant: ``train(s)`` takes the policy from version ``s`` to ``s + 1`` and depends on nothing but the state
at ``s``, the trees of the named episodes, the settings and the seed. Whoever loads the checkpoint of version
``s`` and trains the same steps again gets the same weights bit by bit (same machine, same number of threads).

``Learner`` is a plain class; a run makes a Ray actor of it. It keeps in memory only what has not been
trained: trees lie on disk as well, so a restarted learner reads again what it was sent before.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from actors import checkpoints
from actors.engines import weights
from algos.advantages import ESTIMATORS, has_spread
from algos.batching import Sample, layout_for, sample_of
from algos.losses import mismatch_statistics, ratio_statistics
from algos.step import LossSettings, Pass, accumulate, apply, with_old
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
    optimiser_s: float = 0.0


class Learner:
    """Holds the policy, its optimiser and the trees that wait to be trained.

    Args:
        model_path: folder of a Hugging Face causal language model with its tokenizer.
        run_dir: the run's folder; ``weights/``, ``checkpoints/`` and ``trees/`` in it are used.
        settings: see ``LearnerConfig``.
        total_steps: steps of the whole run, over which the learning rate decays.
        seed: of the order in which episodes fall into minibatches.
        keep: newest checkpoints that stay on disk.
        keep_weights: newest published versions that stay on disk.

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
        keep_weights: int = 3,
    ) -> None:
        torch.set_num_threads(settings.threads)
        # Progress bars of loading and saving would tear the run's own display.
        transformers_logging.disable_progress_bar()
        self._source = Path(model_path)
        self._run_dir = Path(run_dir)
        self._settings = settings
        self._total_steps = total_steps
        self._seed = seed
        self._keep = keep
        self._keep_weights = keep_weights
        self._trees: dict[str, Tree] = {}
        self._version = 0
        self._last: tuple[int, dict[str, float]] | None = None
        self._whole = True
        self._open(self._source)

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
        began = time.perf_counter()
        episodes, truncated = self._kept(step, groups)
        samples, metrics = self._samples(episodes)
        metrics["train/episodes_truncated_left_out"] = truncated
        prepared = time.perf_counter()
        every = [sample for episode in samples for sample in episode]
        budget = self._settings.max_tokens_per_microbatch
        filled, entropies, computed = with_old(self._model, every, budget, self._layout, self._settings.logit_chunk)
        metrics["train/tokens_of_paths"] = sum(len(sample.ids) for sample in every)
        metrics["train/tokens_computed"] = computed
        known = iter(filled)
        samples = [[next(known) for _ in episode] for episode in samples]
        scored = time.perf_counter()
        metrics |= self._sampling_statistics(filled, entropies)
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
            "seconds/learner_publish": ended - published,
            "seconds/learner": ended - began,
        }
        self._trees = {name: tree for name, tree in self._trees.items() if tree.meta["step"] > step}
        self._last = (step, metrics)
        return dict(metrics)

    def publish(self) -> Path:
        """Write the present weights as the present version into ``run_dir/weights``; returns their folder."""
        folder = self._run_dir / "weights"
        return weights.publish(self._model.state_dict(), folder, self._version, keep=self._keep_weights)

    def save(self, step: int) -> Path:
        """Checkpoint the state after ``step`` training steps, the present one; returns its folder.

        Nothing in a training step draws from a global generator, so weights, moments and the step are the
        whole state. Raises ValueError for another step than the present one.
        """
        if step != self._version:
            raise ValueError(f"got step {step}, expected {self._version}: only the present state can be saved")
        trainer = {"steps": step, "optimizer": self._optimizer.state_dict()}
        folder = self._run_dir / "checkpoints"
        return checkpoints.save(folder, step, self._model, trainer, self._source, self._keep)

    def load(self, step: int | None = None) -> int:
        """Go on from the checkpoint after ``step`` steps, or from the newest, and publish its weights.

        With no step named and no checkpoint there, the start is the model given, as version 0; publishing it
        makes sure that nobody takes what an earlier run left in the folder for the newest. Returns the policy
        version. Raises FileNotFoundError when a step was named that has no checkpoint.
        """
        found = checkpoints.find(self._run_dir / "checkpoints", step)
        self._version, path = found or (0, self._source)
        self._open(path)
        if found:
            self._optimizer.load_state_dict(checkpoints.read_trainer(path)["optimizer"])
        self._last = None
        self._whole = True
        self.publish()
        return self._version

    def _open(self, path: Path) -> None:
        # Evaluation mode also while training: dropout would make the ratio theta/old differ from 1 by chance.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        self._model: Any = model.to(self._settings.device)
        self._layout = layout_for(model, self._settings.layout)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
        )

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
        advantages = ESTIMATORS[self._settings.advantage](rewards, groups)
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
        if episodes:
            metrics["train/advantage_std"] = advantages.std(correction=0).item()
            metrics["train/advantage_max"] = advantages.abs().max().item()
        return samples, metrics

    def _sampling_statistics(self, samples: Sequence[Sample], entropies: torch.Tensor) -> dict[str, float]:
        if not samples:
            return {}
        old = torch.cat([sample.old for sample in samples])
        mu = torch.cat([sample.mu for sample in samples])
        behind = self._version - torch.cat([sample.versions for sample in samples])
        statistics = mismatch_statistics(old, mu, tis_cap=self._settings.tis_cap)
        statistics["entropy"] = entropies.mean().item()
        statistics["staleness_mean"] = behind.double().mean().item()
        statistics["staleness_max"] = behind.max().item()
        return {f"train/{key}": value for key, value in statistics.items()}

    def _optimise(self, step: int, episodes: Sequence[Sequence[Sample]]) -> _Moved:
        """Optimiser steps over shares of the episodes, whose order depends on the seed and the step only."""
        settings = self._settings
        loss = LossSettings(
            settings.clip_low,
            settings.clip_high,
            settings.tis_cap,
            settings.max_tokens_per_microbatch,
            self._layout,
            settings.logit_chunk,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        order = [list(episode) for episode in episodes if episode]
        random.Random(f"{self._seed}/{step}").shuffle(order)
        moved = _Moved()
        for share in range(min(settings.minibatches, len(order))):
            mine = [sample for episode in order[share :: settings.minibatches] for sample in episode]
            done = accumulate(self._model, mine, loss)
            if not done.theta:
                moved.idle += 1
                continue
            began = time.perf_counter()
            norm = apply(self._optimizer, self._model.parameters(), done.loss, settings.grad_clip)
            moved.optimiser_s += time.perf_counter() - began
            if math.isnan(norm):
                moved.broken += 1
                continue
            moved.passes.append(done)
            moved.norms.append(norm)
        return moved

    def _step_statistics(self, step: int, moved: _Moved) -> dict[str, float]:
        metrics: dict[str, float] = {
            "train/learning_rate": self.learning_rate(step),
            "train/optimiser_steps": len(moved.passes),
            "train/optimiser_steps_without_advantage": moved.idle,
            "train/optimiser_steps_not_finite": moved.broken,
        }
        if moved.passes:
            tokens = sum(done.tokens for done in moved.passes)
            metrics["train/loss"] = sum(done.loss * done.tokens for done in moved.passes) / tokens
            metrics["train/grad_norm"] = sum(moved.norms) / len(moved.norms)
            metrics["train/grad_norm_max"] = max(moved.norms)
            theta, old, advantages = (
                torch.cat([part for done in moved.passes for part in getattr(done, name)])
                for name in ("theta", "old", "advantages")
            )
            statistics = ratio_statistics(
                theta,
                old,
                advantages,
                clip_low=self._settings.clip_low,
                clip_high=self._settings.clip_high,
            )
            metrics |= {f"train/{key}": value for key, value in statistics.items()}
        return metrics

    def learning_rate(self, step: int) -> float:
        """Of a training step: a linear warm-up, then a decay to ``final_lr_factor`` at the last step."""
        settings = self._settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        span = max(1, self._total_steps - 1 - settings.warmup_steps)
        done = min(1.0, max(0.0, (step - settings.warmup_steps) / span))
        fall = done if settings.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
        return settings.learning_rate * warm * (1 - (1 - settings.final_lr_factor) * fall)


class RestoredLearner(Learner):
    """A learner that begins at the newest checkpoint of its run, so that a restart has a known version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.load()
