"""Factor O, what the model sees of a tool's result: as it is, with the metadata of a cluster, or as a structure.

Invariant: the text of the base level stands whole in every other; what is beside it is made from the number of the call
alone, so that equal episodes see equal texts.
"""

from __future__ import annotations

from .parts import Part, Seen


def cut(text: str, bound: int) -> str:
    """``text``, or its head and tail around a note when it has more than ``bound`` characters."""
    if len(text) <= bound:
        return text
    head = bound // 2
    tail = bound - head
    return f"{text[:head]}\n[... {len(text) - bound} characters left out ...]\n{text[-tail:]}"


def of_command(output: str, exit_code: int | None, timeout_s: float, bound: int) -> str:
    """Output with standard error merged in, and a line for an exit code that is not 0; None is a timeout."""
    text = cut(output, bound)
    if exit_code == 0:
        return text
    end = f"[timed out after {timeout_s:g} s]" if exit_code is None else f"[exit code {exit_code}]"
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{end}"


class Raw(Part):
    """O0."""


class Metadata(Part):
    """O1: a simulated cluster says where the call ran."""

    def observation(self, seen: Seen) -> str:
        n = seen.number
        head = self.pick(
            (
                f"[scheduler] pod=worker-{n % 7} namespace=agents node=node-{n % 3} queue_ms={3 + n % 5}\n",
                f"# placed on node-{n % 3} (namespace agents, pod worker-{n % 7}), waited {3 + n % 5} ms\n",
            )
        )
        return head + seen.text


class Structure(Part):
    """O2: elements around the result."""

    def observation(self, seen: Seen) -> str:
        n, code = seen.number, "none" if seen.exit_code is None else seen.exit_code
        body = seen.text + ("" if not seen.text or seen.text.endswith("\n") else "\n")
        return self.pick(
            (
                f"<result>\n<tool>{seen.name}</tool>\n<exit_code>{code}</exit_code>\n<pid>{400 + 3 * n}</pid>\n"
                f"<duration_ms>{20 + 7 * n % 40}</duration_ms>\n<node>node-{n % 3}</node>\n"
                f"<output>\n{body}</output>\n</result>",
                f'<call tool="{seen.name}" exit="{code}" pid="{400 + 3 * n}" ms="{20 + 7 * n % 40}" '
                f'node="node-{n % 3}">\n{body}</call>',
            )
        )


FACTOR = "O"
LEVELS = [Raw, Metadata, Structure]
