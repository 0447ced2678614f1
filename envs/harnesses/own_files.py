"""What the harnesses themselves write outside of the workspace, so that it is not taken for the agent's doing.

Patterns of ``fnmatch`` over paths as they are seen inside. Hidden files at the top of the home need no pattern.
"""

from __future__ import annotations

_NODE = ("/tmp/node-compile-cache/*", "/tmp/v8-compile-cache*", "/tmp/.*")
OWN_FILES: dict[str, tuple[str, ...]] = {
    "claude_code": ("/tmp/claude*", *_NODE),
    "codex": ("/tmp/codex*", "/tmp/.*"),
    "gemini_cli": ("/tmp/gemini*", *_NODE),
    "mini_swe_agent": ("*/mini-trajectory.json",),
    "openclaw": ("/tmp/openclaw*", "/tmp/jiti/*", *_NODE),
    "opencode": ("/tmp/opencode*", "/tmp/bun*", *_NODE),
    "qwen_code": ("/tmp/qwen*", *_NODE),
}
