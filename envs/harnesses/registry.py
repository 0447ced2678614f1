"""The harnesses by name: one line each.

Those of ``external/`` are programs that must be installed first; they take no settings but the name.
"""

from __future__ import annotations

from collections.abc import Callable

from configs.harness import HarnessConfig
from envs.harnesses.agent_loop_adapter import AgentLoop
from envs.harnesses.base import Harness
from envs.harnesses.command import CommandHarness
from envs.harnesses.external.adapters import ADAPTERS


def _without_settings(make: Callable[[], Harness]) -> Callable[[HarnessConfig], Harness]:
    return lambda _: make()


HARNESSES: dict[str, Callable[[HarnessConfig], Harness]] = {
    "agent_loop": lambda config: AgentLoop(
        config.max_turns, config.command_s, config.observation_chars, config.levels, config.wordings, config.parts
    ),
    "command": CommandHarness,
    **{name: _without_settings(make) for name, make in ADAPTERS.items()},
}


def harness(config: HarnessConfig) -> Harness:
    """The adapter that the settings name.

    Raises ValueError: an unknown name (with those that exist), or a program that is not installed (with the
    command that installs it).
    """
    if config.name not in HARNESSES:
        raise ValueError(f"harness.name {config.name!r}: expected one of {sorted(HARNESSES)}")
    return HARNESSES[config.name](config)
