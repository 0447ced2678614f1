"""Command line of the agent loop; ``python -m agent_loop`` in the folder above, or a call of ``main``.

Settings come from the environment (AGENT_LOOP_BASE_URL, AGENT_LOOP_KEY, ...) and, below it, from the JSON
file named by AGENT_LOOP_CONFIG (base_url, key, ...). One JSON line at the end says how it went; the exit code
is 0 for a final answer, 1 otherwise, 2 for settings that cannot be used.

``levels`` says what the harness is like (``parts``), ``parts`` is a JSON list of files with levels of one's own,
``wording`` picks among the wordings of a level, ``notes`` is the folder of the agent's own notes.
"""

# pathlib alone would double the start-up time of this program.
# ruff: noqa: PTH123
from __future__ import annotations

import os
import sys

from . import lean
from .client import Client
from .loop import run
from .parts import BASE, assembled
from .tools import Tools

REQUIRED = ("base_url", "key", "instruction_file")
DEFAULTS = {
    "model": "policy",
    "max_turns": "50",
    "command_timeout_s": "60",
    "observation_chars": "16000",
    "read_timeout_s": "1800",
    "levels": BASE,
    "parts": "[]",
    "wording": "0",
    "notes": "",
}


def settings(environment: dict) -> dict:
    """All settings as texts or JSON values. Raises ValueError, naming what is missing or unknown."""
    found = dict(DEFAULTS)
    if path := environment.get("AGENT_LOOP_CONFIG"):
        with open(path, encoding="utf-8") as file:
            given = lean.loads(file.read())
        if not isinstance(given, dict):
            raise ValueError(f"{path}: expected a JSON object")
        if unknown := sorted(set(given) - {*REQUIRED, *DEFAULTS}):
            raise ValueError(f"{path}: unknown settings {unknown}; known are {[*REQUIRED, *DEFAULTS]}")
        found.update(given)
    for name in (*REQUIRED, *DEFAULTS):
        value = environment.get(f"AGENT_LOOP_{name.upper()}")
        if value is not None:
            found[name] = value
        if name not in found:
            raise ValueError(f"no {name}: set AGENT_LOOP_{name.upper()}, or {name!r} in the file of AGENT_LOOP_CONFIG")
    return found


def main() -> int:
    try:
        given = settings(dict(os.environ))
        client = Client(given["base_url"], given["key"], given["model"], float(given["read_timeout_s"]))
        max_turns = int(given["max_turns"])
        files = lean.loads(given["parts"]) if isinstance(given["parts"], str) else given["parts"]
        if not isinstance(files, list):
            raise ValueError(f"parts: got {files!r}, expected a list of files")
        parts = assembled(given["levels"], files, int(given["wording"]), given["notes"])
        tools = Tools(float(given["command_timeout_s"]), int(given["observation_chars"]), parts)
        with open(given["instruction_file"], encoding="utf-8") as file:
            instruction = file.read()
    except (OSError, ValueError) as error:
        print(f"agent_loop: {error}", file=sys.stderr)
        return 2
    result = run(client, tools, instruction, max_turns, parts)
    client.close()
    print(lean.dumps(result), flush=True)
    return 0 if result["end"] == "final_answer" else 1


if __name__ == "__main__":
    sys.exit(main())
