"""What of the history a model call sees. Base variant (C0): all of it, unchanged."""

from __future__ import annotations


def view(messages: list[dict]) -> list[dict]:
    """The messages to send; the history itself is never altered."""
    return messages
