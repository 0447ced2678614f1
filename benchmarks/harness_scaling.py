"""Harness scaling in small: policies trained in one harness, in designed and in random sets of harnesses.

    python benchmarks/harness_scaling.py                      all tables, three seeds: hours; goes on where it stopped
    python benchmarks/harness_scaling.py --tables a e         some of the tables
    python benchmarks/harness_scaling.py --arms weak-paper18  some of their arms
    python benchmarks/harness_scaling.py --runs runs/scaling  where runs and evaluations are kept, and found again
    python benchmarks/harness_scaling.py --report             no runs: the tables of what has ended
    python benchmarks/harness_scaling.py --smoke              one step of an untrained policy: the machinery only

What is in results/harness_scaling.json is not run again, whatever ``--runs`` holds; take it away to begin anew.

Every arm of a table has the same cold start (by seed), the same tasks and the same number of episodes. A policy is then
measured in four rings of harnesses (configs/harness_scaling_eval.yaml): the base, the paper's 18, 18 at distance 1 from
those and 18 further away, and of tables g and h in a real harness besides, on tasks that are never trained. Figures are
means over seeds with the seeds' standard error. Tables and pictures are a page in the folder of the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from algos.coldstart import coldstart
from algos.eval_folder import scores
from algos.recipe import SpaceRecipe, space_recipe
from algos.reporting.comparison import Comparison, Policy, document, mean_and_error
from algos.runlog import read_jsonl
from algos.scores import Place

ROOT = Path(__file__).parents[1]
TRAIN, EVALUATE = ROOT / "configs" / "harness_scaling.yaml", ROOT / "configs" / "harness_scaling_eval.yaml"
RESULTS = Path(__file__).with_name("results") / "harness_scaling.json"
RINGS = ("base", "training", "near", "far")
OUTSIDE = "mini_swe_agent"
"""A real harness that fits the tiny policy: its prompts are short, and no request is made beside the main ones."""
OUTSIDE_RING = {
    "name": OUTSIDE,
    "harnesses": [{"name": OUTSIDE, "max_turns": 8}],
    "tasks": ["outside"],
}

SINGLE = ("S0T0O0C0W0", "S1T1O1C2W2", "S2T1O2C1W0", "S2T2O1C0W1")
"""The paper's single configurations, the base first."""
LEVELS, WEAK, PAIRS, HEARD = "levels", "weak", "pairs", "heard"
COLD = {
    LEVELS: SpaceRecipe(level_chance=0.5),
    WEAK: SpaceRecipe(level_chance=0.35),
    PAIRS: SpaceRecipe(level_chance=0.1, pairs=12, pair_chance=0.6),
    HEARD: SpaceRecipe(level_chance=0.5, outside=(OUTSIDE,)),
}
"""Cold starts: habits of single levels, weaker ones, those of two levels together; the first in a real harness too."""
UNMEASURED = ("eval.every=0", "eval.tasks=1", "eval.sampled=false")
"""Evaluations of the run itself are left out: the rings are measured afterwards."""
PPO = (
    "rollout.groups=64",
    "rollout.group_size=1",
    "learner.advantage=gae",
    "learner.critic.learning_rate=3e-3",
    "learner.critic.epochs=4",
    "learner.critic.minibatches=4",
    "learner.critic.warmup_steps=2",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to train, from a cold start; ``settings`` are besides those of configs/harness_scaling.yaml."""

    name: str
    cold: str
    settings: tuple[str, ...] = ()


def single(harness: str, cold: str, *more: str) -> Arm:
    settings = ("space=null", f"harness.levels={harness}", "assignment={kind: all}", *more)
    return Arm(f"{cold}-single-{harness}", cold, settings)


def assigned(kind: str, k: int) -> str:
    return f"assignment={{kind: {kind}, k: {k}}}"


BRIEF, SHORT = "steps=24", "steps=12"
"""Where sets are compared, before all of them are near 1; and of table h: an episode in the real harness costs ten of
those of the transparent loop."""
PAPER18 = Arm("levels-paper18", LEVELS)
OF_PAIRS = Arm("pairs-paper18", PAIRS, (BRIEF,))
ARMS = {
    "a": (
        "One harness against the designed set; habits of levels, and weaker ones",
        (single(SINGLE[0], LEVELS), PAPER18, single(SINGLE[0], WEAK), Arm("weak-paper18", WEAK)),
    ),
    "b": (
        "The designed set against random and all harnesses; habits of pairs, 24 steps",
        (
            single(SINGLE[0], PAIRS, BRIEF),
            OF_PAIRS,
            Arm("pairs-random18", PAIRS, (BRIEF, "space={set: random, size: 18}")),
            Arm("pairs-all243", PAIRS, (BRIEF, "space={set: all}")),
        ),
    ),
    "c": (
        "Locality against random assignment and one factor; habits of pairs, 24 steps",
        (
            OF_PAIRS,
            Arm("pairs-assigned-random", PAIRS, (BRIEF, assigned("random", 2))),
            Arm("pairs-assigned-one-factor", PAIRS, (BRIEF, assigned("one_factor", 2))),
        ),
    ),
    "d": (
        "Harnesses of a task: 1, the same one twice, 2, 4; habits of pairs, 24 steps",
        (
            Arm("pairs-k1", PAIRS, (BRIEF, "assignment={kind: single}")),
            Arm("pairs-repeat2", PAIRS, (BRIEF, assigned("repeat", 2))),
            OF_PAIRS,
            Arm("pairs-k4", PAIRS, (BRIEF, assigned("locality", 4))),
        ),
    ),
    "e": ("Each single configuration against the set", (*(single(name, LEVELS) for name in SINGLE), PAPER18)),
    "f": ("GRPO and PPO", (PAPER18, Arm("levels-ppo-paper18", LEVELS, PPO))),
    "g": (
        f"Transfer to {OUTSIDE}, where no arm was trained; 24 steps",
        (single(SINGLE[0], HEARD, BRIEF), Arm("heard-paper18", HEARD, (BRIEF,))),
    ),
    "h": (
        f"White-box and black-box training, 12 steps: the designed set, and {OUTSIDE}",
        (
            Arm("heard-white", HEARD, (SHORT,)),
            Arm(
                "heard-black",
                HEARD,
                (SHORT, "space=null", f"harness={{name: {OUTSIDE}, max_turns: 8}}", "assignment={kind: all}"),
            ),
        ),
    ),
}
"""Tables by letter: title and arms."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=sorted(ARMS), default=sorted(ARMS), help="default: all")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="default: all of the tables; --report tells them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", default=Path("runs/harness_scaling"), help="default %(default)s"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: the tables of what has ended")
    parser.add_argument("--smoke", action="store_true", help="one step of an untrained policy")
    args = parser.parse_args()
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"benchmark": "harness_scaling", "smoke": True} | smoke(Path(folder))))
        return
    arms = {arm.name: arm for table in args.tables for arm in ARMS[table][1]}
    if unknown := sorted(set(args.arms or ()) - set(arms)):
        parser.error(f"--arms: got {unknown}, expected some of {sorted(arms)}")
    known = json.loads(RESULTS.read_text())["arms"] if RESULTS.is_file() else {}
    if not args.report:
        # Seeds outermost: after each of them the tables are whole, with fewer seeds.
        for seed in args.seeds:
            for arm in (arms[name] for name in args.arms or arms):
                if str(seed) not in measured(arm, args.runs, known)["seeds"]:
                    done(arm, seed, args.runs)
    every = {arm.name: arm for _, some in ARMS.values() for arm in some}
    found = {name: measured(arm, args.runs, known) for name, arm in every.items()}
    result = {"benchmark": "harness_scaling", "smoke": False} | claims(found)
    for table in args.tables:
        show(table, found)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    command = "python benchmarks/harness_scaling.py"
    RESULTS.write_text(json.dumps({"command": command, "machine": machine} | result | {"arms": found}, indent=1) + "\n")
    args.runs.mkdir(parents=True, exist_ok=True)
    report = args.runs / "harness_scaling.html"
    report.write_text(page(found), encoding="utf-8")
    print(f"tables and pictures: {report}", file=sys.stderr)
    print(json.dumps(result))


