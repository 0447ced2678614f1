"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The second field may hold spaces and parentheses itself.
    return text.rpartition(")")[2].split()


def parent_of(pid: int) -> int | None:
    """The parent of a process; None when there is no such process."""
    fields = _status(pid)
    return int(fields[1]) if fields else None


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot, as text; None when there is no such process."""
    fields = _status(pid)
    return fields[19] if fields else None
