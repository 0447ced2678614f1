"""The harnesses of a run: one, several of any kind, or a set out of the space of the transparent loop."""

from __future__ import annotations

from collections.abc import Sequence

from configs.eval import EvaluationConfig
from configs.harness import HarnessConfig, SpaceConfig
from configs.schema import RunConfig
from envs.harnesses.agent_loop.parts import parsed
from envs.harnesses.agent_loop_adapter import levels_of
from envs.space import PAPER18, Point, Space, distance, heldout_far, heldout_near, orthogonal, random_set


def harnesses(config: RunConfig) -> dict[str, HarnessConfig]:
    """Those of the training set by what logs call them. Raises ValueError for a set that cannot be."""
    if config.space is None:
        return config.harnesses
    space = space_of(config.harness)
    return {name: settings_of(config, name) for name in map(space.name, members(config.space, space))}


def settings_of(config: RunConfig, name: str) -> HarnessConfig:
    """The harness that logs call ``name``; with a space it may lie outside of the set."""
    if config.space is None:
        return config.harnesses[name]
    return config.harness.model_copy(update={"levels": name, "label": name})


def with_rings(config: EvaluationConfig) -> EvaluationConfig:
    """The same evaluation with the harnesses of its rings' spaces one by one. Raises ValueError."""
    plain = config.model_dump(by_alias=True)
    for number, ring in enumerate(config.rings):
        if ring.space is None:
            continue
        space = space_of(ring.harnesses[0])
        try:
            points = members(ring.space, space)
            if ring.space.which != "training":
                points = (heldout_near if ring.space.which == "near" else heldout_far)(points, space)
        except ValueError as error:
            raise ValueError(f"rings.{number}.space: {error}") from None
        one = ring.harnesses[0].model_dump()
        each = [one | {"levels": name, "label": name} for name in map(space.name, points)]
        plain["rings"][number] |= {"space": None, "harnesses": each}
    return EvaluationConfig.model_validate(plain)


def space_of(harness: HarnessConfig) -> Space:
    """The space of the transparent loop, with the levels and factors of the user's own."""
    found = levels_of(harness.parts)
    return Space("".join(found), tuple(found.values()))


def members(config: SpaceConfig, space: Space) -> Sequence[Point]:
    """The points of a set. Raises ValueError."""
    match config.set:
        case "paper18":
            return [space.point(name + space.name([0] * len(space.letters))[len(name) :]) for name in PAPER18]
        case "all":
            return space.points()
        case "random":
            return random_set(space, config.size, config.seed)
        case "orthogonal":
            return orthogonal(space.levels, config.size)
        case "names":
            return [space.point(name) for name in config.names]


def apart(a: str, b: str) -> int:
    """The distance of two harnesses: between names of a space the factors in which they differ, else 0 or 1."""
    try:
        first, second = parsed(a), parsed(b)
    except ValueError:
        return int(a != b)
    return distance(first, second) if len(first) == len(second) else int(a != b)


def neighbours(config: RunConfig, name: str) -> list[str]:
    """The harnesses of the space that differ from one in a single factor."""
    space = space_of(config.harness)
    return [space.name(point) for point in space.at(space.point(name), 1)]
