"""The eight families of desk work: what a case is made of, and how an expert does it, well or badly.

Invariant: a case is closed. From its slots and input files alone follow the files that must be there
afterwards and, for every command of the expert, the exact text that a real shell prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from envs.tasks.desk.lexicon import EXTENSIONS, WORDS

Slots = dict[str, str | int]
Files = dict[str, str]
"""Workspace-relative path to text."""


@dataclass(frozen=True, slots=True)
class Case:
    """One instance of a family before it is put into words."""

    slots: Slots
    """What the instruction names; two cases with equal slots are the same combination."""
    inputs: Files
    results: Files
    """Files that must be there afterwards with exactly this text."""
    absent: tuple[str, ...] = ()
    """Paths that must be gone afterwards."""
    facts: Slots = field(default_factory=dict)
    """What only the files tell, for the expert."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an expert: a command with what the shell prints, or (no command) the final answer."""

    command: str = ""
    output: str = ""
    """stdout and stderr as printed; the commands of experts all exit with 0."""
    text: str = ""
    tool: str = ""
    """Another tool than the shell, which is called without arguments in place of a command."""


Steps = list[tuple[str, str]]
"""Commands, each with its output."""


@dataclass(frozen=True, slots=True)
class Family:
    """``draw(rng, level)`` makes a case; ``work(case, rng, bad_habit)`` does it.

    The bad habit is systematic: one and the same mistake of this family, everything else exact.
    """

    draw: Callable[[Random, int], Case]
    work: Callable[[Case, Random, bool], Steps]
    habit: str
    """The bad habit in words."""


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _names(rng: Random, count: int) -> list[str]:
    """Distinct words; the first ones name files."""
    return rng.sample(WORDS, count)


def _files(rng: Random, words: list[str], *roles: str) -> Slots:
    """File names for the roles, one for each of ``words``: files that are given end in ``txt``."""
    return {
        role: f"{word}.{rng.choice(EXTENSIONS) if role == 'target' else 'txt'}"
        for role, word in zip(roles, words, strict=True)
    }


def _bystanders(rng: Random, level: int, taken: Slots) -> Files:
    """Files that have nothing to do with the work, from level 2 on; they must stay as they are."""
    if level < 2:
        return {}
    used = {str(name).split(".")[0] for name in taken.values()}
    free = [word for word in WORDS if word not in used]
    return {f"{name}.txt": _text(rng.sample(WORDS, 2)) for name in rng.sample(free, 2)}


def _draw_read(rng: Random, level: int) -> Case:
    source, target, second, first_word, second_word = _names(rng, 5)
    slots = _files(rng, [source, target, second], "source", "target", "second")
    inputs = {str(slots["source"]): _text([first_word])}
    facts: Slots = {"first": first_word}
    words = [first_word]
    if level >= 2:
        inputs[str(slots["second"])] = _text([second_word])
        facts["other"] = second_word
        words.append(second_word)
    else:
        del slots["second"]
    inputs |= _bystanders(rng, level, slots)
    return Case(slots, inputs, {str(slots["target"]): _text(words)}, facts=facts)


def _work_read(case: Case, rng: Random, bad_habit: bool) -> Steps:
    sources = [str(case.slots[role]) for role in ("source", "second") if role in case.slots]
    words = [str(case.facts[fact]) for fact in ("first", "other") if fact in case.facts]
    steps: Steps = []
    if bad_habit:
        others = [word for word in WORDS if word not in words]
        words = rng.sample(others, len(words))
    else:
        steps.append((f"cat {' '.join(sources)}", _text(words)))
    for index, word in enumerate(words):
        steps.append((f"echo {word} {'>>' if index else '>'} {case.slots['target']}", ""))
    return steps


