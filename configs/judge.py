"""The judge: a model that grades by a rubric. Never the default."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from configs.base import Config


class JudgeConfig(Config):
    """An OpenAI-compatible endpoint that grades tasks with a rubric, outside of every sandbox."""

    url: str = Field(
        pattern=r"^https?://\S+$",
        description="Base URL, as the OpenAI clients take it, such as http://127.0.0.1:8000/v1.",
    )
    model: str = Field(description="Name of the model there.")
    key_env: str = Field("OPENAI_API_KEY", description="Environment variable that holds the key, where one is needed.")
    votes: int = Field(3, ge=1, description="Independent gradings of each criterion.")
    batch: int = Field(10, ge=1, description="Criteria that one request asks for.")
    temperature: float | None = Field(None, ge=0, description="Sampling temperature; none: the endpoint's own.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer; none: the endpoint's own bound.")
    structured: Literal["json_schema", "json_object", "text"] = Field(
        "json_schema", description="How the form of the answer is asked for; text for endpoints that know no other."
    )
    evidence_chars: int = Field(
        60_000, ge=1000, description="Characters of the agent's outcome that a request shows; the middle is cut."
    )
    timeout_s: float = Field(180.0, gt=0, description="Seconds that one answer may take.")
    retries: int = Field(4, ge=0, description="Further tries after 408, 409, 429, 5xx or a broken connection.")
    tries: int = Field(3, ge=1, description="Requests for a vote until its answer has the form that was asked for.")
    concurrency: int = Field(8, ge=1, description="Requests at the same time.")
    cache: Path | None = Field(
        Path("~/.cache/reins/judge"), description="Where votes are kept, so that none is paid for twice; none: nowhere."
    )
    usd_per_million_in: float | None = Field(None, ge=0, description="Price of a million tokens asked; none: unknown.")
    usd_per_million_out: float | None = Field(None, ge=0, description="Price of a million answered; none: unknown.")
