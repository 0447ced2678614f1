"""What the harnesses themselves write outside of the workspace, so that it is not taken for the agent's doing.

Patterns of ``fnmatch`` over paths as they are seen inside. Hidden files at the top of the home need no pattern.
"""

from __future__ import annotations

OWN_FILES: dict[str, tuple[str, ...]] = {
    "claude_code": ("/tmp/claude-*",),
    "mini_swe_agent": ("*/mini-trajectory.json",),
    "openclaw": ("/tmp/openclaw*", "/tmp/node-compile-cache"),
    "opencode": ("/tmp/.*.so", "/tmp/opencode"),
}