def done(arm: Arm, seed: int, runs: Path) -> None:
    """Train and measure one arm; what was interrupted goes on."""
    folder = runs / arm.name / f"seed{seed}"
    print(f"\n== {arm.name}, seed {seed}", file=sys.stderr, flush=True)
    run = trained(arm, seed, folder)
    evaluation = begun(folder / "eval")
    if evaluation is None:
        own = (f"model.path={run}", f"dir={folder / 'eval'}", f"seed={seed}")
        module("algos.eval", str(EVALUATE), *own, *measurements(arm))
        evaluation = begun(folder / "eval")
    else:
        module("algos.eval", "--resume", str(evaluation))
    assert evaluation is not None
    (folder / "done.json").write_text(json.dumps(summary(arm, run, evaluation)) + "\n")


def rings(arm: Arm) -> tuple[str, ...]:
    return (*RINGS, OUTSIDE) if arm.cold == HEARD else RINGS


def measurements(arm: Arm) -> list[str]:
    """Settings of the evaluation besides its file's."""
    if OUTSIDE not in rings(arm):
        return []
    every = [*yaml.safe_load(EVALUATE.read_text())["rings"], OUTSIDE_RING]
    return [f"rings={json.dumps(every)}", "tasks.outside={builtin: desk, split: heldout, limit: 48}"]


