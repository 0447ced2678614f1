"""Task folders of Harbor and Terminal-Bench.

    <task>/task.toml         [metadata], [agent], [verifier] timeouts, [environment]
    <task>/instruction.md    what the agent is asked
    <task>/environment/      a Dockerfile and what it copies
    <task>/tests/test.sh     writes the reward into /logs/verifier/reward.txt, or reward.json

The older Terminal-Bench folders (``task.yaml`` with the instruction, ``run-tests.sh``, ``tests/``, ``Dockerfile``) are
read too; there the exit code of ``run-tests.sh`` is the grade.

The workspace is the Dockerfile's WORKDIR (``/app`` without one) with what it copies there. Nothing is built: what the
Dockerfile installs, an image of the run must hold (``sandbox.docker.image``); the field ``image`` of a task's metadata
is the one that its authors published. A grader finds ``/tests`` and ``/logs/verifier`` in folders of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from envs.sandbox.create import mount_dir_fault
from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, files_below, parse_yaml, place_fault, plain_metadata, read_text

TOML, YAML = "task.toml", "task.yaml"
_DEEPEST = 6
_WORKDIR = "/app"
_CANARY = re.compile(r"\s*(#|<!--).*canary", re.IGNORECASE)
"""A mark against training on the data, not meant for the agent."""
_REWARD_SH = """#!/usr/bin/env bash
# Paths of the container that the tests were written for lead to folders of this grader.
set -u
tests="$HOME/.tests" logs="$HOME/.logs"
mkdir -p "$logs/verifier" "$logs/agent"
mv reward/tests "$tests" && rm -rf reward
grep -rlIZE '/(tests|logs)\\b' "$tests" | xargs -0 -r sed -i -E \\
  "s#(^|[^[:alnum:]_./-])/tests\\\\b#\\\\1$tests#g; s#(^|[^[:alnum:]_./-])/logs\\\\b#\\\\1$logs#g"
export TEST_DIR="$tests"
bash "$tests/START" > "$logs/said" 2>&1
code=$?
tail -c 4000 "$logs/said" >&2
# Tests that could not run at all would else be a verdict on the agent.
if grep -qE '/START: line [0-9]+: (pytest|uvx?|pip3?|python3?|curl|apt-get): command not found' "$logs/said"; then
  echo "the tests call a program that the sandbox has not; take an image that has it (sandbox.docker.image)" >&2
  exit 3
fi
VERDICT
"""
_FROM_FILES = """if [[ -s $logs/verifier/reward.txt ]]; then
  cat "$logs/verifier/reward.txt"
elif [[ -s $logs/verifier/reward.json ]]; then
  python3 -c 'import json, sys
given = json.load(open(sys.argv[1]))
values = list(given.values())
print(given.get("reward", sum(values) / len(values)))' "$logs/verifier/reward.json"
else
  echo "the tests ended with exit code $code and left no reward" >&2
  exit 3
