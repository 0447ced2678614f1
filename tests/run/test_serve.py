"""The model API alone, as a command: started, spoken to by an official client, ended by Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time

import openai
import pytest

from trees import codec

pytestmark = [pytest.mark.harness, pytest.mark.timeout(240)]
HARNESSES = ("Claude Code", "Codex", "OpenClaw", "OpenCode", "Qwen Code", "mini-swe-agent", "Gemini CLI")


@pytest.fixture
def serve(tmp_path):
    """Start the command with its output in a file; what is still there at the end is ended."""
    started = []

    def start(*arguments):
        output = tmp_path / "output.txt"
        with output.open("wb") as out:
            command = [sys.executable, "-m", "actors.serve", *map(str, arguments)]
            env = os.environ | {"COLUMNS": "200"}
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
        started.append(process)
        return process, output

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def told(process, output, what, timeout=120):
    deadline = time.monotonic() + timeout
    while (found := re.search(what, output.read_text())) is None:
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    return found


def test_a_session_of_ones_own_is_served_and_kept(serve, untrained, tmp_path):
    process, output = serve("--model", untrained, "--record", tmp_path / "kept", "--max-len", 2048)
    url = told(process, output, r"at (http://127\.0\.0\.1:\d+); Ctrl-C")[1]
    key = told(process, output, r"OPENAI_API_KEY=(\w+)")[1]
    text = output.read_text()
    assert all(name in text for name in HARNESSES)
    assert "{{" not in text
    client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
    messages = [{"role": "user", "content": "hello"}]
    sampled = []
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
        messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
        sampled.append(answer.usage.completion_tokens)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="other", base_url=f"{url}/v1", max_retries=0).models.list()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, output.read_text()
    assert "Traceback" not in output.read_text()
    (path,) = (tmp_path / "kept").rglob("*.tree")
    tree = codec.decode(path.read_bytes())
    assert [len(node) for node in tree.calls()] == sampled
    assert str(path).replace("\n", "") in output.read_text().replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [(["--model", "none"], 2, "no config.json"), (["--device", "foo"], 2, "expected cpu, cuda or cuda:N")],
)
def test_what_cannot_be_served_is_one_line(serve, untrained, arguments, code, says):
    process, output = serve("--model", untrained, *arguments)
    assert process.wait(180) == code, output.read_text()
    assert says in output.read_text()
    assert "Traceback" not in output.read_text()
