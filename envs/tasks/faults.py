"""What is said of tasks that cannot be used: a sentence for each fault, with file, line, field and remedy."""

from __future__ import annotations

_SHOWN = 50


class TaskError(ValueError):
    """Tasks that cannot be used; ``faults`` holds a sentence for each: file, line, field, remedy."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        shown = [f"  {fault}" for fault in faults[:_SHOWN]]
        if len(faults) > _SHOWN:
            shown.append(f"  and {len(faults) - _SHOWN} more, which python -m envs.tasks stats lists")
        super().__init__(
            f"{len(faults)} broken task{'s' if len(faults) > 1 else ''} "
            "(to run the others: --skip-bad-tasks):\n" + "\n".join(shown)
        )


class NoTasksError(TaskError):
    """A place without tasks: there are no others to run."""

    def __init__(self, fault: str) -> None:
        super().__init__([fault])
        self.args = (fault,)
