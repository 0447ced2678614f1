import io
import json
import time

from rich.console import Console as RichConsole

from algos.display import LiveDisplay, before_after, evaluations, failures, sparkline
from algos.runlog import RunLog, read_jsonl, rewind
from configs.loader import load


class Display:
    def step(self, row): ...
    def evaluation(self, done, total, name): ...
    def episode(self, row): ...


def test_rows_are_json_and_missing_figures_are_null(tmp_path):
    log = RunLog(tmp_path, load(None, ["wandb.mode=disabled"]), Display())
    log.step({"step": 1, "x": float("nan"), "y": 0.1})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "x": None, "y": 0.1}


def test_rewind_keeps_what_a_shorter_run_would_have_written(tmp_path):
    log = RunLog(tmp_path, load(None, ["wandb.mode=disabled"]), Display())
    for step in range(4):
        log.step({"step": step, "eval/heldout/reward_greedy": 0.5})
        log.episode({"id": f"e{step}", "step": step, "split": "heldout/greedy"})
        log.episode({"id": f"t{step}", "step": step, "split": "train"})
    log.close()
    rewind(tmp_path, 2)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["id"] for row in read_jsonl(tmp_path / "episodes.jsonl")] == ["e0", "t0", "e1", "t1", "e2"]


def test_episodes_of_an_evaluation_stay_only_with_its_figures(tmp_path):
    log = RunLog(tmp_path, load(None, ["wandb.mode=disabled"]), Display())
    for step in range(6):
        log.episode({"id": f"e{step}", "step": step, "split": "heldout/greedy"})
        log.step({"step": step})
    log.step({"step": 3, "eval/step": 2, "eval/heldout/reward_greedy": 0.5})
    log.step({"step": 5, "eval/step": 4, "eval/heldout/reward_greedy": 0.5})
    log.close()
    rewind(tmp_path, 4)
    assert [row["id"] for row in read_jsonl(tmp_path / "episodes.jsonl")] == ["e2"]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "los')
    assert read_jsonl(path) == [{"step": 0}]
    rewind(tmp_path, 5)
    assert path.read_text() == '{"step": 0}\n'


def test_sparkline_spans_the_unit_interval_and_marks_gaps():
    assert sparkline([0.0, 0.5, 1.0, float("nan")]) == " ▄█·"


def test_evaluations_are_shown_side_by_side():
    one = {"step": 0, "eval/heldout/reward_greedy": 0.1, "eval/heldout/reward_sampled": 0.2}
    assert before_after([{"step": 1}]) is None
    alone = before_after([one])
    assert alone is not None
    assert [[str(cell) for cell in column.cells] for column in alone.columns[1:]] == [["0.10"], ["0.20"]]
    table = before_after([one, {"step": 1}, one | {"step": 2, "eval/heldout/reward_greedy": 0.9}])
    assert table is not None
    assert [str(cell) for cell in table.columns[1].cells] == ["0.10"]
    assert [str(cell) for cell in table.columns[2].cells] == ["0.90"]


def test_the_table_has_the_families_of_a_set_before_its_harnesses():
    keys = ("heldout", "heldout/in codex", "heldout/sum", "heldout/count", "wording")
    table = before_after([{"step": 0} | {f"eval/{key}/reward_greedy": 0.5 for key in keys}])
    assert table is not None
    shown = [str(cell).strip() for cell in table.columns[0].cells]
    assert shown == ["heldout", "count", "sum", "in codex", "wording"]


def test_sets_of_unequal_size_are_told_and_an_evaluation_that_was_left_out_is_none():
    one = {
        "step": 0,
        "eval/heldout/reward_greedy": 0.1,
        "eval/heldout/tasks": 8,
        "eval/heldout/[/b]/reward_greedy": 0.1,
    }
    more = one | {"step": 2, "eval/heldout/tasks": 96}
    columns, data = evaluations([one, more, {"step": 3, "eval/skipped": 1}])
    assert columns[:5] == ["tasks", "n before", "n after", "greedy before", "greedy after"]
    assert data[0][:3] == ["heldout", 8, 96]
    table = before_after([one, more])
    assert table is not None
    console = RichConsole(file=io.StringIO(), width=200)
    console.print(table)
    told = console.file.getvalue()
    assert "not of the same number of tasks" in told
    assert "[/b]" in told
    same = before_after([one, more | {"eval/heldout/tasks": 8}])
    assert same is not None
    assert same.caption is None


