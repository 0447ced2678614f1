"""Desk tasks as folders in the ClawGym format, with a grader in plain bash.

Invariant: the grader trusts nothing in the workspace. A path counts only when it is a regular file
reached through real directories; a link, a directory or a pipe at that place scores 0. It never
follows a link out of the workspace and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from envs.tasks import clawgym
from envs.tasks.task import Task

if TYPE_CHECKING:
    from envs.tasks.desk import DeskTask

MOUNT_DIR = "/workspace"

# One text for all tasks; what differs lies beside it: `expected/` (files with exactly these bytes,
# results and inputs that must stay alike), `results` and `absent` (paths, one a line), `partial`.
REWARD_SH = r"""#!/usr/bin/env bash
# Grades the workspace in the current directory. The last line of the output is the score, 0 to 1.
set -u -f
here=${BASH_SOURCE[0]%/*}

real_file() { # true when $1 is a regular file and no part of its path is a link
  local path=$1 part
  [[ -f $path && ! -L $path ]] || return 1
  part=$path
  while [[ $part == */* ]]; do
    part=${part%/*}
    [[ -L $part ]] && return 1
  done
  return 0
}

gone() { # true when nothing at all is at $1
  [[ ! -e $1 && ! -L $1 ]]
}

exact() { # true when $1 has the expected bytes
  real_file "$1" && cmp -s -- "$1" "$here/expected/$1"
}

likeness() { # thousandths of lines of $1 that are right and in place
  local -a got want
  local i same=0 most
  real_file "$1" || { echo 0; return; }
  exact "$1" && { echo 1000; return; }
  mapfile -t -n 1000 got 2>/dev/null < "$1"
  mapfile -t want < "$here/expected/$1"
  for ((i = 0; i < ${#want[@]}; i++)); do
    [[ ${got[i]-} == "${want[i]}" ]] && ((same++))
  done
  ((most = ${#got[@]} > ${#want[@]} ? ${#got[@]} : ${#want[@]}))
  # Equal lines without equal bytes (a missing last newline) are not quite right.
  ((same == most)) && echo 900 || echo $((1000 * same / most))
}

mapfile -t results < "$here/results"
mapfile -t unchanged < "$here/unchanged"
mapfile -t absent < "$here/absent"

for path in "${unchanged[@]}"; do
  exact "$path" || { echo 0; exit 0; }
done

total=0
for path in "${results[@]}"; do
  if [[ -e $here/partial ]]; then
    ((total += $(likeness "$path")))
  elif exact "$path"; then
    ((total += 1000))
  fi
done
for path in "${absent[@]}"; do
  gone "$path" && ((total += 1000))
done

parts=$((${#results[@]} + ${#absent[@]}))
if ((total == 1000 * parts)); then
  echo 1
elif [[ -e $here/partial ]]; then
  printf '0.%03d\n' $((total / parts))
else
  echo 0
fi
"""


def write(tasks: Iterable[DeskTask], folder: Path) -> list[Task]:
    """Write each task into ``folder/<task id>`` and hand back the tasks as they would be loaded.

    A task folder that is there already is replaced.
    """
    return [_write_one(task, folder / task.id) for task in tasks]


def _write_one(task: DeskTask, folder: Path) -> Task:
    unchanged = {path: text for path, text in task.inputs.items() if path not in {*task.results, *task.absent}}
    reward: dict[str, str | bytes] = {"reward.sh": REWARD_SH}
    reward |= {f"expected/{path}": text for path, text in (task.results | unchanged).items()}
    for name, paths in (("results", task.results), ("unchanged", unchanged), ("absent", task.absent)):
        reward[name] = "".join(path + "\n" for path in paths)
    if task.partial_credit:
        reward["partial"] = ""
    metadata: dict[str, str | int | float | bool] = {
        "family": task.family,
        "level": task.level,
        "split": task.split,
        "wording": task.wording,
    }
    inputs: dict[str, str | bytes] = {**task.inputs}
    return clawgym.write(folder, task.id, task.instruction, inputs, reward, metadata, MOUNT_DIR)