def _lines_with(rng: Random, word: str, total: int, hits: int) -> list[str]:
    """``total`` distinct lines of two words, of which ``hits`` have ``word``."""
    others = rng.sample([other for other in WORDS if other != word], 2 * total)
    lines = [f"{others[2 * i]} {others[2 * i + 1]}" for i in range(total)]
    for i in rng.sample(range(total), hits):
        pair = [word, others[2 * i]]
        rng.shuffle(pair)
        lines[i] = " ".join(pair)
    return lines


def _draw_search(rng: Random, level: int, counting: bool) -> Case:
    word, source, target, second = _names(rng, 4)
    slots = _files(rng, [source, target, second], "source", "target", "second") | {"word": word}
    if level < 2:
        del slots["second"]
    total = 4 if level < 2 else 7
    inputs = {
        str(slots[role]): _text(_lines_with(rng, word, total, rng.randint(1, total - 2)))
        for role in ("source", "second")
        if role in slots
    }
    hits = [line for text in inputs.values() for line in text.splitlines() if word in line.split()]
    result = _text([str(len(hits))] if counting else hits)
    return Case(slots, inputs | _bystanders(rng, level, slots), {str(slots["target"]): result})


def _work_grep(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    command = f"grep {slots['word']} {slots['source']}"
    if "second" in slots:
        command = f"grep -h {slots['word']} {slots['source']} {slots['second']}"
    if bad_habit:
        return [(command, case.results[str(slots["target"])])]
    return [(f"{command} > {slots['target']}", "")]


def _work_count(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    search = f"grep {slots['word']}" if bad_habit else f"grep -c {slots['word']}"
    if "second" in slots:
        return [(f"cat {slots['source']} {slots['second']} | {search} > {slots['target']}", "")]
    return [(f"{search} {slots['source']} > {slots['target']}", "")]


def _draw_sum(rng: Random, level: int) -> Case:
    source, target, second = _names(rng, 3)
    slots = _files(rng, [source, target, second], "source", "target", "second")
    if level < 2:
        del slots["second"]
    columns, rows = (3, 3) if level < 2 else (4, 5)
    # Column 1 is what the bad habit adds up, so the right column is never the first one.
    column = rng.randint(2, columns)
    slots["column"] = column
    tables = {
        str(slots[role]): [[rng.randint(1, 9) for _ in range(columns)] for _ in range(rows)]
        for role in ("source", "second")
        if role in slots
    }
    table = [row for part in tables.values() for row in part]
    right, wrong = sum(row[column - 1] for row in table), sum(row[0] for row in table)
    if right == wrong:
        row = next(iter(tables.values()))[0]
        row[column - 1] += 1
        right += 1
    inputs = {name: _text([" ".join(map(str, row)) for row in part]) for name, part in tables.items()}
    return Case(slots, inputs | _bystanders(rng, level, slots), {str(slots["target"]): _text([str(right)])})


def _work_sum(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    column = 1 if bad_habit else slots["column"]
    sources = " ".join(str(slots[role]) for role in ("source", "second") if role in slots)
    return [(f"awk '{{s+=${column}}} END {{print s}}' {sources} > {slots['target']}", "")]


def _draw_write(rng: Random, level: int) -> Case:
    name, text, more, folder = _names(rng, 4)
    slots: Slots = {"target": f"{name}.{rng.choice([e for e in EXTENSIONS if e != 'txt'])}", "text": text}
    if level < 2:
        return Case(slots, {}, {str(slots["target"]): _text([text])}, facts={"name": name})
    slots |= {"folder": folder, "more": more}
    inputs = _bystanders(rng, level, slots)
    return Case(slots, inputs, {f"{folder}/{slots['target']}": _text([text, more])}, facts={"name": name})


def _work_write(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    name = f"{case.facts['name']}.txt" if bad_habit else slots["target"]
    if "folder" not in slots:
        return [(f"echo {slots['text']} > {name}", "")]
    path = f"{slots['folder']}/{name}"
    return [
        (f"mkdir {slots['folder']}", ""),
        (f"echo {slots['text']} > {path}; echo {slots['more']} >> {path}", ""),
    ]


def _draw_append(rng: Random, level: int) -> Case:
    source, second, word = _names(rng, 3)
    slots = _files(rng, [source, second], "source", "second") | {"word": word}
    if level < 2:
        del slots["second"]
    others = [other for other in WORDS if other != word]
    inputs = {
        str(slots[role]): _text(rng.sample(others, 2 if level < 2 else 5))
        for role in ("source", "second")
        if role in slots
    }
    results = {name: text + _text([word]) for name, text in inputs.items()}
    return Case(slots, inputs | _bystanders(rng, level, slots), results)


def _work_append(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    redirect = ">" if bad_habit else ">>"
    sources = [case.slots[role] for role in ("source", "second") if role in case.slots]
    return [(f"echo {case.slots['word']} {redirect} {source}", "") for source in sources]


def _draw_move(rng: Random, level: int) -> Case:
    source, other, folder = _names(rng, 3)
    texts = [_text(rng.sample(WORDS, 2 if level < 2 else 5)) for _ in range(2)]
    if level < 2:
        slots = _files(rng, [source, other], "source", "target")
        inputs = {str(slots["source"]): texts[0]}
        return Case(slots, inputs, {str(slots["target"]): texts[0]}, absent=(str(slots["source"]),))
    slots = _files(rng, [source, other], "source", "second") | {"folder": folder}
    inputs = {str(slots["source"]): texts[0], str(slots["second"]): texts[1]}
    results = {f"{folder}/{name}": text for name, text in inputs.items()}
    return Case(slots, inputs | _bystanders(rng, level, slots), results, absent=tuple(inputs))


def _work_move(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    verb = "cp" if bad_habit else "mv"
    if "folder" not in slots:
        return [(f"{verb} {slots['source']} {slots['target']}", "")]
    return [
        (f"mkdir {slots['folder']}", ""),
        (f"{verb} {slots['source']} {slots['second']} {slots['folder']}", ""),
    ]


def _draw_head(rng: Random, level: int) -> Case:
    source, target, second = _names(rng, 3)
    slots = _files(rng, [source, target, second], "source", "target", "second")
    if level < 2:
        del slots["second"]
    total = 5 if level < 2 else 8
    lines = rng.randint(2, total - 1)
    inputs = {str(slots[role]): _text(rng.sample(WORDS, total)) for role in ("source", "second") if role in slots}
    result = "".join(_text(text.splitlines()[:lines]) for text in inputs.values())
    slots["lines"] = lines
    return Case(slots, inputs | _bystanders(rng, level, slots), {str(slots["target"]): result})


def _work_head(case: Case, _rng: Random, bad_habit: bool) -> Steps:
    slots = case.slots
    verb = f"{'tail' if bad_habit else 'head'} -n {slots['lines']}"
    steps: Steps = [(f"{verb} {slots['source']} > {slots['target']}", "")]
    if "second" in slots:
        steps.append((f"{verb} {slots['second']} >> {slots['target']}", ""))
    return steps


FAMILIES: dict[str, Family] = {
    "read": Family(_draw_read, _work_read, "guesses the content without reading the file"),
    "grep": Family(lambda rng, level: _draw_search(rng, level, False), _work_grep, "prints the lines only"),
    "count": Family(lambda rng, level: _draw_search(rng, level, True), _work_count, "writes the lines"),
    "sum": Family(_draw_sum, _work_sum, "always adds up column 1"),
    "write": Family(_draw_write, _work_write, "always names the file .txt"),
    "append": Family(_draw_append, _work_append, "overwrites the file"),
    "move": Family(_draw_move, _work_move, "leaves the old file there"),
    "head": Family(_draw_head, _work_head, "takes the last lines"),
}

LEVELS: tuple[int, ...] = (1, 2)
"""1: one or two files, one step. 2: more and longer files, bystanders, work in two steps."""
