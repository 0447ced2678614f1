"""Tool calls in the XML form of Qwen3.5, as policies write them."""

import pytest
from scripted import make_tokenizer

from actors.rendering import Rendering
from envs.protocols.canonical import Message

CITY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "state": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), more=VISION), "qwen3.5")


def call(inside, end="</tool_call>"):
    return f"<tool_call>\n<function=weather>\n{inside}\n</function>\n{end}"


def read(rendering, text):
    ids = rendering.tokenizer.encode(text, add_special_tokens=False)
    prompt = rendering.first([Message("user", "hello")], [CITY])
    return rendering.parse([*ids, rendering.stop_ids[0]], prompt, [CITY])


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        (
            "<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>",
            {"city": "Dallas", "state": "TX"},
        ),
        ("<parameter=city>Dallas<parameter=state>TX</parameter>", {"city": "Dallas", "state": "TX"}),
        ("<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>", {"city": "Dallas", "state": "TX"}),
        ("<parameter=city>Dallas</parameter><parameter=state>TX", {"city": "Dallas", "state": "TX"}),
        ("<parameter=city>\n  two\nlines \n</parameter>", {"city": "  two\nlines "}),
        ("<parameter=days>3</parameter>", {"days": 3}),
        ("<parameter=other>3</parameter>", {"other": "3"}),
        ("", {}),
    ],
)
def test_calls_that_can_be_read(rendering, inside, arguments):
    """Case T2, and its kind: a closing tag that is missing before the next one."""
    message, clean = read(rendering, f"hm\n</think>\n\nLooking.\n{call(inside)}")
    assert clean
    assert [(each.name, each.arguments) for each in message.tool_calls] == [("weather", arguments)]
    assert (message.text, message.reasoning) == ("Looking.", "hm")


@pytest.mark.parametrize(
    "text",
    [
        call("<parameter=city Dallas</parameter>"),
        call("<parameter=>Dallas</parameter>"),
        call("<parameter=days>three</parameter>"),
        call("<parameter=days>NaN</parameter>"),
        "<tool_call>\n<function=weather>\n<parameter=city>Dallas\n</tool_call>",
        call("<parameter=city>Dallas</parameter>", end=""),
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\nweather\n</tool_call>",
    ],
)
def test_calls_that_cannot_be_read_are_text(rendering, text):
    """Case T1."""
    message, clean = read(rendering, f"</think>\n\n{text}")
    assert not clean
    assert message.tool_calls == ()
    assert "weather" in message.text or "function" in message.text


def test_the_markup_inside_a_json_argument_is_an_argument(tmp_path):
    qwen3 = Rendering(make_tokenizer(tmp_path), "qwen3")
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "<function=x>\\n<parameter=y>"}}\n</tool_call>'
    message, clean = read(qwen3, said)
    assert clean
    assert message.tool_calls[0].arguments == {"city": "<function=x>\n<parameter=y>"}


def test_a_conversation_is_extended(rendering):
    held = rendering.first([Message("user", "hello")], [CITY])
    said = call("<parameter=city>Dallas<parameter=state>TX</parameter>") + "<|im_end|>"
    sampled = rendering.tokenizer.encode(said, add_special_tokens=False)
    tail = rendering.extend(held, sampled, [Message("tool", "warm", tool_call_id="x")], [CITY])
    assert tail is not None
    assert "warm" in rendering.tokenizer.decode(tail)
