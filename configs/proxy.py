"""Settings of the serving proxy. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Config


class SessionLimits(Config):
    """What one session may use; reaching a bound ends it with 429 and the reason ``limit_reached``."""

    calls: int = Field(default=200, ge=1, description="Model calls of a session.")
    tokens: int = Field(
        default=1_000_000,
        ge=1,
        description="Tokens of a session, prompt and sampled; a shared prefix counts once.",
    )
    wall_s: float = Field(default=3600.0, gt=0, description="Seconds after its opening in which a session takes calls.")
    concurrent: int = Field(default=16, ge=1, description="Calls of a session at the same time.")


class ProxyConfig(Config):
    """The model API that harnesses talk to."""

    replicas: int = Field(default=1, ge=1, description="Processes that serve it; a session stays with one.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Longest answer in tokens; none: what is left of the context."
    )
    max_drift: int = Field(
        default=512,
        ge=0,
        description="Characters by which a replayed answer may differ from the held one; beyond: a fork.",
    )
    history: Literal["held", "rendered"] = Field(
        default="held",
        description="What a call that goes on is fed: the tokens held for its history, or the history as the chat "
        "template renders it, as a deployment without this proxy would; every real difference then forks.",
    )
    max_body_mb: float = Field(default=64.0, gt=0, description="Largest request body in MiB; above it: 413.")
    body_wait_s: float = Field(
        default=120.0, gt=0, description="Seconds in which the body of a request must have come; after it: 408."
    )
    ping_s: float = Field(
        default=4.0, gt=0, le=5, description="Seconds between keep-alive comments while the engine works."
    )
    engine_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which a failing engine is tried again before the session fails.",
    )
    abort_wait_s: float = Field(
        default=10.0, gt=0, description="Seconds to wait for what an aborted generation had sampled."
    )
    limits: SessionLimits = Field(
        default_factory=SessionLimits, description="Bounds of a session, unless its opening names others."
    )
