"""The adapters of outside programs by name."""

from __future__ import annotations

from collections.abc import Callable

from envs.harnesses.base import Harness
from envs.harnesses.external.claude_code import ClaudeCode
from envs.harnesses.external.codex import Codex
from envs.harnesses.external.gemini_cli import GeminiCli
from envs.harnesses.external.mini_swe_agent import MiniSweAgent
from envs.harnesses.external.openclaw import OpenClaw
from envs.harnesses.external.opencode import OpenCode
from envs.harnesses.external.qwen_code import QwenCode

PROGRAMS = {adapter.name: adapter.program for adapter in (ClaudeCode, Codex, GeminiCli, OpenClaw, OpenCode, QwenCode)}
"""Those that are a program file of their own."""
ADAPTERS: dict[str, Callable[[], Harness]] = {
    adapter.name: adapter for adapter in (ClaudeCode, Codex, GeminiCli, MiniSweAgent, OpenClaw, OpenCode, QwenCode)
}
