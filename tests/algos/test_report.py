"""The report of runs: what it reads, what it draws, and that nothing in a run folder can break it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import CHROMIUM, dumped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import require
from page_blocks import Blocks
from small_tokenizer import small_tokenizer
from tree_sessions import call, grow

from algos import report
from algos.reporting.groups import at_ends, curve, differing, grouped
from algos.reporting.kept import add_behaviour, kept
from algos.reporting.runs import ReportError, read_run
from algos.reporting.words import said
from configs.loader import dump, load
from trees import codec
from trees.tree import Tree

HOSTILE = "</script></style><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202e"
HELD_OUT = "eval/heldout/reward_greedy"


def metrics(step: int, reward: float, **more: Any) -> dict[str, Any]:
    row = {"step": step, "train/reward": reward, "train/entropy": 0.1 / step, "episodes/completed": 4}
    row |= {"episodes/scheduled": 4, "filter/kept": 40, "filter/removed: dead: aborted": 3, "kind/main": 43}
    row |= {"seconds/step": 5.0, "seconds/rollout_wait": 3.0, "seconds/train": 1.5, "seconds/learner_old": 0.5}
    return row | more


def make_run(folder: Path, *overrides: str, rewards: tuple[float, ...] = (0.2, 0.5, 0.9), steps: int = 3) -> Path:
    """A run folder with a line of metrics for each reward, and an evaluation before and after."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(load(None, [f"steps={steps}", *overrides])))
    rows: list[dict[str, Any]] = [
        {"step": 0, HELD_OUT: 0.1, "eval/heldout/sum/reward_greedy": 0.0, "seconds/eval": 2.0}
    ]
    rows += [metrics(step, value) for step, value in enumerate(rewards, 1)]
    if len(rewards) == steps:
        rows[-1] |= {HELD_OUT: rewards[-1], "eval/heldout/sum/reward_greedy": 1.0}
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_episodes(folder: Path) -> None:
    """Four episodes of step 1; the third has forked, the last has no tree."""
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = []
    for number, (reward, calls, leaves) in enumerate([(0.0, 1, 1), (1.0, 1, 1), (0.5, 2, 2), (1.0, 9, 9)]):
        name = f"s00000g{number:03d}m000"
        rows.append({"id": name, "step": 0, "split": "train", "task": HOSTILE, "family": "sum", "status": "completed"})
        rows[-1] |= {
            "harness": "agent_loop",
            "reason": "final answer",
            "reward": reward,
            "calls": calls,
            "leaves": leaves,
        }
        rows[-1] |= {"tokens_prompt": 20, "tokens_sampled": 5, "tokens_trained": 5}
        if number < 3:
            path = folder / "trees" / "step_000000" / f"{name}.tree"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(codec.encode(conversation(tokenizer, name)))
    write_lines(
        folder / "episodes.jsonl", [*rows, {"id": "e0", "step": 0, "split": "heldout/greedy", "status": "failed"}]
    )


def conversation(tokenizer: Any, name: str) -> Tree:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    tree = grow(
        call(0, None, ids(f"user: {HOSTILE} do it"), ids("I read it")),
        call(1, 0, ids("the file says é😀 " + "x" * 2000), ids("I wrote it")),
    )
    tree.meta |= {"episode": name}
    return tree


def written(*places: Path, out: Path) -> Blocks:
    assert report.main([*map(str, places), "--out", str(out)]) == 0
    return Blocks(out.read_text(encoding="utf-8"))


def test_a_run_becomes_a_page_with_curves_tables_examples_and_its_outcome_in_words(tmp_path: Path, capsys):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    assert report.main([str(folder)]) == 0
    page = Blocks((folder / "report.html").read_text(encoding="utf-8"))
    assert "GRPO trained the tiny policy of the cold start for 3 steps of 8 × 8 episodes" in page.words
    assert "The greedy reward on held-out tasks went from 0.10 to 0.90." in page.words
    for word in (
        "Training reward",
        "Entropy",
        "How episodes ended",
        "dead: aborted",
        "Where the time",
        "learning_rate",
    ):
        assert word in page.words
    assert "Explained variance" not in page.words
    assert page.tags.count("figure") >= 6
    assert "report_trees.html" in capsys.readouterr().out