fi"""
_FROM_CODE = "((code == 0)) && echo 1 || echo 0"


def recognised(path: Path) -> bool:
    return bool(_folders(path))


def _folders(path: Path, depth: int = 0) -> list[Path]:
    """The task folders at or below ``path``."""
    if not path.is_dir():
        return []
    if (path / TOML).is_file() or (path / YAML).is_file():
        return [path]
    if depth == _DEEPEST:
        return []
    below = [p for p in sorted(path.iterdir()) if p.is_dir() and not p.is_symlink() and not p.name.startswith(".")]
    return [folder for part in below for folder in _folders(part, depth + 1)]


def scan(path: Path) -> Scan:
    """Every task folder. Raises NoTasksError where there is none."""
    folders = _folders(path)
    if not folders:
        raise NoTasksError(f"{path}: holds no task folders; expected folders with a {TOML} or a {YAML}")
    found = Scan([], [])
    for folder in folders:
        try:
            found.drafts.append(_read(folder) if (folder / TOML).is_file() else _read_older(folder))
        except TaskError as error:
            found.faults.extend(error.faults)
    return found


def _read(folder: Path) -> Draft:
    path = folder / TOML
    text = read_text(path)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"line (\d+)", str(error))
        raise TaskError([f"{path}:{line[1] if line else 1}: not valid TOML: {error}"]) from None
    fields = Fields(values, lambda name: f"{path}:{_line(text, name)}")
    if fields.of("steps", list, []):
        raise fields.fault("steps", ": a task of several steps with tests of their own cannot be run here")
    lines = read_text(folder / "instruction.md").splitlines()
    instruction = "\n".join(line for line in lines if not _CANARY.match(line)).strip()
    if not instruction:
        raise TaskError([f"{folder / 'instruction.md'}:1: is empty; expected what the agent is asked"])
    environment = fields.within("environment", {})
    metadata = plain_metadata(fields.of("metadata", dict, {}))
    if image := environment.text("docker_image", ""):
        metadata["image"] = image
    for part in ("agent", "verifier"):
        if seconds := fields.within(part, {}).number("timeout_sec", 0):
            metadata[f"{part}_timeout_s"] = seconds
    name = fields.within("task", {}).text("name", folder.name)
    return _draft(path, name, instruction, folder / "environment", metadata, _tests(folder, "test.sh"), _FROM_FILES)


def _read_older(folder: Path) -> Draft:
    path = folder / YAML
    text = read_text(path)
    values = parse_yaml(text, path)
    fields = Fields(values, lambda name: f"{path}:{_line(text, name)}")
    instruction = fields.text("instruction").strip()
    metadata = plain_metadata({name: value for name, value in values.items() if name != "instruction"})
    tests = {**_tests(folder), "run-tests.sh": _script(folder / "run-tests.sh")}
    return _draft(path, folder.name, instruction, folder, metadata, tests, _FROM_CODE)


def _line(text: str, name: str) -> int:
    """The line on which a field or a table of TOML, or a field of YAML, begins; 1 when it is not there."""
    found = re.search(rf"^(\[+{re.escape(name)}\b|{re.escape(name)}\s*[=:])", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _script(path: Path) -> Path:
    read_text(path)
    return path


def _tests(folder: Path, start: str = "") -> dict[str, Content]:
    tests: dict[str, Content] = {**files_below(folder / "tests")}
    if start and start not in tests:
        raise TaskError([f"{folder / 'tests' / start}: no such file; nothing would grade this task"])
    return tests


def _draft(
    path: Path,
    name: str,
    instruction: str,
    environment: Path,
    metadata: dict[str, Any],
    tests: dict[str, Content],
    verdict: str,
) -> Draft:
    start = "test.sh" if verdict is _FROM_FILES else "run-tests.sh"
    workdir, inputs = _workspace(environment)
    script = _REWARD_SH.replace("START", start).replace("VERDICT", verdict)
    reward: dict[str, Content] = {"reward.sh": script, **{f"tests/{inside}": file for inside, file in tests.items()}}
    return Draft(str(path), name, instruction, inputs, reward, metadata, workdir)


def _workspace(environment: Path) -> tuple[str, dict[str, Content]]:
    """Where the workspace is, and the files that the Dockerfile copies there; without one, all that lies beside."""
    dockerfile = environment / "Dockerfile"
    if not dockerfile.exists():
        files = files_below(environment) if environment.name == "environment" else {}
        return _WORKDIR, {name: file for name, file in files.items() if not name.startswith("docker-compose")}
    here, copied = PurePosixPath("/"), []
    for line in re.sub(r"\\\n", " ", read_text(dockerfile)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            here = here / rest.strip().strip("\"'")
        elif word.upper() in ("COPY", "ADD") and "--from" not in rest:
            copied.append((here, _arguments(rest)))
    workdir = str(here) if not mount_dir_fault(str(here)) else _WORKDIR
    inputs: dict[str, Content] = {}
    for base, arguments in copied:
        if len(arguments) > 1:
            inputs |= _copied(environment, arguments[:-1], base / arguments[-1], arguments[-1], workdir)
    return workdir, inputs


def _arguments(rest: str) -> list[str]:
    if rest.strip().startswith("["):
        try:
            return [str(word) for word in json.loads(rest)]
        except ValueError:
            return []
    try:
        words = shlex.split(rest, comments=True)
    except ValueError:
        return []
    return [word for word in words if not word.startswith("--")]


def _copied(
    environment: Path, sources: list[str], target: PurePosixPath, written: str, workdir: str
) -> dict[str, Content]:
    """What one COPY puts into the workspace; what it puts elsewhere belongs to the image."""
    found: dict[str, Content] = {}
    for source in sources:
        # Two stars are one there; Path.glob would take them for any depth, or for nothing it can read.
        plain = re.sub(r"\*+", "*", source.lstrip("/")) or "."
        if ".." in PurePosixPath(plain).parts:
            raise TaskError([f"{environment / 'Dockerfile'}: COPY {source}: leads out of {environment}"])
        if fault := place_fault(f"{environment.name}/{plain}"):
            raise TaskError([f"{environment / 'Dockerfile'}: COPY {source[:80]!r}: {fault}"])
        for path in sorted(environment.glob(plain)) if plain != "." else [environment]:
            if path.resolve() != environment.resolve() / path.relative_to(environment):
                raise TaskError([f"{environment / 'Dockerfile'}: COPY {source}: {path} is a link, or lies behind one"])
            if path.is_dir():
                files = files_below(path)
                files = {
                    name: file for name, file in files.items() if not (path == environment and name == "Dockerfile")
                }
            elif not path.is_file():
                raise TaskError([f"{environment / 'Dockerfile'}: COPY {source}: expected a file, got a device"])
            else:
                into_folder = written.endswith("/") or written in (".", "./") or len(sources) > 1
                files = {path.name if into_folder or str(target) == workdir else "": path}
            for name, file in files.items():
                place = target / name if name else target
                if place.is_relative_to(workdir) and str(place) != workdir:
                    found[str(place.relative_to(workdir))] = file
    return found
