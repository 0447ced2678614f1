"""Rollouts that run ahead of the learner: is it kept busy, is the bound kept, is a request lost at an update?

    python benchmarks/async.py [--smoke]

The coordinator, the tree builder, the embedded engine and the learner are those of a run, without Ray: the learner has
a process with a queue, as its actor has, and the engine its own thread. A random model of the quickstart's shape
samples few tokens for each call, and every call waits besides for seconds drawn from a log-normal distribution, spread
over its tokens: that is a large model's long answer, for which the rollouts wait and the two cores do not work. A draw
depends on the call's name alone, so all settings wait for the same. A mean episode takes about as long as a training
step, the slowest of a step three times that; all that the bound allows run at once.

``learner idle`` is the share of the time in which the learner neither trains nor publishes. The first steps are left
out of it and of the steps per minute, in all settings: at ``max_staleness`` 4 five of them start at once. ``engine
busy`` is the share of the time in which the engine computes; the nearer to 1, the less is it latency that the rollouts
wait for.

It ends with an error when a token is older than the bound, an episode or a request is lost, a token is sampled twice
or does not reach the learner, or (where nothing is stale) the engine sampled under other weights than it says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from actors.coordinator import Coordinator
from actors.engines.base import Generate, Generated, Piece, joined
from actors.engines.steady import SteadyEngine, UpdateMode
from actors.engines.transformers import TransformersEngine
from actors.learner import Learner
from actors.seeds import stable_seed
from actors.tree_builder import TreeBuilderActor
from algos.tiny import build_model
from configs.learner import LearnerConfig
from configs.loader import load
from configs.schema import TreesConfig
from envs.episode import EpisodeOutcome, EpisodeSpec, Status
from envs.tasks.task import Task
from trees import codec
from trees.record import CallRecord

SEED = 0
VOCABULARY = 512
BOUNDS = (0, 1, 4)
STEPS = (
    *("max\nstale", "steps\n/min", "learner\nidle", "stale\nmost", "stale\nmean", "episodes", "lost\nrequests"),
    *("episode s\nmost/mean", "engine\nbusy"),
)
UPDATES = (
    *("mode", "update s\nmost/mean", "under\nway", "cut", "lost", "over\nversions", "steps\n/min", "learner\nidle"),
)
SAME_WEIGHTS = 1e-3
"""Largest difference of log-probabilities between engine and learner that rounding explains."""


@dataclass(frozen=True)
class Load:
    """A step is ``groups`` x ``group_size`` episodes of 2 to 6 calls; lengths are in tokens."""

    steps: int
    skipped: int
    """Steps before the clock starts."""
    groups: int = 4
    group_size: int = 4
    prompt: int = 256
    tail: int = 16
    sampled: int = 4
    median_s: float = 0.06
    """Of the log-normal seconds that a call waits; ``sigma`` is the deviation of their logarithm."""
    sigma: float = 1.2
    patience_s: float = 240.0
    """What one run may take; an answer that never comes would be waited for without end."""

    @property
    def episodes(self) -> int:
        return self.groups * self.group_size

    def calls(self, spec: EpisodeSpec) -> int:
        return int(np.random.default_rng(stable_seed(SEED, spec.id)).integers(2, 7))

    def seconds(self, call: str) -> float:
        return float(np.random.default_rng(stable_seed(SEED, call)).lognormal(np.log(self.median_s), self.sigma))

    def tokens(self, name: str, n: int) -> np.ndarray:
        """Random ids of a prompt, int32 [n]."""
        return np.random.default_rng(stable_seed(SEED, name)).integers(0, VOCABULARY, n).astype(np.int32)


class SlowEngine(TransformersEngine):
    """The embedded engine with the latency of a larger one. ``session`` names the call and so its draw."""

    def __init__(self, path: Path, made: Load) -> None:
        super().__init__(path, slots=8 * made.episodes, max_len=1024)
        self._made = made
        self._cuts: dict[str, asyncio.Event] = {}

    async def generate(self, request: Generate) -> Generated:
        return joined([piece async for piece in self.stream(request)])

    async def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        """Each token is a request of its own, so that it is sampled when its time has come, under what then serves."""
        cut = self._cuts[request.request] = asyncio.Event()
        pace = self._made.seconds(request.session) / self._made.sampled
        ids = np.asarray(request.ids, np.int32)
        try:
            for left in range(request.max_tokens, 0, -1):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(cut.wait(), pace)
                if cut.is_set():
                    yield Piece([], [], (), "abort")
                    return
                seed = stable_seed(request.seed or 0, str(left))
                got = await super().generate(replace(request, ids=ids, max_tokens=1, seed=seed))
                ids = np.concatenate([ids, np.asarray(got.ids, np.int32)])
                last = left == 1 or got.finish != "length"
                yield Piece(got.ids, got.logprobs, got.versions, got.finish if last else None, got.cached_tokens)
                if last:
                    return
        finally:
            del self._cuts[request.request]

    async def abort(self, request: str) -> None:
        if request in self._cuts:
            self._cuts[request].set()
        await super().abort(request)


_learner: Learner


def open_learner(model: Path, run_dir: Path, settings: LearnerConfig, steps: int) -> None:
    """In the learner's process, as the two below."""
    global _learner
    _learner = Learner(model, run_dir, settings, total_steps=steps)


