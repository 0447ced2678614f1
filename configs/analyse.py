"""The settings of an analysis of behaviour. Importing this module imports neither torch nor ray."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from configs.base import Config
from configs.judge import JudgeConfig


class StageConfig(Config):
    """A part of the workflow that is expected."""

    name: str = Field(description="What tables call it.")
    pattern: str | None = Field(
        None,
        description="Regular expression, searched in `NAME ARGUMENTS` of each call; none: an answer without calls.",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"got {value!r}, expected a regular expression: {error}") from None
        return value


class AnalyseConfig(Config):
    """How episodes are looked at."""

    out: Path | None = Field(None, description="Folder of the results; none: the last place.")
    splits: list[str] | None = Field(None, min_length=1, description="Only episodes of these splits; none: of all.")
    harnesses: list[str] | None = Field(None, min_length=1, description="Only in these harnesses; none: in all.")
    sample: int | None = Field(
        None, ge=1, description="So many episodes of each place, of the same tasks as far as can be; none: all."
    )
    seed: int = Field(0, ge=0, description="Of the sample.")
    workflow: list[StageConfig] = Field(
        [], description="The stages that `skipped_steps` looks for, in order; none: look, then act, then answer."
    )
    model: Path | None = Field(
        None,
        description="Folder with the tokenizer of the trees; none: that of the place's newest checkpoint or model.",
    )
    judge: JudgeConfig | None = Field(
        None, description="Grades a sample of the episodes in six dimensions of behaviour; none: only the indicators."
    )
    judged: int = Field(40, ge=1, description="Episodes of each place that the judge grades.")
