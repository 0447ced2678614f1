"""Every observation and every action is in its space, whatever a harness asks and an agent says."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from envs.gym.actions import ActionError, answer_of, words
from envs.gym.chat import chat_action, chat_request
from envs.gym.observations import nothing_asked, observation
from envs.gym.spaces import Actions, Numbers, Role, Words, observations
from envs.gym.stage import Asked
from envs.gym.text import SessionText
from envs.protocols import openai_chat
from envs.protocols.canonical import Message, Request, Sampling, ToolCall

VOCABULARY = 300
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
name = st.text("abc_", min_size=1, max_size=5)
plain_json = st.recursive(
    st.none() | st.integers() | text, lambda inner: st.lists(inner) | st.dictionaries(text, inner)
)
objects = st.dictionaries(text, plain_json, max_size=3)
calls = st.builds(ToolCall, id=name, name=name, arguments=objects | text)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    text=text,
    reasoning=text,
    tool_calls=st.lists(calls, max_size=3).map(tuple),
    tool_call_id=name,
    name=text,
)
tools = st.builds(
    lambda name, description, parameters: {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    },
    name,
    text | st.none(),
    objects | st.none(),
)
sampling = st.builds(
    Sampling,
    max_tokens=st.none() | st.integers(1, 2**40),
    temperature=st.none() | st.floats(0, 1e6),
    top_p=st.none() | st.floats(0, 1),
    stop=st.lists(text, max_size=2).map(tuple),
)
requests = st.builds(
    Request,
    model=text,
    messages=st.lists(messages, min_size=1, max_size=5).map(tuple),
    tools=st.lists(tools, max_size=2).map(tuple),
    sampling=sampling,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


def asked(request: Request, ids: list[int]) -> Asked:
    return Asked("c1r0", 0, request, np.array(ids, np.int32), 9, "main", "", 0)


@given(requests, st.lists(st.integers(0, VOCABULARY - 1)))
def test_every_request_is_in_the_observation_space(request, ids):
    assert observation(asked(request, ids), False) in observations()
    seen = observation(asked(request, ids), True)
    assert seen in observations(VOCABULARY)
    assert seen["prompt_ids"].tolist() == ids
    assert seen["sampling"]["max_tokens"] == 9
    shown = SessionText("title")
    shown.asked(0, "main", seen)
    assert str(shown).startswith("title\n")


def test_a_session_s_text_shows_each_message_once_whatever_conversation_goes_on():
    shown = SessionText("title")
    talks = [["a"], ["a", "b"], ["x"], ["a", "b", "c"], ["a", "c"], ["x", "b"]]
    for number, said in enumerate(talks):
        request = Request("m", tuple(Message("user", one) for one in said), (), Sampling())
        shown.asked(number, "main", observation(asked(request, []), False))
    told = [line for line in str(shown).splitlines() if line.startswith("[")]
    assert told == ["[user] a", "[user] b", "[user] x", "[user] c", "[user] c", "[user] b"]


@pytest.mark.timeout(20)
def test_a_session_of_a_thousand_calls_is_soon_told():
    shown = SessionText("title")
    text = "y" * 100
    messages = tuple(Message("user", f"{text}{number}") for number in range(1000))
    for number in range(1000):
        request = Request("m", messages[: number + 1], (), Sampling())
        shown.asked(number, "main", observation(asked(request, []), False))
    assert str(shown).count(text) == 1000


@given(requests)
def test_tool_call_ids_are_counted_and_still_name_the_same_call(request):
    seen = observation(asked(request, []), False)
    new = [call["id"] for message in seen["messages"] for call in message["tool_calls"]]
    new += [message["tool_call_id"] for message in seen["messages"]]
    old = [call.id for message in request.messages for call in message.tool_calls]
    old += [message.tool_call_id for message in request.messages]
    assert len(set(zip(old, new, strict=True))) == len(set(old)) == len(set(new))


@given(requests.filter(lambda request: all(message.role != "tool" or message.text for message in request.messages)))
def test_a_chat_request_says_what_was_observed(request):
    seen = observation(asked(request, []), False)
    body = chat_request(seen)
    json.dumps(body)
    read = openai_chat.parse(body, {})
    for message, shown in zip(read.messages, seen["messages"], strict=True):
        assert (message.role, message.text) == (shown["role"], shown["text"])
        if message.role == "assistant":
            assert message.reasoning == shown["reasoning"]
            assert [call.name for call in message.tool_calls] == [call["name"] for call in shown["tool_calls"]]
    assert [tool["function"]["name"] for tool in read.tools] == [tool["name"] for tool in seen["tools"]]


def test_nothing_asked_is_an_observation():
    assert nothing_asked(False) in observations()
    assert nothing_asked(True) in observations(VOCABULARY)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_every_sampled_action_is_in_the_space_and_is_an_answer(vocabulary):
    space = Actions(vocabulary)
    space.seed(0)
    kinds = set()
    for _ in range(200):
        action = space.sample()
        assert action in space
        answer = answer_of(action, vocabulary)
        kinds.add("tokens" if answer.message is None else "words")
    assert kinds == ({"words"} if vocabulary is None else {"words", "tokens"})


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_sampled_observations_are_in_their_space(vocabulary):
    space = observations(vocabulary)
    space.seed(0)
    for _ in range(20):
        assert space.sample() in space


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("space", [observations(VOCABULARY), Actions(VOCABULARY)], ids=["observations", "actions"])
def test_the_spaces_can_be_batched_and_taken_apart(space):
    space.seed(1)
    items = [space.sample() for _ in range(3)]
    batch = batch_space(space, 3)
    together = concatenate(space, items, create_empty_array(space, 3))
    assert together in batch
    for item, apart in zip(items, iterate(batch, together), strict=True):
        np.testing.assert_equal(apart, item)


@given(text, st.lists(st.tuples(name, objects), max_size=3), text)
def test_words_are_an_action_and_say_the_same(said, made, thought):
    action = words(said, made, thought)
    assert action in Actions()
    message = answer_of(action, None).message
    assert (message.text, message.reasoning) == (said, thought)
    assert [(call.name, call.arguments) for call in message.tool_calls] == made


@given(
    anything | st.dictionaries(st.sampled_from(["text", "reasoning", "tool_calls", "token_ids", "logprobs"]), anything)
)
def test_whatever_an_agent_says_is_an_answer_or_an_error_that_says_where(action):
    try:
        answer = answer_of(action, VOCABULARY)
    except ActionError as error:
        assert str(error).startswith("action")  # noqa: PT017 - both ends are right
    else:
        assert (answer.message is None) != (answer.ids is None)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"token_ids": [300]}, "action.token_ids: got 300, expected numbers from 0 to 299"),
        ({"token_ids": [-1]}, "got -1, expected numbers from 0"),
        ({"token_ids": [0.5]}, "expected a one-dimensional array of numbers"),
        ({"token_ids": [[1]]}, "expected a one-dimensional array of numbers"),
        ({"token_ids": [1], "logprobs": [0.5]}, "action.logprobs: got 0.5"),
        ({"token_ids": [1], "logprobs": [float("nan")]}, "action.logprobs: got nan"),
        ({"token_ids": [1, 2], "logprobs": [-1.0]}, "action.logprobs: got 1, expected 2, one for each id"),
        ({"token_ids": [1], "text": "a"}, "got token_ids and words, expected one of the two"),
        ({"texts": "a"}, "did you mean 'text'"),
        ({"token_ids": [[1], [1, 2]]}, "expected a one-dimensional array of numbers"),
        ({"token_ids": deep}, "action.token_ids: got a value that cannot be shown (list)"),
        ({"token_ids": [1], "logprobs": [[-1.0], []]}, "action.logprobs: got [[-1.0], []] (list)"),
        (deep, "action: got a value that cannot be shown (list)"),
        ({"text": 10**5000}, "action.text: got a value that cannot be shown (int)"),
        ({"tool_calls": [{"name": "x", "arguments": {"a": deep}}]}, "expected what JSON can hold"),
        ({"tool_calls": [{"name": "x", "arguments": {"a": 10**5000}}]}, "expected what JSON can hold"),
        ({Unshowable(): 1}, "action: got the field a value that cannot be shown (Unshowable)"),
    ],
)
def test_a_wrong_answer_is_told_by_field_got_and_expected(action, said):
    with pytest.raises(ActionError, match=re.escape(said)):
        answer_of(action, VOCABULARY)


def test_a_chat_message_is_an_action():
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    action = chat_action(message)
    assert action in Actions()
    assert answer_of(action, None).message.tool_calls[0].arguments == {"a": 1}


def test_spaces_are_equal_to_their_likes_alone():
    assert Words() == Words() != Role()
    assert Numbers(0, 3, np.int32) == Numbers(0, 3, np.int32) != Numbers(0, 4, np.int32)
    assert observations(VOCABULARY) == observations(VOCABULARY) != observations()