def add(data: bytes) -> None:
    _learner.add(data)


def train(step: int, groups: Mapping[str, str]) -> dict[str, float]:
    began = time.monotonic()
    metrics = _learner.train(step, groups)
    return metrics | {"began": began, "ended": time.monotonic()}


class LearnerProcess:
    """One call after the other, as they come."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    async def call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args))

    async def add(self, data: bytes) -> None:
        await self.call(add, data)


@dataclass
class Bench:
    """The parts of a run for the coordinator, its log, and what is counted at them."""

    made: Load
    engine: SteadyEngine
    builder: TreeBuilderActor
    learner: LearnerProcess
    run_dir: Path
    asked: int = 0
    ended: int = 0
    tokens: int = 0
    under_way: list[int] = field(default_factory=list)
    """Requests that were asked and had not ended when an update began."""
    over_versions: int = 0
    """Episodes whose tokens were sampled under more than one version."""
    seconds: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def run_episode(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Every call extends the one before; the reward is the share of even ids among those sampled."""
        began = time.monotonic()
        ids = np.zeros(0, np.int32)
        sampled: list[int] = []
        versions: set[int] = set()
        parent = None
        whole = True
        n_calls = self.made.calls(spec)
        for ordinal in range(n_calls):
            call = f"{spec.id}c{ordinal}"
            fed = self.made.tokens(call, self.made.tail) if ordinal else self.made.tokens(spec.group, self.made.prompt)
            ids = np.concatenate([ids, fed])
            got = await self._ask(spec, call, ids)
            whole = whole and got.finish == "length" and len(got.ids) == len(got.logprobs) == self.made.sampled
            self.builder.add(codec.encode_records([record(spec, call, parent, ordinal, fed, got)]))
            ids = np.concatenate([ids, np.asarray(got.ids, np.int32)])
            sampled += got.ids
            versions |= {span.version for span in got.versions}
            parent = call
        self.over_versions += len(versions) > 1
        self.seconds.append(time.monotonic() - began)
        reward = sum(token % 2 == 0 for token in sampled) / max(1, len(sampled))
        status: Status = "completed" if whole else "failed"
        reason, graded = ("", reward) if whole else ("an answer was cut", None)
        return EpisodeOutcome(spec.id, status, reason, graded, graded, whole, n_calls, len(ids), len(sampled), 0)

    async def _ask(self, spec: EpisodeSpec, call: str, ids: np.ndarray) -> Generated:
        request = f"{call}a{spec.attempt}"
        seed = stable_seed(spec.seed, request)
        self.asked += 1
        got = await self.engine.generate(
            Generate(ids, self.made.sampled, temperature=spec.temperature, session=call, request=request, seed=seed)
        )
        # Nobody here aborts: an answer that ends so was lost on the way.
        self.ended += got.finish != "abort"
        self.tokens += len(got.ids)
        return got

    async def build_tree(self, spec: EpisodeSpec, outcome: EpisodeOutcome) -> dict[str, Any] | None:
        meta = {"episode": spec.id, "group": spec.group, "step": spec.step, "split": spec.split}
        meta |= {"status": outcome.status, "reward": outcome.reward}
        return await self.builder.finish(spec.id, outcome.calls, meta)

    async def discard(self, spec: EpisodeSpec) -> None:
        self.builder.discard(spec.id)

    async def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        return await self.learner.call(train, step, dict(groups))

    async def update_engine(self, version: int) -> None:
        self.under_way.append(self.asked - self.ended)
        await self.engine.load_weights(version, self.run_dir / "weights" / f"v{version:08d}")

    async def checkpoint(self, step: int, score: float | None = None, wait: bool = False) -> None:
        """None is made: nothing here is gone back to."""

    async def statistics(self) -> dict[str, float]:
        return {}

    def episode(self, row: dict[str, Any]) -> None:
        """Counted by step."""

    def step(self, row: dict[str, Any]) -> None:
        if row["step"]:
            self.rows.append(row)

    def evaluation(self, done: int, total: int, name: str) -> None:
        """There is none."""


