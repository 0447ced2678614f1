"""What the model sees of a command in the base variant (O0): its raw output, cut in the middle when long."""

from __future__ import annotations


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
