"""Carries out the model's tool calls; whatever is wrong with a call becomes a text for the model."""

from __future__ import annotations

from . import editor, lean, observations, shell


class Tools:
    """The tools of the base variant (T0).

    ``command_timeout_s`` bounds each shell command, ``observation_chars`` each result.
    """

    def __init__(self, command_timeout_s: float, observation_chars: int) -> None:
        self.command_timeout_s = command_timeout_s
        self.observation_chars = observation_chars

    def call(self, name: object, arguments: object) -> str:
        """The observation for one call; ``arguments`` is JSON text, as the API gives it, or an object."""
        try:
            if name == "execute_bash":
                command = editor.text_of(_parsed(arguments), "command")
                output, code = shell.run(command, self.command_timeout_s)
                return observations.of_command(output, code, self.command_timeout_s, self.observation_chars)
            if name == "file_editor":
                return observations.cut(editor.edit(_parsed(arguments)), self.observation_chars)
        except editor.ToolError as error:
            return f"error: {error}"
        return f"error: unknown tool {name!r}; the tools are execute_bash and file_editor"


def _parsed(arguments: object) -> dict:
    if isinstance(arguments, str):
        try:
            arguments = lean.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise editor.ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise editor.ToolError(f"the arguments must be a JSON object, got {type(arguments).__name__}")
    return arguments