def record(
    spec: EpisodeSpec, call: str, parent: str | None, ordinal: int, fed: np.ndarray, got: Generated
) -> CallRecord:
    return CallRecord(
        session=spec.id,
        call=call,
        parent=parent,
        ordinal=ordinal,
        prompt_ids=fed,
        sampled_ids=np.asarray(got.ids, np.int32),
        logprobs=np.asarray(got.logprobs, np.float32),
        versions=got.versions,
        temperature=spec.temperature,
        finish=got.finish,
    )


@dataclass(frozen=True)
class Run:
    """The figures of one setting, as they are printed; times in seconds."""

    steps_per_min: float
    learner_idle_share: float
    max_staleness_seen: int
    mean_staleness: float
    episodes_scheduled: int
    episodes_completed: int
    lost_requests: int
    episode_s_mean: float
    episode_s_max: float
    update_s_mean: float
    update_s_max: float
    requests_under_way: float
    requests_interrupted: int
    episodes_over_versions: int
    engine_busy_share: float


async def run(model: Path, made: Load, bound: int, mode: UpdateMode, pool: ProcessPoolExecutor) -> Run:
    """One training under ``bound``; raises SystemExit when something that must hold does not."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        config = load(
            None,
            [
                f"steps={made.steps}",
                f"rollout.groups={made.groups}",
                f"rollout.group_size={made.group_size}",
                f"async.max_staleness={bound}",
                f"sandbox.concurrency={(max(BOUNDS) + 1) * made.episodes}",
                "sandbox.retries=0",
                "eval.every=0",
            ],
        )
        learner = LearnerProcess(pool)
        await learner.call(open_learner, model, run_dir, config.learner, made.steps)
        inner = SlowEngine(model, made)
        engine = SteadyEngine(inner, mode)
        bench = Bench(made, engine, TreeBuilderActor(run_dir, learner, TreesConfig()), learner, run_dir)
        tasks = [Task(f"t{i}", "", run_dir, "") for i in range(made.groups)]
        began = time.monotonic()
        try:
            await asyncio.wait_for(Coordinator(config, bench, bench, tasks, {}).run(), made.patience_s)
        except TimeoutError:
            raise SystemExit(
                f"max_staleness {bound}, {mode}: got no end within {made.patience_s:g} s with "
                f"{bench.asked - bench.ended} requests without an answer, expected every request to end"
            ) from None
        stats = await engine.stats()
        seconds = time.monotonic() - began
        await engine.close()
    check(bench, bound, mode, stats.decode_tokens)
    return figures(bench, int(stats.extra.get("interrupted", 0)), stats.busy_s / seconds)


def check(bench: Bench, bound: int, mode: UpdateMode, decoded: int) -> None:
    """SystemExit names the first thing that was got otherwise than it must be."""
    rows = bench.rows
    trained = sum(row["train/tokens"] for row in rows)
    behind = max(row["train/staleness_max"] for row in rows)
    failed = sum(row["episodes/scheduled"] - row["episodes/completed"] for row in rows)
    apart = max(row["train/mu_old_max"] for row in rows)
    facts = [
        (len(rows) == bench.made.steps, f"{len(rows)} steps", f"{bench.made.steps}"),
        (behind <= bound, f"a token that is {behind} versions old at the learner", f"at most {bound}"),
        (bench.asked == bench.ended, f"{bench.asked - bench.ended} of {bench.asked} requests lost", "none"),
        (not failed, f"{failed} episodes that were scheduled and not completed", "none"),
        (
            decoded == bench.tokens == trained,
            f"{decoded} tokens sampled, {bench.tokens} answered and {trained} trained",
            "the same number: none sampled twice, none dropped",
        ),
        (
            bound > 0 or apart < SAME_WEIGHTS,
            f"log-probabilities of engine and learner {apart:g} apart where nothing is stale",
            f"less than {SAME_WEIGHTS:g}: the engine serves the version that it names",
        ),
    ]
    for holds, got, expected in facts:
        if not holds:
            raise SystemExit(f"max_staleness {bound}, {mode}: got {got}, expected {expected}")


def figures(bench: Bench, interrupted: int, engine_busy: float) -> Run:
    rows, skipped = bench.rows, bench.made.skipped
    window = rows[-1]["ended"] - rows[skipped - 1]["ended"]
    trained = sum(row["ended"] - row["began"] for row in rows[skipped:])
    updates = [row["seconds/update"] for row in rows]
    return Run(
        steps_per_min=60 * (len(rows) - skipped) / window,
        learner_idle_share=1 - trained / window,
        max_staleness_seen=max(row["train/staleness_max"] for row in rows),
        mean_staleness=statistics.mean(row["train/staleness_mean"] for row in rows),
        episodes_scheduled=sum(row["episodes/scheduled"] for row in rows),
        episodes_completed=sum(row["episodes/completed"] for row in rows),
        lost_requests=bench.asked - bench.ended,
        episode_s_mean=statistics.mean(bench.seconds),
        episode_s_max=max(bench.seconds),
        update_s_mean=statistics.mean(updates),
        update_s_max=max(updates),
        requests_under_way=statistics.mean(bench.under_way),
        requests_interrupted=interrupted,
        episodes_over_versions=bench.over_versions,
        engine_busy_share=engine_busy,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps and short waits, to see that it works")
    smoke = parser.parse_args().smoke
    made = Load(steps=6, skipped=1, group_size=2, prompt=128) if smoke else Load(steps=25, skipped=max(BOUNDS) + 1)
    transformers_logging.disable_progress_bar()
    modes: tuple[UpdateMode, ...] = get_args(UpdateMode)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        model = Path(name)
        build_model(VOCABULARY, SEED).save_pretrained(model)
        bounds = {bound: asyncio.run(run(model, made, bound, modes[0], pool)) for bound in BOUNDS}
        updates = {modes[0]: bounds[1]} | {mode: asyncio.run(run(model, made, 1, mode, pool)) for mode in modes[1:]}
    report(made, bounds, updates, smoke)


def report(made: Load, bounds: Mapping[int, Run], updates: Mapping[UpdateMode, Run], smoke: bool) -> None:
    console = Console()
    steps = table(f"{made.steps} steps of {made.episodes} episodes, updates between tokens", *STEPS)
    for bound, r in bounds.items():
        steps.add_row(
            *(str(bound), f"{r.steps_per_min:.1f}", f"{r.learner_idle_share:.0%}"),
            *(str(r.max_staleness_seen), f"{r.mean_staleness:.2f}", f"{r.episodes_completed}/{r.episodes_scheduled}"),
            *(str(r.lost_requests), f"{r.episode_s_max:.1f}/{r.episode_s_mean:.2f}", f"{r.engine_busy_share:.0%}"),
        )
    console.print(steps)
    by_mode = table("updates at max_staleness 1", *UPDATES)
    for mode, r in updates.items():
        by_mode.add_row(
            *(mode, f"{r.update_s_max:.3f}/{r.update_s_mean:.3f}", f"{r.requests_under_way:.1f}"),
            *(str(r.requests_interrupted), str(r.lost_requests), f"{r.episodes_over_versions}/{r.episodes_completed}"),
            *(f"{r.steps_per_min:.1f}", f"{r.learner_idle_share:.0%}"),
        )
    console.print(by_mode)
    print(json.dumps({"benchmark": "async", "smoke": smoke} | summary(bounds, updates)))


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def summary(bounds: Mapping[int, Run], updates: Mapping[UpdateMode, Run]) -> dict[str, Any]:
    """Every figure by ``max_staleness``, and under ``updates`` by mode at ``max_staleness`` 1."""
    by_bound = {key.name: {str(b): round(getattr(r, key.name), 3) for b, r in bounds.items()} for key in fields(Run)}
    by_mode = {mode: {name: round(value, 3) for name, value in asdict(r).items()} for mode, r in updates.items()}
    # One run is in both.
    lost = sum(r.lost_requests for r in {*bounds.values(), *updates.values()})
    return by_bound | {"lost_requests": lost, "updates": by_mode}


if __name__ == "__main__":
    main()
