"""The making of the tiny policy: imitate an imperfect expert until reinforcement learning can begin.

Invariant: held-out tasks decide only whether a finished policy is kept. When to stop is decided on fresh
tasks of the training split, by the exact chance of the expert's right way, which has no sampling noise.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from actors.rendering import Rendering
from algos.habits import Habit, misled, of_levels, of_pairs
from algos.imitation import Imitator, Transcript, chances, drill, transcribe, transcribe_outside
from algos.overheard import overhear
from algos.recipe import REPORT, ColdstartError, ColdstartReport, Recipe
from algos.rehearsal import rehearse, success
from algos.tiny import WORDINGS, build_model, build_tokenizer
from envs.harnesses.agent_loop.parts import BASE
from envs.sandbox.create import Backend
from envs.space import SPACE
from envs.tasks.desk import FAMILIES, expert, generate


def make(
    out: Path,
    seed: int,
    recipe: Recipe,
    progress: Callable[[str], None],
    tick: Callable[[int, int], None],
    backend: Backend,
) -> ColdstartReport:
    """Make the policy in ``out``: tokenizer, ``config.json``, ``model.safetensors``, ``coldstart.json``.

    Raises ColdstartError when no attempt comes out well enough.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        return Apprentice(out, seed, recipe, progress, tick, backend).make()
    finally:
        torch.set_num_threads(threads)


