"""A real run of the entry point as a child process, and the processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class LiveRun:
    """``python -m algos.run``, or another module, in a session of its own; its output goes to ``folder/output.txt``."""

    def __init__(self, folder: Path, *arguments: str, module: str = "algos.run") -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        offline = ["wandb.mode=disabled"] if module == "algos.run" else []
        command = [sys.executable, "-m", module, *arguments, f"dir={folder}", *offline]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout:.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    def run_folder(self) -> Path:
        return next(path for path in sorted(self.folder.iterdir()) if (path / "config.yaml").exists())

    def rows(self, name: str) -> list[dict[str, Any]]:
        from algos.runlog import read_jsonl

        found = sorted(self.folder.glob(f"*/{name}"))
        return read_jsonl(found[0]) if found else []

    def reach(self, step: int, timeout: float) -> None:
        """Wait until the row of a step is written."""
        self.until(lambda: any(row["step"] >= step for row in self.rows("metrics.jsonl")), timeout, f"step {step}")

    def until(self, true: Any, timeout: float, what: str) -> Any:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = true()
            if value:
                return value
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.tail()}"
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout:.0f} s:\n{self.tail()}")

    def find(self, title: str) -> list[int]:
        """Pids of the run's own descendants whose command line begins with ``title``."""
        return [pid for pid in descendants(self.process.pid) if command_line(pid).startswith(title)]

    def kill_part(self, title: str, timeout: float = 60) -> int:
        """SIGKILL to the first process of that title, once there is one."""
        pid = self.until(lambda: self.find(title), timeout, f"process {title}")[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def until_gone(self, pids: list[int], timeout: float) -> None:
        """Wait until none of these processes is alive."""
        deadline = time.monotonic() + timeout
        while left := [pid for pid in pids if command_line(pid)]:
            assert time.monotonic() < deadline, f"still there: {[(pid, command_line(pid)) for pid in left]}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End everything that the run started; for the end of a test."""
        pids = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {root}
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grown = True
    return sorted(found - {root})


def statuses_add_up(rows: list[dict[str, Any]], episodes: list[dict[str, Any]]) -> None:
    """The counts of every step agree with each other and with the lines of the episodes."""
    for row in rows:
        if row["step"] == 0:
            continue
        named = {s: row[f"episodes/{s}"] for s in ("completed", "truncated", "failed", "dropped")}
        mine = [e for e in episodes if e["split"] == "train" and e["step"] == row["step"] - 1]
        assert sum(named.values()) == row["episodes/scheduled"] == len(mine), row["step"]
        for status, count in named.items():
            assert sum(e["status"] == status for e in mine) == count, (row["step"], status)
        assert sum(e["retries"] for e in mine) == row["episodes/retries"]
        assert row["train/episodes"] == named["completed"] + named["truncated"]
        removed = sum(v for k, v in row.items() if k.startswith("filter/removed"))
        kinds = sum(v for k, v in row.items() if k.startswith("kind/"))
        assert row["filter/kept"] + removed == kinds == row["tokens/sampled"]
        assert sum(e["tokens_trained"] for e in mine) == row["filter/kept"]
        assert row["train/tokens"] == row["filter/kept"]
        assert row["train/staleness_max"] <= 1
