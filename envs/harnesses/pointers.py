"""The two or three lines by which each known harness is pointed at a model API of one's own."""

from __future__ import annotations

_POINTERS = {
    "Claude Code": """\
export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "TASK"
""",
    "Codex": """\
export SESSION_KEY={key}
codex exec --skip-git-repo-check -c model={model} -c model_provider=reins \\
  -c 'model_providers.reins={{name="reins",base_url="{url}/v1",env_key="SESSION_KEY",wire_api="responses"}}' "TASK"
""",
    "OpenClaw": """\
# openclaw.json: {{"models":{{"mode":"replace","providers":{{"reins":{{"baseUrl":"{url}/v1","apiKey":"{key}",
#   "api":"openai-responses","models":[{{"id":"{model}","name":"{model}","reasoning":true,"input":["text"],
#   "contextWindow":131072,"maxTokens":8192}}]}}}}}}}}
openclaw agent exec "TASK" --config openclaw.json --model reins/{model} --cwd .
""",
    "OpenCode": """\
# opencode.json: {{"provider":{{"reins":{{"npm":"@ai-sdk/openai-compatible","options":{{"baseURL":"{url}/v1",
#   "apiKey":"{key}"}},"models":{{"{model}":{{"tool_call":true}}}}}}}},"model":"reins/{model}"}}
opencode run "TASK"
""",
    "Qwen Code": """\
export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={model}
qwen -p "TASK" --yolo
""",
    "mini-swe-agent": """\
export OPENAI_API_BASE={url}/v1 OPENAI_API_KEY={key} MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
mini -m openai/{model} -t "TASK" --yolo --exit-immediately
""",
    "Gemini CLI": """\
export GOOGLE_GEMINI_BASE_URL={url} GEMINI_API_KEY={key}
gemini -p "TASK" --yolo --skip-trust -m {model}
""",
    "any OpenAI client": """\
OpenAI(base_url="{url}/v1", api_key="{key}").chat.completions.create(model="{model}", messages=[...])
""",
    "a client that sends no key": """\
base URL {url}/s/{key}/v1
""",
}


def pointers(url: str, key: str, model: str) -> dict[str, str]:
    """By harness: what to type or to write. ``url`` has no path."""
    return {name: lines.format(url=url, key=key, model=model).rstrip() for name, lines in _POINTERS.items()}