class Apprentice:
    """One cold start. ``progress`` gets lines of text, ``tick`` the step and how many are likely."""

    def __init__(
        self,
        out: Path,
        seed: int,
        recipe: Recipe,
        progress: Callable[[str], None],
        tick: Callable[[int, int], None],
        backend: Backend,
    ) -> None:
        self.began = time.monotonic()
        self.out, self.seed, self.recipe = out, seed, recipe
        self.progress, self.tick, self.backend = progress, tick, backend
        self.habits: list[Habit] = []
        self.harnesses = [BASE]
        if recipe.space is not None:
            self.harnesses = [SPACE.name(point) for point in SPACE.points()]
            pairs = of_pairs(recipe.space.pairs, recipe.space.pair_chance, recipe.space.pair_seed)
            self.habits = [*of_levels(recipe.space.level_chance), *pairs]
        outside = recipe.space.outside if recipe.space is not None else ()
        self.heard = [overhear(name, backend) for name in outside]
        build_tokenizer(out, recipe.space is not None, [text for one in self.heard for text in one.phrases()])
        self.rendering = Rendering(out)
        progress("writing the expert's transcripts")
        self.transcripts = self._transcripts()
        fresh = generate("train", recipe.probes * len(FAMILIES), seed + 2)
        self.probe = [
            transcribe(self.rendering, task, expert(task, Random(seed)), harness)
            for task, harness in zip(fresh, self._drawn(len(fresh)), strict=True)
        ]
        self.heldout = generate("heldout", recipe.measured * len(FAMILIES), seed + 3)

    def _transcripts(self) -> list[Transcript]:
        rng, recipe = Random(self.seed), self.recipe
        tasks = generate("train", recipe.transcripts, self.seed + 1)
        made = []
        # Without a draw of its own for a recipe that needs none.
        shares = [recipe.space.outside_share] * len(self.heard) if recipe.space is not None else []
        for index, (task, drawn) in enumerate(zip(tasks, self._drawn(len(tasks)), strict=True)):
            nth, habit = index // len(FAMILIES), recipe.habits.get(task.family, recipe.habit)
            in_base = recipe.space is not None and rng.random() < recipe.space.base_share
            harness = BASE if in_base else drawn
            turns = misled(expert(task, rng), task, harness, self.habits, rng) if self.habits else None
            if turns is None:
                turns = expert(task, rng, int((nth + 1) * habit) > int(nth * habit))
            heard = rng.choices([*self.heard, None], [*shares, 1 - sum(shares)])[0] if shares else None
            if heard is not None and not any(turn.tool for turn in turns):
                made.append(transcribe_outside(self.rendering, task, turns, heard))
                continue
            wording = rng.randrange(WORDINGS) if recipe.space is not None else 0
            made.append(transcribe(self.rendering, task, turns, harness, wording))
        return made

    def _drawn(self, count: int) -> list[str]:
        """Harnesses for so many episodes, as often as each other."""
        rng, rounds = Random(f"harnesses {self.seed}"), -(-count // len(self.harnesses))
        return [name for _ in range(rounds) for name in rng.sample(self.harnesses, len(self.harnesses))][:count]

    def make(self) -> ColdstartReport:
        """Attempts until one is good enough; saves it."""
        reasons = []
        for attempt in range(self.recipe.attempts):
            model, report = self._attempt(attempt)
            reason = report.fault(self.recipe)
            if not reason:
                _save(model, self.out)
                (self.out / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
                return report
            reasons.append(f"attempt {attempt + 1}: {reason}")
            self.progress(f"starting anew: {reason}")
        raise ColdstartError(
            f"seed {self.seed}: got no policy of the asked quality, expected one within "
            f"{self.recipe.attempts} attempts; try another seed\n" + "\n".join(reasons)
        )

    def _attempt(self, attempt: int) -> tuple[PreTrainedModel, ColdstartReport]:
        """One initialisation, trained and measured, in as many rounds as it needs and may have."""
        recipe = self.recipe
        model = build_model(len(self.rendering.tokenizer), self.seed * recipe.attempts + attempt)
        imitator = Imitator(model, recipe.muon_lr, recipe.adam_lr, recipe.prompt_weight)
        losses: list[float] = []
        for round_ in range(recipe.rounds):
            self._train(imitator, losses, recipe.more_steps if round_ else recipe.full_steps)
            report = self._measure(model, attempt, losses)
            reason = report.fault(recipe)
            if not reason:
                break
            self.progress(f"going on: {reason}")
        return model, report

    def _train(self, imitator: Imitator, losses: list[float], at_most: int) -> None:
        """Train at full learning rates until two looks are good, or ``at_most`` steps; then decay."""
        recipe, start = self.recipe, len(losses)
        looks: list[dict[str, float]] = []
        ready: int | None = None
        while ready is None or len(losses) < ready + recipe.decay_steps:
            step = len(losses)
            left = 1.0 if ready is None else 1.0 - (step - ready) / recipe.decay_steps
            scale = min(1.0, (step + 1) / recipe.warmup_steps) * max(0.05, left)
            losses.append(imitator.step(self._batch(step), scale))
            step += 1
            likely = (start + at_most if ready is None else ready) + recipe.decay_steps
            self.tick(step, likely)
            if ready is not None:
                continue
            if step >= recipe.first_look and step % recipe.look_every == 0:
                looks.append(chances(imitator.model, self.probe))
                low, high = min(looks[-1].values()), max(looks[-1].values())
                self.progress(f"imitating: step {step}, right in {low:.0%} to {high:.0%} by family")
                if len(looks) > 1 and _least(looks[-2:]) >= recipe.goal:
                    ready = step
            if step - start >= at_most:
                ready = step

    def _batch(self, step: int) -> list[Transcript]:
        recipe, many = self.recipe, len(self.transcripts)
        batch = [self.transcripts[(step * recipe.batch + i) % many] for i in range(recipe.batch)]
        if step < recipe.drill_steps:
            rng = Random(f"{self.seed} drill {step}")
            batch += [drill(self.rendering, rng, recipe.drill_words) for _ in range(recipe.drills)]
        return batch

    def _measure(self, model: PreTrainedModel, attempt: int, losses: list[float]) -> ColdstartReport:
        self.progress("measuring: rollouts with a real shell")
        # Draws differ between measurements: a seed that is unlucky once would be unlucky again.
        seed = 1_000_003 * self.seed + len(losses) + 7919 * attempt
        greedy = self._played(model, 0.0, seed, self._drawn(len(self.heldout)))
        sampled = self._played(model, 1.0, seed, self._drawn(2 * len(self.heldout)))
        base = {}
        if self.recipe.space is not None:
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                families = self._played(model, temperature, seed, [BASE])
                base[name] = sum(families.values()) / len(families)
        return ColdstartReport(
            seed=self.seed,
            attempt=attempt,
            steps=len(losses),
            seconds=round(time.monotonic() - self.began, 1),
            parameters=sum(p.numel() for p in model.parameters()),
            vocabulary=len(self.rendering.tokenizer),
            loss=sum(losses[-20:]) / len(losses[-20:]),
            greedy=greedy,
            sampled=sampled,
            recipe=dataclasses.asdict(self.recipe),
            base=base,
        )

    def _played(self, model: PreTrainedModel, temperature: float, seed: int, harnesses: list[str]) -> dict[str, float]:
        """Success by family on the held-out tasks, each twice where it is sampled."""
        tasks = self.heldout * (2 if temperature else 1)
        return success(
            rehearse(
                model,
                self.rendering,
                tasks,
                temperature=temperature,
                seed=seed,
                max_tokens=self.recipe.max_tokens,
                max_turns=self.recipe.max_turns,
                backend=self.backend,
                harnesses=harnesses,
            )
        )


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Like ``save_pretrained``, which draws a progress bar over the caller's display.

    The head is the embedding and is not written; one entry of metadata has one order, so that equal weights
    are equal bytes.
    """
    model.config.save_pretrained(folder)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _least(looks: list[dict[str, float]]) -> float:
    """The least of the families' means over the looks."""
    return min(sum(look[family] for look in looks) / len(looks) for family in looks[0])
