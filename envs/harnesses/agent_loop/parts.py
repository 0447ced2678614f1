"""What a factor of the harness may change, and how its levels are put together.

Invariant: a level changes nothing but what its own methods return; with no method overridden the loop is the base.

A file that is not of this folder adds levels, or a factor of its own: it has a ``FACTOR``, one capital letter, and
``LEVELS``, a list of subclasses of ``Part``, a name that it finds defined. A known letter goes on counting where our
own levels end; level 0 of a new one changes nothing.
"""

from __future__ import annotations

BASE = "S0T0O0C0W0"


class Seen:
    """What a tool call gave: ``text`` as it is to be shown, and what there is to say about it."""

    __slots__ = ("exit_code", "name", "number", "text")

    def __init__(self, name: str, text: str, exit_code: int | None, number: int) -> None:
        self.name = name
        """The tool, as the model called it."""
        self.text = text
        self.exit_code = exit_code
        """None: the time was up, or the call was never carried out."""
        self.number = number
        """Calls of this episode before it."""


class Part:
    """A level that changes nothing. ``seed`` picks among its wordings, 0 the first; ``home`` is the agent's folder."""

    def __init__(self, seed: int = 0, home: str = "") -> None:
        self.seed = seed
        self.home = home

    def system(self, text: str) -> str:
        """The system prompt, made from that of the parts before."""
        return text

    def instruction(self, text: str) -> str:
        """The first message of the user."""
        return text

    def tools(self, tools: list[dict]) -> list[dict]:
        """The tools that are offered."""
        return tools

    def resolve(self, name: object, arguments: dict) -> tuple[object, dict] | str:
        """The real tool and its arguments behind a call; a text answers the call and nothing is carried out."""
        return name, arguments

    def observation(self, seen: Seen) -> str:
        """What the model is shown of a call's result."""
        return seen.text

    def view(self, messages: list[dict], complete) -> list[dict]:
        """The messages to send in place of the history, which a part never alters.

        ``complete(messages, tools)`` asks the model for something of the part's own; may raise ``client.ApiError``.
        """
        return messages

    def reply(self, message: dict, rounds: int) -> str | None:
        """What the user says to an answer without a tool call, after so many rounds of calls; None: it is the last."""
        return None

    def remark(self, rounds: int) -> str | None:
        """What the user adds after the results of a round of calls."""
        return None

    def pick(self, wordings: tuple[str, ...]) -> str:
        """One of the wordings of the same thing."""
        return wordings[self.seed % len(wordings)]


class Chain(Part):
    """Parts one after the other, as one."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.parts = parts

    def system(self, text: str) -> str:
        for part in self.parts:
            text = part.system(text)
        return text

    def instruction(self, text: str) -> str:
        for part in self.parts:
            text = part.instruction(text)
        return text

    def tools(self, tools: list[dict]) -> list[dict]:
        for part in self.parts:
            tools = part.tools(tools)
        return tools

    def resolve(self, name: object, arguments: dict) -> tuple[object, dict] | str:
        # Names were given from the first part to the last, so they are taken back from the last.
        for part in reversed(self.parts):
            found = part.resolve(name, arguments)
            if isinstance(found, str):
                return found
            name, arguments = found
        return name, arguments

    def observation(self, seen: Seen) -> str:
        for part in self.parts:
            seen.text = part.observation(seen)
        return seen.text

    def view(self, messages: list[dict], complete) -> list[dict]:
        for part in self.parts:
            messages = part.view(messages, complete)
        return messages

    def reply(self, message: dict, rounds: int) -> str | None:
        said = [part.reply(message, rounds) for part in self.parts]
        return next((text for text in said if text is not None), None)

    def remark(self, rounds: int) -> str | None:
        said = [text for part in self.parts if (text := part.remark(rounds)) is not None]
        return "\n".join(said) if said else None


def parsed(name: str) -> list[tuple[str, int]]:
    """``S0T2`` as ``[("S", 0), ("T", 2)]``. Raises ValueError."""
    found: list[tuple[str, int]] = []
    letter, digits = "", ""
    for sign in name + "\0":
        if letter and sign.isdigit() and sign.isascii():
            digits += sign
            continue
        if letter:
            if not digits:
                raise ValueError(f"levels {name!r}: no number after {letter}; expected a name such as {BASE}")
            found.append((letter, int(digits)))
        letter, digits = sign, ""
        if sign != "\0" and not ("A" <= sign <= "Z"):
            raise ValueError(f"levels {name!r}: got {sign!r}, expected a name such as {BASE}")
    letters = [letter for letter, _ in found]
    if not found or len(set(letters)) < len(letters):
        raise ValueError(f"levels {name!r}: expected each factor once, in a name such as {BASE}")
    return found


def assembled(name: str, files: list[str], seed: int = 0, home: str = "") -> Chain:
    """The levels of a name, in the order S T O C W and then those of ``files``. Raises ValueError, OSError."""
    factors = known(files)
    chosen = dict(parsed(BASE)) | dict(parsed(name))
    parts = []
    for letter, levels in factors.items():
        level = chosen.pop(letter, 0)
        if level >= len(levels):
            raise ValueError(f"levels {name!r}: {letter} has the levels 0 to {len(levels) - 1}, got {level}")
        parts.append(levels[level](seed, home))
    if chosen:
        raise ValueError(f"levels {name!r}: unknown factors {sorted(chosen)}; known are {list(factors)}")
    return Chain(parts)


def known(files: list[str]) -> dict[str, list]:
    """The levels of each factor, ours and those of ``files``. Raises ValueError, OSError."""
    from . import context, observations, prompts, schemas, workflow

    levels = {module.FACTOR: list(module.LEVELS) for module in (prompts, schemas, observations, context, workflow)}
    for path in files:
        # The names that such a file needs, wherever this folder lies.
        found: dict = {"Part": Part, "Seen": Seen, "__name__": "parts_of_a_user"}
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to import
            exec(compile(file.read(), path, "exec"), found)
        letter, more = found.get("FACTOR"), found.get("LEVELS")
        is_letter = isinstance(letter, str) and len(letter) == 1 and "A" <= letter <= "Z"
        if not is_letter or not isinstance(more, list) or not all(_is_part(one) for one in more):
            raise ValueError(f"{path}: expected FACTOR, one capital letter, and LEVELS, a list of Part classes")
        # Level 0 of a factor of the user's own is the loop as it is.
        levels.setdefault(letter, [Part]).extend(more)
    return levels


def _is_part(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, Part)
