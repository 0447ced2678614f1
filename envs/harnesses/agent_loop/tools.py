"""Carries out the model's tool calls; whatever is wrong with a call becomes a text for the model."""

from __future__ import annotations

from . import editor, lean, observations, schemas, shell
from .parts import Chain, Part, Seen


class Tools:
    """The two tools, under the names that the parts give them.

    ``command_timeout_s`` bounds each shell command, ``observation_chars`` each result.
    """

    def __init__(self, command_timeout_s: float, observation_chars: int, parts: Part | None = None) -> None:
        self.command_timeout_s = command_timeout_s
        self.observation_chars = observation_chars
        self.parts = parts or Chain([])
        self._names = [tool["function"]["name"] for tool in self.parts.tools(schemas.TOOLS)]
        self._calls = 0

    def call(self, name: object, arguments: object) -> str:
        """The observation for one call; ``arguments`` is JSON text, as the API gives it, or an object."""
        text, code = self._carried_out(name, arguments)
        seen = Seen(name if isinstance(name, str) else "", text, code, self._calls)
        self._calls += 1
        return self.parts.observation(seen)

    def _carried_out(self, name: object, arguments: object) -> tuple[str, int | None]:
        """Text and exit code; None where nothing was run or the time was up."""
        try:
            found = self.parts.resolve(name, _parsed(arguments))
            if isinstance(found, str):
                return found, None
            real, given = found
            if real == "execute_bash":
                command = editor.text_of(given, "command")
                output, code = shell.run(command, self.command_timeout_s)
                return observations.of_command(output, code, self.command_timeout_s, self.observation_chars), code
            if real == "file_editor":
                return observations.cut(editor.edit(given), self.observation_chars), 0
        except editor.ToolError as error:
            return f"error: {error}", None
        return f"error: unknown tool {name!r}; the tools are {' and '.join(self._names)}", None


def _parsed(arguments: object) -> dict:
    if isinstance(arguments, str):
        try:
            arguments = lean.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise editor.ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise editor.ToolError(f"the arguments must be a JSON object, got {type(arguments).__name__}")
    return arguments