def test_failed_episodes_are_told_with_harness_and_reason():
    def rows(count: int, status: str, harness: str, reason: str) -> list[dict[str, str]]:
        return [{"status": status, "harness": harness, "reason": reason}] * count

    assert failures(rows(3, "completed", "codex", "exit code 0")) == ""
    told = failures(rows(3, "completed", "a", "") + rows(1, "failed", "b", "x\ny") + rows(2, "failed", "a", "z" * 999))
    assert told.splitlines() == [
        "3 of 6 episodes failed and are in no mean (reason in episodes.jsonl):",
        f"  2 in a: {'z' * 200}",
        "  1 in b: x",
    ]
    many = [row for number in range(7) for row in rows(1, "failed", "a", str(number))]
    assert failures(many).splitlines()[-1] == "  and 2 more reasons"


def test_a_line_of_a_step_says_how_many_episodes_failed(capsys):
    row = {"step": 2, "episodes/failed": 3, "eval/heldout/failed": 4, "harness/a/failed": 3}
    LiveDisplay(5, "x", RichConsole()).step(row)
    assert "step 2/5  7 episodes failed" in capsys.readouterr().out


def test_an_offline_run_is_kept_by_wandb_in_the_run_folder(tmp_path):
    log = RunLog(tmp_path, load(None, []), Display())
    log.step({"step": 1, "train/reward": 0.5, "missing": float("nan")})
    log.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_an_offline_run_has_the_table_the_episodes_and_the_trees_as_artifacts_without_a_copy(tmp_path):
    tree = tmp_path / "trees" / "step_000000" / "g0.tree"
    tree.parent.mkdir(parents=True)
    tree.write_bytes(b"a tree of some length")
    log = RunLog(tmp_path, load(None, []), Display())
    log.step({"step": 0, "eval/heldout/reward_greedy": 0.1, "eval/heldout/sum/reward_greedy": 0.0})
    log.episode({"id": "e0", "step": 0, "split": "train"})
    log.step({"step": 1, "eval/heldout/reward_greedy": 0.9, "eval/heldout/sum/reward_greedy": 1.0})
    log.close()
    [kept] = (tmp_path / "wandb").glob("offline-run-*")
    [table] = kept.rglob("*.table.json")
    told = json.loads(table.read_text())
    assert told["columns"] == ["tasks", "greedy before", "greedy after", "sampled before", "sampled after"]
    assert told["data"] == [["heldout", 0.1, 0.9, None, None], ["heldout/sum", 0.0, 1.0, None, None]]
    [records] = kept.glob("*.wandb")
    deadline = time.monotonic() + 20
    # W&B writes in a process of its own.
    while str(tree).encode() not in records.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not list(kept.rglob("g0.tree"))


def test_artifacts_can_be_left_out(tmp_path):
    log = RunLog(tmp_path, load(None, ["wandb.artifacts=false"]), Display())
    log.step({"step": 0, "eval/heldout/reward_greedy": 0.1})
    log.close()
    assert not list((tmp_path / "wandb").rglob("*.table.json"))


def test_texts_with_line_separators_are_read_back(tmp_path):
    log = RunLog(tmp_path, load(None, ["wandb.mode=disabled"]), Display())
    log.episode({"id": "a\u2028b\x85c\x0cd", "step": 0, "split": "train"})
    log.close()
    rewind(tmp_path, 1)
    assert [row["id"] for row in read_jsonl(tmp_path / "episodes.jsonl")] == ["a\u2028b\x85c\x0cd"]
