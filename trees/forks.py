"""The reasons for which a call does not extend the newest call of its line.

``CallRecord.fork`` is one of these, or empty. The matcher writes them and the dead-leaf filter reads them.
"""

RETRY = "retry"
"""The same turns were asked before."""
REPLY_DROPPED = "reply dropped"
"""The history goes on without a reply that was given."""
HISTORY_EDITED = "history edited"
"""Replies given are still in the history, but something at or before them was rewritten."""
TOOLS_CHANGED = "tools changed"
SYSTEM_CHANGED = "system changed"
SYSTEM_AND_TOOLS_CHANGED = "system and tools changed"
RENDERED_DIFFERENTLY = "rendered differently"
"""The conversation goes on, but the policy's chat template writes what was held in other tokens."""
OTHER_AGENT = "other agent"
"""The same turns were asked before, by another agent of the harness: two sub-agents with one task."""
NEW_CONVERSATION = "new conversation"
"""Nothing in common with what the session holds."""

NOT_A_RETRY = frozenset(
    {
        HISTORY_EDITED,
        TOOLS_CHANGED,
        SYSTEM_CHANGED,
        SYSTEM_AND_TOOLS_CHANGED,
        RENDERED_DIFFERENTLY,
        OTHER_AGENT,
        NEW_CONVERSATION,
    }
)
"""Forks that leave the branch they leave valid: what it sampled was acted on and stays in the history."""
