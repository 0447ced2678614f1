"""What a policy does in each scenario, in the tools of a harness, and which forks it gives cause for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dialects import Dialect
from fault_hop import Fault
from script_engine import Step, odd

from trees import forks

TASK = "MAIN-TASK: make answer.txt from notes.txt, so that BETA stands in it, and say what you did."
NOTES = "alpha\nbeta\ngamma\n"
LONG = "a line of a long file, with words in it\n" * 2500

_LOST = frozenset({forks.RETRY, forks.REPLY_DROPPED, forks.HISTORY_EDITED})
_REWRITTEN = frozenset({forks.HISTORY_EDITED, forks.NEW_CONVERSATION, forks.SYSTEM_CHANGED, forks.REPLY_DROPPED})

Lines = Mapping[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Scenario:
    """``causes``: the forks of the main line that what happens here explains; none: every fork is a false one."""

    name: str
    lines: Callable[[Dialect], Lines]
    faults: Mapping[int, Fault] = field(default_factory=dict)
    causes: frozenset[str] = frozenset()
    context: int = 131_072
    solves: bool = True
    """Whether the policy's own calls solve the task."""
    may_fail: bool = False
    """Whether some harnesses give up here: the run is then only looked at for what it left behind."""
    subagent: bool = False
    compaction: bool = False

    def suits(self, dialect: Dialect) -> bool:
        """Whether the harness has what happens here."""
        return (dialect.subagent is not None or not self.subagent) and (dialect.compacts or not self.compaction)


def _six(d: Dialect) -> Lines:
    return {
        "main": (
            Step("I read the notes.", (d.read("notes.txt"),)),
            Step("", (d.write("answer.txt", "BETA or BETTA"),)),
            Step("Shorter is better.", (d.edit("answer.txt", " or BETTA", ""),)),
            Step("", (d.shell("cat answer.txt && wc -c notes.txt"),)),
            Step("And what is there?", (d.listing(),)),
            Step("One more look.", (d.shell("grep -c BETA answer.txt"),)),
            d.end("I wrote BETA to answer.txt."),
        )
    }


def _parallel(d: Dialect) -> Lines:
    slow_first = (d.shell("sleep 0.4; echo one"), d.shell("echo two"), d.read("notes.txt"))
    return {
        "main": (
            Step("Three at once.", slow_first),
            Step("", (d.shell("printf BETA > answer.txt"), d.shell("echo same"), d.shell("echo same"))),
            d.end("All done."),
        )
    }


def _thinking(d: Dialect) -> Lines:
    return {
        "main": (
            Step("Now I read.", (d.read("notes.txt"),), reasoning="First the notes.\n\n  Then the answer.  "),
            Step("", (d.shell("printf BETA > answer.txt"),), reasoning="\nThe second line, in capitals.\n"),
            Step("  ", (d.shell("cat answer.txt"),), reasoning="Is it there? Quotes: \"a\" 'b' <c> & é"),
            Step("It is there.", d.final, reasoning="Nothing is left to do."),
        )
    }


def _subagent(d: Dialect) -> Lines:
    assert d.subagent is not None
    tasks = [f"SUB-TASK-{letter}: write {letter} to part{letter}.txt and say done." for letter in "AB"]
    waits = tuple(Step(f"I wait, {n}.", (wait,)) for n, wait in enumerate(d.waits))
    parts = {
        f"SUB-TASK-{letter}": (
            Step("", (d.shell(f"echo {letter} > part{letter}.txt"),)),
            Step("", (d.shell(f"cat part{letter}.txt"),)),
            Step(f"Part {letter} is done.", d.subagent_final),
        )
        for letter in "AB"
    }
    return {
        "main": (
            Step("Two helpers.", tuple(d.subagent(task) for task in tasks)),
            *waits,
            Step("", (d.shell("printf BETA > answer.txt; cat partA.txt partB.txt"),)),
            d.end("Both parts are there."),
        ),
        **parts,
    }


def _malformed(d: Dialect) -> Lines:
    shell, arguments = d.shell("true")
    return {
        "main": (
            Step("A tool that is not there.", (("no_such_tool", {"path": "notes.txt"}),), once=True),
            Step("An argument too few.", ((shell, {}),), once=True),
            Step("An argument of another kind.", ((shell, {name: ["x"] for name in arguments}),), once=True),
            Step("", (d.shell("printf BETA > answer.txt"),)),
            Step("Broken.", raw='<tool_call>\n{"name": "' + shell + '", "arguments": {"a": \n</tool_call>', once=True),
            d.end("That was hard."),
        )
    }


def _formatting(d: Dialect) -> Lines:
    return {
        "main": (
            Step("With a tail.  \n\n", (d.shell("echo 'caf\u00e9'  # \U0001f600 "),), write=odd),
            Step("   ", (d.write("answer.txt", "one  \n\ttwo \n\nthree"),), write=odd),
            Step("\n  in the middle\t", (d.edit("answer.txt", "one", "BETA"),), write=odd),
            Step("", (d.shell("cd /root/workspace && ls 1.0 1e3 2>&1; echo '</tool>' \"<x>\""),), write=odd),
            d.end("The end. \n\n "),
        )
    }


def _short(d: Dialect) -> Lines:
    return {
        "main": (
            Step("I read the notes.", (d.read("notes.txt"),)),
            Step("I write.", (d.shell("printf BETA > answer.txt"),)),
            Step("I check.", (d.shell("cat answer.txt"),)),
            d.end("I wrote BETA to answer.txt."),
        )
    }


def _long(d: Dialect) -> Lines:
    summary = f"<summary>{TASK} It is written; pages were read.</summary>"
    return {
        "main": (
            Step("I write.", (d.shell("printf BETA > answer.txt"),)),
            *(Step(f"Page {n}.", (d.shell(f"echo {n}; head -c 9000 long.txt"),)) for n in range(16)),
            d.end("I wrote BETA to answer.txt."),
        ),
        "compaction": tuple(Step(f"<analysis>What happened {n}.</analysis>\n{summary}", once=True) for n in range(20)),
    }


def _with_faults(name: str, fault: Fault, later: bool = True, may_fail: bool = False) -> Scenario:
    at: dict[int, Fault] = {0: fault, 3: fault} if later else {2: fault}
    return Scenario(name, _short, at, _LOST, may_fail=may_fail)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("six_calls", _six),
        Scenario("parallel", _parallel),
        Scenario("thinking", _thinking),
        Scenario("formatting", _formatting),
        Scenario("subagent", _subagent, subagent=True),
        Scenario("malformed", _malformed, causes=_LOST),
        _with_faults("status_500", "500"),
        _with_faults("status_429", "429"),
        _with_faults("refused", "refused"),
        _with_faults("lost", "lost"),
        _with_faults("cut", "cut", later=False, may_fail=True),
        Scenario("compaction", _long, causes=_REWRITTEN | _LOST, context=48_000, compaction=True),
    )
}