def test_an_evaluation_beside_the_training_takes_no_step_away_and_stands_where_it_began(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "policy_version": 3, "eval/step": 2, HELD_OUT: 0.4}) + "\n")
        file.write(json.dumps({"step": 3, "eval/step": "two", HELD_OUT: 0.7}) + "\n")
    run = read_run(folder)
    assert run.values("train/reward") == {1: 0.2, 2: 0.5, 3: 0.9}
    assert run.values(HELD_OUT) == {0: 0.1, 2: 0.4, 3: 0.9}
    assert run.notes == ["metrics.jsonl: line 6: eval/step is 'two', expected a number of steps; left out"]


def test_the_page_loads_nothing_and_may_run_only_its_own_script(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    page = written(folder, out=tmp_path / "out.html")
    for part in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[part].encode()).digest()).decode()
        assert f"{part}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    assert all(address == "data:," or address.startswith("out_trees.html#") for address in page.addresses)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert HOSTILE in page.words
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", page.texts["script"])


def test_examples_are_the_extremes_of_the_episodes_whose_tree_is_kept(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    page = written(folder, out=tmp_path / "out.html")
    linked = [address.partition("#episode=")[2] for address in page.addresses if "#" in address]
    assert linked == ["s00000g001m000", "s00000g000m000", "s00000g002m000"]
    assert "longest, most branched" in page.words
    assert "characters left out" in page.words
    trees = (tmp_path / "out_trees.html").read_text()
    assert all(f'"episode":"{name}"' in trees for name in linked)


def test_behaviour_is_read_from_the_trees_of_a_step(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    run = read_run(folder)
    trees = kept(run, [])
    assert trees is not None
    add_behaviour(trees)
    assert run.values("behaviour/malformed") == {1: 0.0}
    assert run.values("behaviour/failing") == {1: 0.0}
    page = written(folder, out=tmp_path / "out.html")
    assert "0 in every step: malformed replies, failing calls" in page.words


def test_runs_of_equal_settings_but_the_seed_are_one_curve_with_a_band(tmp_path: Path):
    folders = [make_run(tmp_path / f"s{seed}", f"seed={seed}", rewards=(0.1 * seed, 0.5, 0.5)) for seed in (1, 2, 3)]
    other = make_run(tmp_path / "other", "learner.learning_rate=0.5")
    groups = grouped([read_run(folder) for folder in [*folders, other]])
    assert [len(group.runs) for group in groups] == [3, 1]
    assert differing(groups) == ["learner.learning_rate"]
    assert [group.label for group in groups] == ["quickstart learning_rate=0.0008", "quickstart learning_rate=0.5"]
    line = curve(groups[0], "train/reward")
    assert (line.steps[0], line.runs[0]) == (1.0, 3)
    assert (line.mean[0], line.low[0], line.high[0]) == pytest.approx((0.2, 0.1, 0.3))
    assert "3 runs, seeds 1, 2, 3" in said(groups[0])[0]
    page = written(*folders, other, out=tmp_path / "out.html")
    assert "What tells them apart" in page.words
    assert (tmp_path / "out.html").read_text().count('class="band') >= 1


def test_runs_that_differ_in_no_setting_and_no_seed_have_labels_of_their_own(tmp_path: Path):
    folders = [make_run(tmp_path / name, "steps=3") for name in ("a", "b")]
    (folders[0] / "config.yaml").unlink()
    (folders[1] / "config.yaml").unlink()
    groups = grouped([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["a", "b"]


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path, capsys):
    folder = make_run(tmp_path / "run")
    assert report.main([str(folder), f"{folder}/../run", "--out", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out.count("reading") == 1


def test_figures_that_are_missing_are_gaps_and_not_zeros(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    rows = [
        metrics(1, 0.5),
        metrics(2, 0.5) | {"train/reward": None},
        metrics(4, 0.5),
        {"step": 5, "train/reward": "x"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 6, "train/reward": NaN, "train/loss": Infinity}\n')
    run = read_run(folder)
    values = run.values("train/reward")
    assert list(values) == [1, 2, 4, 6]
    assert math.isnan(values[2])
    assert math.isnan(values[6])
    line = curve(grouped([run])[0], "train/reward")
    assert [math.isfinite(value) for value in line.mean] == [True, False, True, False]
    written(folder, out=tmp_path / "out.html")
    path = re.search(r'class="line c0 d0" d="([^"]*)"', (tmp_path / "out.html").read_text())
    assert path is not None
    assert path[1].count("M") == 2


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"step": 1}\n{"step": 2, "tr', "line 2 is cut short"),
        ('{"step": 1}\n!!\n{"step": 2}\n', "line 2 is not JSON"),
        ('{"step": 1}\n[1]\n', "line 2 is no row"),
        ('{"step": "one"}\n{"x": 1}\n', "line 1: step is 'one'"),
        ('{"step": 1}\n{"step": 1}\n', "line 1: step 1 comes again in line 2"),
        ('{"step": 1, "x": 1e999, "y": ' + "9" * 400 + "}\n", ""),
        ("[" * 100_000 + "\n", "not JSON"),
        ("\xff\x00\n" * 9, "4 more lines"),
        ("", ""),
    ],
)
def test_damaged_lines_are_left_out_and_told(tmp_path: Path, capsys, lines: str, told: str):
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_bytes(lines.encode("latin-1"))
    page = written(folder, out=tmp_path / "out.html")
    assert told in page.words
    assert told in capsys.readouterr().err


_KEYS = (
    "train/reward",
    HELD_OUT,
    "eval//reward_",
    "harness/reward",
    "kind/\ud800",
    "seconds/step",
    "seconds/eval",
    "x",
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)
_ROW = st.dictionaries(st.sampled_from(_KEYS), _JSON | st.floats(0, 9), max_size=8)
_EPISODE_KEYS = ("id", "split", "step", "reward", "calls", "leaves", "status", "tokens_prompt", "seconds")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.tuples(st.integers(0, 5) | _JSON, _ROW), max_size=6),
    episodes=st.lists(st.dictionaries(st.sampled_from(_EPISODE_KEYS), _JSON, max_size=9), max_size=3),
    config=st.dictionaries(st.sampled_from(["steps", "mix", "seed", "name", "learner", "tasks"]), _JSON, max_size=6),
)
def test_whatever_the_files_hold_there_is_a_page(tmp_path_factory, rows, episodes, config):
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "config.until_step_000001.yaml").write_text(json.dumps(config | {"seed": 1}))
    write_lines(folder / "metrics.jsonl", [{**row, "step": step} for step, row in rows])
    write_lines(folder / "episodes.jsonl", episodes)
    assert report.main([str(folder)]) == 0
    assert (folder / "report.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize("config", ["a: [1", "- 1", "", "\x00", "steps: many\nmix: 3\nlearner: 1"])
def test_damaged_settings_leave_the_curves(tmp_path: Path, config: str):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(config)
    assert "Training reward" in written(folder, out=tmp_path / "out.html").words


def test_a_run_without_a_step_and_one_without_settings_have_pages(tmp_path: Path):
    empty = make_run(tmp_path / "empty")
    (empty / "metrics.jsonl").unlink()
    assert "No step and no evaluation has ended yet" in written(empty, out=tmp_path / "empty.html").words
    bare = make_run(tmp_path / "bare")
    (bare / "config.yaml").unlink()
    page = written(bare, out=tmp_path / "bare.html")
    assert "config.yaml is missing" in page.words
    assert "Training reward" in page.words


def test_what_is_no_run_is_one_line_that_says_what_is_expected(tmp_path: Path, capsys):
    make_run(tmp_path / "runs" / "one")
    for place, expected in ((tmp_path / "nowhere", "no such folder"), (tmp_path / "runs", "such as")):
        assert report.main([str(place)]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert expected in told[0]
    assert report.main([str(tmp_path / "runs" / "one"), "--out", str(tmp_path)]) == 2
    assert report.main([str(tmp_path / "runs" / "one"), "--out", str(tmp_path / "no" / "out.html")]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
    with pytest.raises(ReportError, match="expected a run folder"):
        read_run(tmp_path / "runs")


def test_the_state_of_a_run_is_told(tmp_path: Path):
    done = make_run(tmp_path / "done")
    part = make_run(tmp_path / "part", steps=9)
    assert (read_run(done).state, read_run(part).told) == ("done", "stopped after step 3 of 9")
    with (part / ".learner").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(part).told == "going on: step 3 of 9 so far"
    (part / "fault.txt").write_text("Traceback\n  ...\nValueError: got loss nan\n")
    assert read_run(part).told == "stopped by an error after step 3 of 9: ValueError: got loss nan"
    os.utime(part / "fault.txt", (1, 1))
    assert read_run(part).state == "stopped"


def test_what_a_resume_changed_is_listed_and_marked(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    before = yaml.safe_load((folder / "config.yaml").read_text())
    before["rollout"]["temperature"] = 0.25
    (folder / "config.until_step_000002.yaml").write_text(yaml.safe_dump(before))
    [change] = read_run(folder).changes
    assert (change.step, change.settings) == (2, [("rollout.temperature", 0.25, 1.0)])
    page = written(folder, out=tmp_path / "out.html")
    assert "Changed by a resume" in page.words
    assert 'class="mark"' in (tmp_path / "out.html").read_text()


def test_an_unfinished_run_is_compared_with_what_it_has(tmp_path: Path):
    [group] = grouped([read_run(make_run(tmp_path / "run", steps=9))])
    assert at_ends(group, HELD_OUT) == ([0.1], [])
    words = " ".join(said(group))
    assert "was 0.10 before, and was not measured since" in words
    assert "from 0.20 in the first step to 0.90 in the newest" in words
    assert "Stopped after step 3 of 9." in words


def test_a_damaged_tree_costs_only_its_link(tmp_path: Path, capsys):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    path = folder / "trees" / "step_000000" / "s00000g001m000.tree"
    path.write_bytes(path.read_bytes()[:-9])
    (folder / "tokenizer.json").write_text("{}")
    page = written(folder, out=tmp_path / "out.html")
    assert "tree unreadable" in page.words
    assert sum("#episode=" in address for address in page.addresses) == 2
    told = capsys.readouterr().err
    assert "s00000g001m000 cannot be read" in told
    assert "tokenizer.json cannot be read" in told


def test_without_trees_nothing_is_written_beside_the_page(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    out = tmp_path / "out" / "page.html"
    out.parent.mkdir()
    assert report.main([str(folder), "--no-trees", "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_a_very_long_run_stays_a_small_page(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=20_000)
    write_lines(folder / "metrics.jsonl", [metrics(step, step % 7 / 7) for step in range(1, 20_001)])
    written(folder, out=tmp_path / "out.html")
    assert (tmp_path / "out.html").stat().st_size < 1_000_000
    line = curve(grouped([read_run(folder)])[0], "train/reward")
    assert len(line.steps) <= 400
    assert (min(line.low), max(line.high)) == pytest.approx((0, 6 / 7))


def test_the_report_needs_no_ray_and_no_torch():
    code = "import sys, algos.report; sys.exit(bool({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.harness
def test_a_browser_draws_the_page_without_an_error_and_runs_nothing_of_a_run(tmp_path: Path):
    require(CHROMIUM is not None, "apt-get install chromium")
    folder = make_run(tmp_path / "run")
    add_episodes(folder)
    page = written(folder, out=tmp_path / "out.html")
    text, console = dumped((tmp_path / "out.html").as_uri(), tmp_path / "profile")
    assert console == ""
    # Set by the last line of the script, so all before it ran.
    assert f'data-ready="{page.tags.count("figure")}"' in text
    assert "owned" not in re.search("<title>(.*?)</title>", text)[1]
    assert "<img" not in text
    link = next(address for address in page.addresses if "#" in address)
    tree, console = dumped(f"{tmp_path.as_uri()}/{link}", tmp_path / "tree")
    assert console == ""
    assert 'data-kind="main"' in tree.split("<script")[0]
    shutil.rmtree(tmp_path / "profile")
