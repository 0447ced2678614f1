"""Settings of harnesses: what one is like, and which of several a task is practised in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Config

BASE_LEVELS = "S0T0O0C0W0"


class SpaceConfig(Config):
    """A set of harnesses of the transparent loop; each is the harness of `harness` with its own levels."""

    set: Literal["paper18", "all", "random", "orthogonal", "names"] = Field(
        "paper18",
        description="paper18: the paper's 18, where all levels and all pairs of levels occur equally often; "
        "orthogonal: `size` such harnesses of any space; random: `size` drawn by `seed`; all; names: those of `names`.",
    )
    size: int = Field(18, ge=1, description="Harnesses of a random or orthogonal set.")
    names: list[str] = Field([], description="Harnesses by name, such as S0T2O1C0W1, for set=names.")
    seed: int = Field(0, ge=0, description="Of a random set.")

    @model_validator(mode="after")
    def _names_for_names(self) -> SpaceConfig:
        if (self.set == "names") != bool(self.names):
            raise ValueError(f"set, names: got set={self.set} with names {self.names}, names go with set=names alone")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names: got {self.names}, expected each harness once")
        return self


class AssignmentConfig(Config):
    """Which of several harnesses a task is practised in."""

    kind: Literal["all", "locality", "random", "repeat", "single", "one_factor"] = Field(
        "all",
        description="all: each task in each harness in turn. The others give a task K harnesses in K consecutive "
        "steps, the first of them uniform (its anchor). locality: and the nearest to it in the set; random: and any "
        "others of it; repeat: the anchor K times; single: the anchor (K = 1); one_factor: and some that differ in one "
        "factor, in the set or not.",
    )
    k: int = Field(1, ge=1, description="Harnesses of a task, for every kind but all and single.")

    @model_validator(mode="after")
    def _one_where_single(self) -> AssignmentConfig:
        if self.kind in ("all", "single") and self.k != 1:
            raise ValueError(f"k: got {self.k} with kind={self.kind}, which takes none; leave it out")
        return self


class HarnessConfig(Config):
    """The layer between the policy and the workspace."""

    name: str = Field("agent_loop", description="Which harness; see `python -m envs.harnesses`.")
    label: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="What groups, logs and metrics call it; none: its name.",
    )
    max_turns: int = Field(8, ge=1, description="Model calls after which the loop gives up.")
    command_s: float = Field(10.0, gt=0, description="Wall seconds of one command of the agent.")
    observation_chars: int = Field(8000, ge=100, description="Longest tool result; the middle is cut.")
    levels: str = Field(
        BASE_LEVELS,
        pattern=r"^([A-Z]\d{1,3})+$",
        description="name=agent_loop: the variant of each factor: S system prompt, T tools, O observations, C context, "
        "W workflow.",
    )
    wordings: int | None = Field(
        None,
        ge=0,
        description="name=agent_loop: a seed by which every task gets other wordings of the same variant; none: one.",
    )
    parts: list[Path] = Field(
        [], description="name=agent_loop: Python files with variants or factors of your own (FACTOR and LEVELS)."
    )
    argv: list[str] = Field(
        [],
        description="name=command: the program and its arguments, in which {instruction}, {base_url}, {key}, {model}, "
        "{context}, {max_turns}, {workspace}, {home}, {python} and {mounts.NAME} are filled in; {{ and }} are braces.",
    )
    env: dict[str, str] = Field(
        {}, description="name=command: environment variables besides PATH, HOME and LANG; filled in as argv."
    )
    files: dict[str, str] = Field(
        {}, description="name=command: files to write, by their path below the home; contents filled in as argv."
    )
    mounts: dict[str, Path] = Field(
        {}, description="name=command: files and folders of this machine to show read-only, each by a NAME of its own."
    )
    done_codes: list[int] = Field(
        [0], min_length=1, description="name=command: exit codes that mean that the harness came to its own end."
    )
    max_turns_codes: list[int] = Field(
        [],
        description="name=command: exit codes that mean that it gave up at a limit of its own; any other is an error.",
    )

    @property
    def known_as(self) -> str:
        """The label; where there is none, the levels that are not the base's, or the name."""
        return self.label or (self.name if self.levels == BASE_LEVELS else self.levels)

    @model_validator(mode="after")
    def _only_of_agent_loop(self) -> HarnessConfig:
        own = ("levels", "wordings", "parts")
        if self.name != "agent_loop" and (given := [n for n in own if getattr(self, n) != _default(n)]):
            raise ValueError(
                f"{', '.join(given)}: got a setting that only name=agent_loop has, and name={self.name}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _only_of_command(self) -> HarnessConfig:
        own = {"argv", "env", "files", "mounts", "done_codes", "max_turns_codes"}
        if self.name != "command" and (given := sorted(own & {n for n in own if getattr(self, n) != _default(n)})):
            raise ValueError(
                f"{', '.join(given)}: got a setting that only name=command has, and name={self.name}; leave it out, "
                "or name command"
            )
        if self.name == "command" and not self.argv:
            raise ValueError("argv: got none, expected the program to start and its arguments (harness.name=command)")
        if both := sorted(set(self.done_codes) & set(self.max_turns_codes)):
            raise ValueError(f"done_codes, max_turns_codes: got {both[0]} in both, expected one meaning for a code")
        return self


def _default(name: str) -> object:
    return HarnessConfig.model_fields[name].get_default(call_default_factory=True)