def trained(arm: Arm, seed: int, folder: Path) -> Path:
    run = begun(folder / "run")
    if run is not None:
        module("algos.run", "--resume", str(run))
        return run
    model = policy(arm.cold, seed, folder.parents[1] / "cold" / f"{arm.cold}-{seed}")
    own = (f"model.path={model}", f"seed={seed}", f"dir={folder / 'run'}", "wandb.mode=disabled")
    module("algos.run", str(TRAIN), *arm.settings, *UNMEASURED, *own)
    run = begun(folder / "run")
    assert run is not None
    return run


def policy(cold: str, seed: int, folder: Path) -> Path:
    """The cold start of a seed, the same for every arm."""
    if not folder.is_dir():
        made = coldstart(folder.parent / "making", seed, _say, space_recipe(COLD[cold]))
        shutil.move(made, folder)
    return folder


def _say(text: str) -> None:
    print(f"cold start: {text}", file=sys.stderr, flush=True)


def begun(folder: Path) -> Path | None:
    """The one run or evaluation below a folder; one that came to nothing is removed."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in found:
        if not (path / "checkpoints").is_dir() and not (path / "episodes.jsonl").is_file():
            shutil.rmtree(path)
    left = [path for path in found if path.is_dir()]
    return left[0] if left else None


def module(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", name, *arguments], check=True, stdout=sys.stderr, cwd=ROOT)


def summary(arm: Arm, run: Path, evaluation: Path) -> dict[str, Any]:
    """Pass@1 by ring, and the course of training."""
    found = scores(evaluation)
    rows = read_jsonl(run / "metrics.jsonl")
    passed = {ring: found.score(Place(ring)).pass_1 for ring in rings(arm)}
    return {
        "pass_1": {ring: figure.value for ring, figure in passed.items()},
        "episodes": sum(row.get("episodes/completed", 0) + row.get("episodes/truncated", 0) for row in rows),
        "train_reward": [round(row["train/reward"], 4) for row in rows if "train/reward" in row],
        "seconds_steps": round(sum(row.get("seconds/step", 0.0) for row in rows), 1),
        "complete": found.complete,
    }


def measured(arm: Arm, runs: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The seeds of an arm that have ended, in the folder of the runs or in the results that are there."""
    settings = [f"{arm.cold}: {COLD[arm.cold]}", *arm.settings]
    before = known.get(arm.name, {})
    seeds = dict(before["seeds"]) if before.get("settings") == settings else {}
    for file in sorted((runs / arm.name).glob("seed*/done.json")):
        seeds[file.parent.name.removeprefix("seed")] = json.loads(file.read_text())
    return {"settings": settings, "seeds": seeds}


