"""How a policy behaves in its harnesses, before and after: ``python -m algos.analyse BEFORE [AFTER ...]``."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from algos.entry import say, typed
from algos.run_folder import RunError
from configs.analyse import AnalyseConfig, StageConfig
from configs.loader import ConfigError, describe, load_as

if TYPE_CHECKING:
    from algos.behaviour_tables import Series
    from algos.spoken import Place, Spoken

CONFIG = Path(__file__).parents[1] / "configs" / "analyse.yaml"
_EPILOG = """\
examples:
  python -m algos.analyse evals/BEFORE evals/AFTER              two evaluations side by side
  python -m algos.analyse runs/NAME@0-3 runs/NAME@36-39         the first and the last training steps of a run
  python -m algos.analyse evals/AFTER harnesses=[agent_loop] out=behaviour
  python -m algos.analyse evals/AFTER 'workflow=[{name: plan, pattern: todo}, {name: answer}]'
  python -m algos.analyse evals/BEFORE evals/AFTER judge.url=URL judge.model=NAME judged=50   also graded by a judge

An indicator is a rate, such as failed calls that were made again word for word. It is computed from the prefix trees,
or from the transcripts where an endpoint answered.

settings (key = default):
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong settings or nothing to look at, 130 interrupted."""
    args = _arguments(argv)
    console = Console()
    try:
        config = load_as(AnalyseConfig, args.config, args.overrides)
        return _analyse(config, args.places, console)
    except (ConfigError, RunError) as error:
        say(Console(stderr=True), f" {error}", "error:")
        return 2
    except KeyboardInterrupt:
        say(console, "interrupted; nothing was written")
        return 130


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m algos.analyse",
        description="Behaviour of policies in their harnesses, from the episodes of runs and evaluations.",
        epilog=_EPILOG + describe(AnalyseConfig) + "\n\nof each stage in the list workflow:\n" + describe(StageConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="PLACE", help="folder of a run or an evaluation; or key.path=value")
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML file of settings; none: configs/analyse.yaml")
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.words if "=" in word]
    args.places = [word for word in args.words if "=" not in word]
    if not args.places:
        parser.error("got no PLACE, expected the folder of a run or an evaluation")
    return args


def _analyse(config: AnalyseConfig, names: Sequence[str], console: Console) -> int:
    from algos.behaviour_tables import behaviour_page, dimension_table, indicator_table, radar
    from algos.score_tables import markdown
    from algos.spoken import Place

    places = [Place(name, config.model) for name in names]
    chosen = [_chosen(config, place) for place in places]
    found = []
    with _progress(console) as bar:
        for place, rows in zip(places, chosen, strict=True):
            task = bar.add_task(place.name, total=len(rows))
            found.append(_series(config, place, rows, partial(bar.advance, task)))
    series = [one for one, _ in found]
    dimensions: dict[str, str] = {}
    tables, picture = [indicator_table(series)], ""
    if config.judge is not None:
        dimensions, cost = _judged(config, found, console)
        tables.append(dimension_table(series, dimensions))
        tables[-1].notes.append(cost)
        picture = radar(series, list(dimensions))
    for made in tables:
        say(console, markdown(made))
    out = config.out or places[-1].folder
    plain = {"settings": config.model_dump(mode="json"), "places": [one.plain(list(dimensions)) for one in series]}
    texts = {
        "md": "\n".join(map(markdown, tables)),
        "html": behaviour_page(tables, picture),
        "json": json.dumps(plain, indent=1, allow_nan=False) + "\n",
    }
    _write(out, texts)
    say(console, f"written to {out / 'behaviour.md'}, .html and .json")
    say(console, f"look at single episodes:  {typed()} -m trees.view {places[-1].folder}")
    return 0


def _judged(
    config: AnalyseConfig, found: Sequence[tuple[Series, list[Spoken]]], console: Console
) -> tuple[dict[str, str], str]:
    """Have a sample of each place graded; the dimensions, and what it took. Raises ConfigError without any grade."""
    import asyncio

    from algos.behaviour_rubric import DIMENSIONS, grade
    from envs.judge.judge import Judge

    assert config.judge is not None
    judge = Judge(config.judge)

    async def all_places() -> None:
        with _progress(console) as bar:
            for series, spoken in found:
                sample = spoken[: config.judged]
                task = bar.add_task(f"judging {series.name}", total=len(sample))
                graded = await grade(judge, sample, partial(bar.advance, task))
                for episode, scores in zip(sample, graded.scores, strict=True):
                    if scores is not None:
                        series.scores.append(scores)
                        series.judged_tasks.append(episode.row["task"])
                series.ungraded = graded.scores.count(None)
                series.fault = graded.fault
                if not series.scores:
                    raise ConfigError(f"{series.name}: the judge graded none of {len(sample)} episodes: {graded.fault}")

    asyncio.run(all_places())
    spent = judge.spent
    price = "" if spent.usd is None else f", {spent.usd:.2f} USD"
    asked = f"{spent.requests} requests ({spent.cached} votes from the cache)"
    return DIMENSIONS, f"Judge {config.judge.model}: {asked}, {spent.tokens_in + spent.tokens_out} tokens{price}."


def _chosen(config: AnalyseConfig, place: Place) -> list[dict[str, Any]]:
    """The episodes that are looked at. Raises ConfigError where there are none."""
    rows = [
        row
        for row in place.rows()
        if (config.splits is None or row["split"] in config.splits)
        and (config.harnesses is None or row["harness"] in config.harnesses)
    ]
    if not rows:
        raise ConfigError(f"{place.name}: no graded episode of the splits, harnesses and steps that are asked for")
    # The order is one of tasks, not of places: samples of two places are of the same tasks where both have them.
    rows.sort(key=lambda row: (_lot(config.seed, row["task"]), _lot(config.seed, row["harness"]), row["id"]))
    return rows[: config.sample]


def _lot(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()


def _series(
    config: AnalyseConfig, place: Place, rows: Sequence[dict[str, Any]], tick: Callable[[], object]
) -> tuple[Series, list[Spoken]]:
    """The indicators of all episodes, and the words of those that a judge may be shown."""
    from algos.behaviour import WORKFLOW, Stage, indicators
    from algos.behaviour_tables import Series

    workflow = tuple(Stage(one.name, one.pattern) for one in config.workflow) or WORKFLOW
    found = Series(place.name)
    kept: list[Spoken] = []
    for row in rows:
        spoken = place.spoken(row)
        tick()
        if spoken is None:
            found.without_words += 1
            continue
        found.tasks.append(row["task"])
        found.rates.append(indicators(spoken.steps, workflow))
        if config.judge is not None and len(kept) < config.judged:
            kept.append(spoken)
    if not found.rates:
        raise ConfigError(
            f"{place.name}: none of its {len(rows)} episodes has a tree or a transcript; trees.keep=all and "
            "transcripts=true keep those of evaluations"
        )
    return found, kept


def _write(out: Path, texts: dict[str, str]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            (out / f"behaviour.{suffix}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out: {error}; expected a folder that can be written to") from None


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
