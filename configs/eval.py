"""The settings of an evaluation. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Config
from configs.harness import BASE_LEVELS, HarnessConfig, SpaceConfig
from configs.judge import JudgeConfig
from configs.proxy import ProxyConfig
from configs.schema import (
    EngineConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SandboxConfig,
    TaskPathConfig,
    TreesConfig,
    WandbConfig,
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""What may be a column of a table and a part of a path."""


class EvaluatedModelConfig(ModelConfig):
    """What is measured."""

    path: Path | None = Field(
        None,
        description="A run folder, one of its checkpoints, or a Hugging Face model folder; required. With "
        "engine.kind=endpoint it is only what tokens are counted with.",
    )
    checkpoint: Literal["newest", "best"] | int = Field(
        "newest", description="Of a run folder: the newest, the best on held-out tasks, or the one after so many steps."
    )


class TaskSetConfig(TaskPathConfig):
    """Tasks that are measured together."""

    builtin: Literal["desk", "word"] = Field("desk", description="Which built-in tasks.")
    split: Literal["train", "heldout", "wording"] = Field(
        "heldout", description="Built-in tasks: practised ones, held-out ones, or (desk) such in other wordings."
    )
    limit: int | None = Field(None, ge=1, description="Only the first so many; none: all, or 96 built-in tasks.")
    seed: int = Field(0, ge=0, description="Built-in tasks: the seed of the run whose tasks these are.")
    families: list[str] | None = Field(None, min_length=1, description="Desk tasks: only these families.")
    level: int = Field(1, ge=1, le=2, description="Desk tasks: difficulty.")


class KeptTreesConfig(TreesConfig):
    """What becomes of an episode's calls."""

    keep: Literal["train", "all"] = Field("all", description="all keeps the tree of every episode, train keeps none.")


class RingSpaceConfig(SpaceConfig):
    """A set of harnesses as `space` of a run, or one that is held out from it."""

    which: Literal["training", "near", "far"] = Field(
        "training",
        description="training: the set itself; near: each of it with its last factor one level on; far: the shift of "
        "it that has most harnesses at distance 2 or more. Both are as balanced as the set and hold none of it.",
    )


class RingConfig(Config):
    """Harnesses and task sets whose figures belong together: each task is done in each of the harnesses."""

    name: str = Field(pattern=NAME, description="What tables call it.")
    harnesses: list[HarnessConfig] = Field(
        min_length=1, description="As `mix` of a run; with `space` one, which says all but the levels."
    )
    space: RingSpaceConfig | None = Field(
        None, description="A set out of the space of the transparent loop; none: the harnesses as they are."
    )
    tasks: list[str] | None = Field(None, min_length=1, description="Names of the sets; none: all.")

    @model_validator(mode="after")
    def _one_beside_a_space(self) -> RingConfig:
        if self.space is not None:
            one = self.harnesses[0]
            if len(self.harnesses) > 1 or one.name != "agent_loop" or one.label or one.levels != BASE_LEVELS:
                raise ValueError(
                    f"space: got it beside harnesses {[each.known_as for each in self.harnesses]}, expected one "
                    "agent_loop without label and levels: those of a space are called by their names"
                )
        return self


class EvaluationConfig(Config):
    """One model x the harnesses of rings x task sets x runs."""

    name: str = Field("eval", pattern=NAME, description="Begins the name of the folder, and names the model in tables.")
    dir: Path = Field(Path("evals"), description="Where folders of evaluations are made.")
    seed: int = Field(0, ge=0, description="Seed of the sampling; every run has one of its own from it.")
    runs: int = Field(3, ge=1, description="Independent runs of every task in every harness: the k of pass@k.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy, whose runs are alike.")
    success: float = Field(1.0, gt=0, le=1, description="Reward from which on an episode has passed.")
    transcripts: bool = Field(True, description="Keep what was said in each episode, in transcripts/.")
    model: EvaluatedModelConfig = Field(default_factory=EvaluatedModelConfig)
    tasks: dict[Annotated[str, Field(pattern=NAME)], TaskSetConfig] = Field(
        default_factory=lambda: {"heldout": TaskSetConfig()}, min_length=1, description="Task sets by their names."
    )
    rings: list[RingConfig] = Field(
        default_factory=lambda: [RingConfig(name="all", harnesses=[HarnessConfig()])],
        min_length=1,
        description="What is measured where.",
    )
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    trees: KeptTreesConfig = Field(default_factory=lambda: KeptTreesConfig())
    reward: RewardConfig = Field(default_factory=RewardConfig)
    judge: JudgeConfig | None = Field(
        None, description="Grades tasks that have a rubric; none: such tasks are an error."
    )

    @property
    def harnesses(self) -> dict[str, HarnessConfig]:
        """Those of all rings by what logs call them."""
        return {one.known_as: one for ring in self.rings for one in ring.harnesses}

    def sets(self, ring: RingConfig) -> list[str]:
        """The names of a ring's task sets."""
        return list(self.tasks) if ring.tasks is None else ring.tasks

    def parts(self) -> RunConfig:
        """The settings of a run without training that has the same parts."""
        return RunConfig(
            name=self.name,
            dir=self.dir,
            steps=0,
            seed=self.seed,
            model=ModelConfig(renderer=self.model.renderer),
            mix=list(self.harnesses.values()),
            sandbox=self.sandbox,
            proxy=self.proxy,
            engine=self.engine,
            trees=self.trees,
            reward=self.reward,
            judge=self.judge,
            wandb=WandbConfig(mode="disabled"),
        )

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationConfig:
        for name, count in Counter(ring.name for ring in self.rings).items():
            if count > 1:
                raise ValueError(f"rings: got {count} of the name {name!r}, expected a name of its own for each")
        for number, ring in enumerate(self.rings):
            labels = [one.known_as for one in ring.harnesses]
            if len(set(labels)) < len(labels):
                raise ValueError(
                    f"rings.{number}.harnesses: got {labels}, expected a label for each that tells it apart"
                )
            if unknown := sorted(set(self.sets(ring)) - self.tasks.keys()):
                raise ValueError(
                    f"rings.{number}.tasks: got {unknown[0]!r}, expected names of tasks: {', '.join(self.tasks)}"
                )
            for one in ring.harnesses:
                if one != self.harnesses[one.known_as]:
                    raise ValueError(
                        f"rings.{number}.harnesses: got another {one.known_as!r} than in a later ring, expected a "
                        "label for each that tells them apart"
                    )
        for name, tasks in self.tasks.items():
            if tasks.path is None and tasks.builtin == "word" and tasks.split == "wording":
                raise ValueError(f"tasks.{name}.split: got wording, which only desk tasks have; expected heldout")
        return self
