"""Factor T, the tool interface: real names, meaningful aliases among distractors, opaque names among distractors.

Invariant: the same two tools with the same parameters stand behind every level. A distractor answers politely that it
is unavailable and does nothing.
"""

from __future__ import annotations

from .parts import Part

EXECUTE_BASH = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": "Run a bash command in the workspace and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command line."}},
            "required": ["command"],
        },
    },
}

FILE_EDITOR = {
    "type": "function",
    "function": {
        "name": "file_editor",
        "description": "View, create or edit a text file.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": {"type": "string", "description": "Path of the file."},
                "file_text": {"type": "string", "description": "The whole text, for create."},
                "old_str": {"type": "string", "description": "Text to replace; must occur once."},
                "new_str": {"type": "string", "description": "The new text, for str_replace and insert."},
                "insert_line": {"type": "integer", "description": "Insert after this line; 0 is the top."},
            },
            "required": ["command", "path"],
        },
    },
}

TOOLS = [EXECUTE_BASH, FILE_EDITOR]

_ALIASES = (
    {"execute_bash": "terminal_run", "file_editor": "document_edit"},
    {"execute_bash": "shell_session", "file_editor": "text_workbench"},
)
_OPAQUE = (
    {"execute_bash": "fn_7c", "file_editor": "fn_2e"},
    {"execute_bash": "op_q4", "file_editor": "op_m9"},
)
DISTRACTORS = (
    ("calendar_lookup", "fn_a1", "Look up the appointments of a day.", "day", "The day, as year-month-day."),
    ("image_caption", "fn_d5", "Describe a picture in one line.", "picture", "Where the picture is."),
    ("ticket_search", "fn_f0", "Search the tickets of the team.", "query", "Words to look for."),
)
"""Alias, opaque name, what it says of itself, and its one parameter."""


def _named(tool: dict, name: str) -> dict:
    return {**tool, "function": {**tool["function"], "name": name}}


def _distractor(name: str, description: str, parameter: str, meaning: str) -> dict:
    shape = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": meaning}},
        "required": [parameter],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shape}}


class RealNames(Part):
    """T0."""


class _Renamed(Part):
    """The real tools under other names, each after a distractor, and a distractor at the end."""

    tables: tuple[dict[str, str], ...]
    column: int

    def __init__(self, seed: int = 0, home: str = "") -> None:
        super().__init__(seed, home)
        self.names = self.tables[seed % len(self.tables)]
        self.real = {shown: real for real, shown in self.names.items()}
        self.distractors = {row[self.column]: row[2:] for row in DISTRACTORS}

    def tools(self, tools: list[dict]) -> list[dict]:
        given = [_named(tool, self.names.get(name, name)) for tool in tools for name in [tool["function"]["name"]]]
        others = [_distractor(name, *row) for name, row in self.distractors.items()]
        mixed = [tool for pair in zip(others, given, strict=False) for tool in pair]
        return [*mixed, *given[len(others) :], *others[len(given) :]]

    def resolve(self, name: object, arguments: dict) -> tuple[object, dict] | str:
        if name in self.distractors:
            return f"{name} is not available in this session, sorry; please go on without it."
        # The real name of a tool is no name here.
        real = None if name in self.names else name
        return self.real.get(name, real), arguments  # type: ignore[call-overload]


class Aliases(_Renamed):
    """T1: other names that say what the tools do."""

    tables = _ALIASES
    column = 0


class Opaque(_Renamed):
    """T2: names that say nothing; only the descriptions help."""

    tables = _OPAQUE
    column = 1


FACTOR = "T"
LEVELS = [RealNames, Aliases, Opaque]
