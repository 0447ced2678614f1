"""The tools of each harness: how a scenario asks it to do the same things."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from script_engine import Call, Step

WORKSPACE = "/root/workspace"


def at(name: str) -> str:
    return f"{WORKSPACE}/{name}"


@dataclass(frozen=True)
class Dialect:
    """Calls by what they do. ``edit`` is (file, old text, new text); ``subagent`` takes the sub-agent's task."""

    shell: Callable[[str], Call]
    write: Callable[[str, str], Call]
    read: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    listing: Callable[[], Call]
    subagent: Callable[[str], Call] | None = None
    waits: tuple[Callable[[str], Call], ...] = ()
    """What waits for the sub-agents, one after the other, where they run beside the main line."""
    subagent_final: tuple[Call, ...] = ()
    """Calls with which a sub-agent ends, where a text alone does not."""
    compacts: bool = True
    """Whether a long run of one task is compacted. Gemini CLI cuts only where a user speaks."""
    final: tuple[Call, ...] = ()
    """Calls with which the last answer ends the run, where a text alone does not."""

    def end(self, text: str) -> Step:
        return Step(text, self.final)


def _by_shell(shell: Callable[[str], Call], **more: object) -> Dialect:
    """A harness whose one tool is a shell."""
    return Dialect(
        shell=shell,
        write=lambda name, text: shell(f"printf '%s' '{text}' > {name}"),
        read=lambda name: shell(f"cat {name}"),
        edit=lambda name, old, new: shell(f"sed -i 's/{old}/{new}/' {name}"),
        listing=lambda: shell("ls -l"),
        **more,  # type: ignore[arg-type]
    )


def _codex_wait(number: int) -> Callable[[str], Call]:
    def wait(prompt: str) -> Call:
        agents = list(dict.fromkeys(re.findall(r'"agent_id": ?"([^"]+)"', prompt)))
        return "multi_agent_v1__wait_agent", {"targets": agents[number : number + 1], "timeout_ms": 60_000}

    return wait


DIALECTS: dict[str, Dialect] = {
    "mini_swe_agent": _by_shell(
        lambda command: ("bash", {"command": command}),
        compacts=False,
        final=(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
    ),
    "codex": _by_shell(
        lambda command: ("exec_command", {"cmd": command}),
        subagent=lambda task: ("multi_agent_v1__spawn_agent", {"message": task}),
        waits=(_codex_wait(0), _codex_wait(1)),
    ),
    "opencode": Dialect(
        shell=lambda command: ("bash", {"command": command, "description": "Runs it"}),
        write=lambda name, text: ("write", {"filePath": at(name), "content": text}),
        read=lambda name: ("read", {"filePath": at(name)}),
        edit=lambda name, old, new: ("edit", {"filePath": at(name), "oldString": old, "newString": new}),
        listing=lambda: ("glob", {"pattern": "*", "path": WORKSPACE}),
        subagent=lambda task: ("task", {"description": "part", "prompt": task, "subagent_type": "general"}),
    ),
    "qwen_code": Dialect(
        shell=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        write=lambda name, text: ("write_file", {"file_path": at(name), "content": text}),
        read=lambda name: ("read_file", {"file_path": at(name)}),
        edit=lambda name, old, new: ("edit", {"file_path": at(name), "old_string": old, "new_string": new}),
        listing=lambda: ("list_directory", {"path": WORKSPACE}),
        subagent=lambda task: (
            "agent",
            {"description": "part", "prompt": task, "subagent_type": "general-purpose"},
        ),
    ),
    "claude_code": Dialect(
        shell=lambda command: ("Bash", {"command": command, "description": "Runs it"}),
        write=lambda name, text: ("Write", {"file_path": at(name), "content": text}),
        read=lambda name: ("Read", {"file_path": at(name)}),
        edit=lambda name, old, new: ("Edit", {"file_path": at(name), "old_string": old, "new_string": new}),
        listing=lambda: ("Bash", {"command": "ls -l", "description": "Lists files"}),
        subagent=lambda task: (
            "Agent",
            {"description": "part", "prompt": task, "subagent_type": "general-purpose"},
        ),
    ),
    "gemini_cli": Dialect(
        shell=lambda command: ("run_shell_command", {"command": command}),
        write=lambda name, text: ("write_file", {"file_path": at(name), "content": text}),
        read=lambda name: ("read_file", {"file_path": at(name)}),
        edit=lambda name, old, new: (
            "replace",
            {"file_path": at(name), "old_string": old, "new_string": new, "instruction": "Replace it."},
        ),
        listing=lambda: ("list_directory", {"dir_path": WORKSPACE}),
        subagent=lambda task: ("invoke_agent", {"agent_name": "generalist", "prompt": task}),
        compacts=False,
        subagent_final=(("complete_task", {"result": "It is written."}),),
    ),
    "openclaw": Dialect(
        shell=lambda command: ("exec", {"command": command}),
        write=lambda name, text: ("write", {"path": at(name), "content": text}),
        read=lambda name: ("read", {"path": at(name)}),
        edit=lambda name, old, new: ("edit", {"path": at(name), "edits": [{"oldText": old, "newText": new}]}),
        listing=lambda: ("exec", {"command": "ls -l"}),
    ),
}
