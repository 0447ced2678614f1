"""The settings of the Gymnasium environment. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.base import Config
from configs.judge import JudgeConfig
from configs.proxy import SessionLimits
from configs.schema import HarnessConfig, RewardConfig, RunConfig, SandboxConfig, TreesConfig


class EnvironmentConfig(Config):
    """``Harness-v0``: one harness in one sandbox, whose model API is answered by ``step``."""

    harness: HarnessConfig = Field(default_factory=lambda: HarnessConfig())
    sandbox: SandboxConfig = Field(default_factory=lambda: SandboxConfig())
    limits: SessionLimits = Field(default_factory=lambda: SessionLimits())
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig())
    trees: TreesConfig = Field(default_factory=lambda: TreesConfig())
    judge: JudgeConfig | None = Field(
        None, description="Grades tasks that have a rubric; none: such tasks are an error."
    )
    tokenizer: Path | None = Field(
        None, description="Folder of a Hugging Face tokenizer; none: prompts have no ids, and answers are words."
    )
    renderer: Literal["auto", "qwen3", "qwen3.5", "default"] = Field(
        "auto", description="How chats become tokens: a renderer by name, or found by the tokenizer's family."
    )
    context: int = Field(
        131_072, ge=32, description="Longest sequence in tokens, prompt and answer together, as the harness is told."
    )
    temperature: float = Field(
        1.0, ge=0, description="At which the log-probabilities of answers are; it is kept in the tree."
    )

    def run(self) -> RunConfig:
        """The settings of the sandbox actor that serves the environment."""
        return RunConfig.model_validate(
            {
                "steps": 0,
                "harness": self.harness,
                "sandbox": self.sandbox,
                "reward": self.reward,
                "trees": self.trees,
                "judge": self.judge,
                "proxy": {"limits": self.limits},
                "engine": {"max_len": self.context},
            }
        )


def settings(**given: Any) -> EnvironmentConfig:
    """The settings from what ``gymnasium.make`` is given; ``harness`` and ``sandbox`` may be a name alone.

    What a sandbox may take in wall time is that of the session, unless it is given: an agent may think long. No room
    is kept ready, unless it is asked for. Raises pydantic's ValidationError.
    """
    plain: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, key in (("harness", "name"), ("sandbox", "backend")):
        if isinstance(plain.get(name), str):
            plain[name] = {key: plain[name]}
    config = EnvironmentConfig.model_validate(plain)
    own = {"wall_s": config.limits.wall_s, "pool": 0}
    unset = {name: value for name, value in own.items() if name not in config.sandbox.model_fields_set}
    return config.model_copy(update={"sandbox": config.sandbox.model_copy(update=unset)})
