"""The quickstart learns: held-out success before and after training, greedy and sampled, over several seeds.

    python benchmarks/quickstart.py            three seeds from nothing; writes results/quickstart.json
    python benchmarks/quickstart.py --seeds 0  one seed
    python benchmarks/quickstart.py --config configs/quickstart_ppo.yaml   with PPO; writes results/quickstart_ppo.json
    python benchmarks/quickstart.py --smoke    one step of an untrained policy: the machinery only

Success is the mean reward on 96 held-out tasks (12 of each family), each tried once; ``wording`` are held-out tasks
in phrasings that are never trained. Seconds are wall seconds of the whole command, start and evaluations included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from algos.runlog import read_jsonl

RESULTS = Path(__file__).with_name("results")
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
STAGES = ("rollout_wait", "train", "update", "eval")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--config", type=Path, default=CONFIG, help="default: the quickstart's")
    parser.add_argument("--smoke", action="store_true", help="one step of an untrained policy")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run folders there; must be new")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of the run")
    args = parser.parse_args()
    if args.runs is not None:
        args.runs.mkdir(parents=True)
    with tempfile.TemporaryDirectory() if args.runs is None else nullcontext(args.runs) as folder:
        if args.smoke:
            runs = [run(args.config, 0, Path(folder), [*untrained(Path(folder)), *args.overrides])]
        else:
            runs = [run(args.config, seed, Path(folder), args.overrides) for seed in args.seeds]
    result = {"benchmark": args.config.stem, "smoke": args.smoke} | summary(runs)
    show(runs)
    if not args.smoke:
        RESULTS.mkdir(exist_ok=True)
        # Where the run folders lie changes nothing, and is of this machine.
        given = " ".join(["python", "benchmarks/quickstart.py", *sys.argv[1:]])
        command = given if args.runs is None else given.replace(f" --runs {args.runs}", "")
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
        (RESULTS / f"{args.config.stem}.json").write_text(
            json.dumps({"command": command, "machine": machine} | result | {"runs": runs}, indent=1) + "\n"
        )
    print(json.dumps(result))


def untrained(folder: Path) -> list[str]:
    """Settings of a run that shows nothing but that the machinery works."""
    from transformers import AutoTokenizer

    from algos.tiny import build_model, build_tokenizer

    model = folder / "model"
    model.mkdir()
    build_tokenizer(model)
    build_model(len(AutoTokenizer.from_pretrained(model)), seed=0).save_pretrained(model)
    return [f"model.path={model}", "steps=1", "rollout.groups=2", "eval.tasks=8", "proxy.max_tokens=8"]


def run(config: Path, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One training from the command line, first cold start included; its curve and where the time went."""
    out = folder / f"seed{seed}"
    settings = [f"seed={seed}", f"dir={out}", f"coldstart.cache={folder / 'cache'}", "wandb.mode=disabled"]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "algos.run", str(config), *settings, *overrides], check=True, stdout=sys.stderr
    )
    seconds = time.monotonic() - began
    rows = read_jsonl(next(out.iterdir()) / "metrics.jsonl")
    evaluated = [row for row in rows if "eval/heldout/reward_greedy" in row]
    cold = sorted((folder / "cache").glob(f"{seed}-*/coldstart.json"))
    report = json.loads(cold[0].read_text()) if cold else {}
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "seconds_coldstart": round(report.get("seconds", 0.0), 1),
        "seconds_steps": round(sum(row.get("seconds/step", 0.0) for row in rows), 1),
        "seconds_by_stage": {s: round(sum(row.get(f"seconds/{s}", 0.0) for row in rows), 1) for s in STAGES},
        "before": evaluations(evaluated[0]),
        "after": evaluations(evaluated[-1]),
        "curve": [[row["step"], row["eval/heldout/reward_greedy"]] for row in evaluated],
        "curve_sampled": [[row["step"], row.get("eval/heldout/reward_sampled")] for row in evaluated],
        "train_reward": series(rows, "train/reward"),
        "explained_variance": series(rows, "train/explained_variance"),
        "statuses": {s: sum(row.get(f"episodes/{s}", 0) for row in rows) for s in ("completed", "truncated", "failed")},
    }


def series(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [round(row[name], 4) for row in rows if name in row]


def evaluations(row: dict[str, Any]) -> dict[str, float]:
    """``<set>[/<family>]/<greedy|sampled>`` -> mean reward."""
    found = {k: v for k, v in row.items() if k.startswith("eval/") and "/reward_" in k}
    return {k.removeprefix("eval/").replace("/reward_", "/"): round(v, 4) for k, v in found.items()}


def family_means(run: dict[str, Any], when: str) -> list[float]:
    return [v for k, v in run[when].items() if k.startswith("heldout/") and k.count("/") == 2 and k.endswith("/greedy")]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the claim: worst seeds, not means.

    Explained variance, where there is a critic: the mean over steps 2 to 6 and the best mean over five steps in a row.
    The last steps say little of a critic, since rewards that are all 1 have no variance to explain.
    """
    explained = [r["explained_variance"] for r in runs if len(r["explained_variance"]) > 6]
    critic = (
        {
            "explained_variance_first_max": max(sum(values[1:6]) / 5 for values in explained),
            "explained_variance_best_min": min(
                max(sum(values[i : i + 5]) / 5 for i in range(len(values) - 4)) for values in explained
            ),
        }
        if explained
        else {}
    )
    return critic | {
        "seeds": [r["seed"] for r in runs],
        "greedy_before_max": max(r["before"]["heldout/greedy"] for r in runs),
        "greedy_after_min": min(r["after"]["heldout/greedy"] for r in runs),
        "sampled_before_max": max(r["before"]["heldout/sampled"] for r in runs),
        "sampled_after_min": min(r["after"]["heldout/sampled"] for r in runs),
        "family_after_min": min(min(family_means(r, "after")) for r in runs),
        "wording_greedy_before_max": max(r["before"]["wording/greedy"] for r in runs),
        "wording_greedy_after_min": min(r["after"]["wording/greedy"] for r in runs),
        "seconds_first_max": max(r["seconds"] for r in runs),
        "seconds_cached_max": max(round(r["seconds"] - r["seconds_coldstart"], 1) for r in runs),
    }


def show(runs: list[dict[str, Any]]) -> None:
    table = Table(title="Quickstart: success on tasks never trained", title_justify="left")
    for name in ("seed", "greedy", "sampled", "worst family", "new wordings", "seconds", "of it cold start"):
        table.add_column(name, justify="right")
    for r in runs:
        before, after = r["before"], r["after"]
        cells = [f"{before[k]:.2f} -> {after[k]:.2f}" for k in ("heldout/greedy", "heldout/sampled")]
        worst = f"{min(family_means(r, 'before')):.2f} -> {min(family_means(r, 'after')):.2f}"
        wording = f"{before['wording/greedy']:.2f} -> {after['wording/greedy']:.2f}"
        table.add_row(str(r["seed"]), *cells, worst, wording, f"{r['seconds']:.0f}", f"{r['seconds_coldstart']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