def values(arm: dict[str, Any], ring: str) -> list[float]:
    """One for each seed."""
    return [one["pass_1"][ring] for one in arm["seeds"].values() if ring in one["pass_1"]]


def columns(table: str) -> list[str]:
    return list(dict.fromkeys(ring for arm in ARMS[table][1] for ring in rings(arm)))


def claims(found: dict[str, Any]) -> dict[str, Any]:
    """How many seeds each arm has, and its means by ring."""
    said: dict[str, Any] = {"seeds": {name: len(arm["seeds"]) for name, arm in found.items()}}
    for name, arm in found.items():
        means = {ring: mean_and_error(values(arm, ring)) for ring in (*RINGS, OUTSIDE)}
        said[name] = {ring: round(value[0], 4) for ring, value in means.items() if value}
    return said


def show(table: str, found: dict[str, Any]) -> None:
    title, arms = ARMS[table]
    made = Table(title=f"({table}) {title}", title_justify="left")
    for name in ("trained in", *columns(table), "seeds"):
        made.add_column(name, justify="left" if name == "trained in" else "right")
    for arm in arms:
        cells = [mean_and_error(values(found[arm.name], ring)) for ring in columns(table)]
        texts = [_figure(cell) for cell in cells]
        made.add_row(arm.name, *texts, str(len(found[arm.name]["seeds"])))
    Console(stderr=True, width=120).print(made)


def _figure(cell: tuple[float, float] | None) -> str:
    """One seed has no standard error."""
    if cell is None:
        return "-"
    return f"{cell[0]:.3f}" if math.isnan(cell[1]) else f"{cell[0]:.3f} ± {cell[1]:.3f}"


def page(found: dict[str, Any]) -> str:
    """The tables of which something has ended, with pictures."""
    compared = []
    for table, (title, arms) in ARMS.items():
        ran = [arm for arm in arms if found[arm.name]["seeds"]]
        policies = [
            Policy(
                arm.name,
                {ring: values(found[arm.name], ring) for ring in columns(table)},
                [one["train_reward"] for one in found[arm.name]["seeds"].values()],
            )
            for arm in ran
        ]
        if policies:
            compared.append(Comparison(f"({table}) {title}", columns(table), policies))
    about = (
        "Pass@1 of a tiny policy on tasks that are never trained, one sampled episode each, by the harnesses that it "
        "is measured in. Bars are means over seeds, whiskers standard errors, points the seeds. Made by "
        "benchmarks/harness_scaling.py."
    )
    return document("Harness scaling in small", about, compared)


def smoke(folder: Path) -> dict[str, Any]:
    """One step in two harnesses, measured in two; of a policy that knows nothing."""
    from transformers import AutoTokenizer

    from algos.tiny import build_model, build_tokenizer

    model = folder / "model"
    model.mkdir()
    build_tokenizer(model, levels=True)
    build_model(len(AutoTokenizer.from_pretrained(model)), seed=0).save_pretrained(model)
    small = [
        "steps=1",
        "rollout.groups=2",
        "rollout.group_size=2",
        *UNMEASURED,
        "proxy.max_tokens=8",
    ]
    module("algos.run", str(TRAIN), f"model.path={model}", f"dir={folder / 'run'}", "wandb.mode=disabled", *small)
    rings = "rings=[{name: base, harnesses: [{}], tasks: [space]}]"
    run = begun(folder / "run")
    module("algos.eval", str(EVALUATE), f"model.path={run}", f"dir={folder / 'eval'}", rings, "proxy.max_tokens=8")
    evaluation = begun(folder / "eval")
    assert evaluation is not None
    found = scores(evaluation)
    return {"complete": found.complete, "rings": len({place.ring for place in found.places()})}


if __name__ == "__main__":
    main()
