import json
from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import relaxed

from trees.turns import Turn, canonical_arguments, canonical_key, distance, prefix_key

ARGUMENTS = {"b": "é\n", "a": [1, {"y": None, "x": 2}]}
TOOLS = [{"name": "bash", "parameters": {"type": "object"}}, {"name": "edit"}]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("assistant", "A1 \n"), ("assistant", "A1"), id="trailing white space"),
        pytest.param(("assistant", "\n\nA1"), ("assistant", "A1"), id="leading white space of a reply"),
        pytest.param(("assistant", None, None), ("assistant", "", ""), id="null against empty"),
        pytest.param(("assistant", "   "), ("assistant", None), id="white space only"),
        pytest.param(("assistant", "", " R1\n"), ("assistant", "", "R1"), id="trimmed reasoning"),
        pytest.param(("tool", "out\t"), ("tool", "out"), id="a tool result without its final tab"),
    ],
)
def test_what_carries_no_meaning_is_not_in_the_key(one, other):
    assert canonical_key(*one) == canonical_key(*other)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ARGUMENTS),
        json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":")),
        json.dumps(ARGUMENTS, indent=2, sort_keys=True),
        '{"a":[1.0,{"x":2e0,"y":null}],"b":"\\u00e9\\n"}',
    ],
)
def test_arguments_are_compared_as_objects(text):
    key = canonical_key("assistant", "", "", [("bash", ARGUMENTS)])
    assert canonical_key("assistant", "", "", [("bash", text)]) == key


@pytest.mark.parametrize("empty", ["", "{}", " { } ", None, {}, "null", '""'])
def test_empty_arguments_are_alike(empty):
    assert canonical_arguments(empty) == "{}"


@pytest.mark.parametrize("broken", ['{"a":', "plain", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_arguments_that_are_not_json_stay_text(broken):
    assert canonical_arguments(f" {broken}\n") == broken


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("user", "a"), ("tool", "a"), id="role"),
        pytest.param(("user", "a"), ("user", "b"), id="text"),
        pytest.param(("user", " a"), ("user", "a"), id="indentation of what was fed in"),
        pytest.param(("assistant", "a", "R"), ("assistant", "a"), id="reasoning"),
        pytest.param(("assistant", "R", "a"), ("assistant", "a", "R"), id="reasoning against text"),
        pytest.param(("assistant", "", "", [("bash", "{}")]), ("assistant", "", "", [("edit", "{}")]), id="tool name"),
        pytest.param(
            ("assistant", "", "", [("f", '{"a":true}')]),
            ("assistant", "", "", [("f", '{"a":1}')]),
            id="types",
        ),
        pytest.param(
            ("assistant", "", "", [("f", "{}")]),
            ("assistant", "", "", [("f", "{}"), ("f", "{}")]),
            id="number",
        ),
    ],
)
def test_what_carries_meaning_is_in_the_key(one, other):
    assert canonical_key(*one) != canonical_key(*other)


def test_lone_surrogates_have_a_key():
    assert canonical_key("user", "\ud800") != canonical_key("user", "\ud801")


def test_the_bare_key_is_that_without_reasoning():
    assert Turn.of("assistant", "a", "R").bare_key == Turn.of("assistant", "a").key


def test_the_prefix_is_system_and_tools_apart():
    key = prefix_key("S", TOOLS)
    assert key == prefix_key("S\n", [dict(reversed(TOOLS[0].items())), TOOLS[1]])
    assert prefix_key("S", TOOLS[::-1]).system == key.system
    assert prefix_key("S", TOOLS[::-1]).tools != key.tools
    assert prefix_key(None, TOOLS).tools == key.tools


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("", "", 0),
        ("same", "same", 0),
        ("abc", "", 3),
        ("cd /w && ls", "ls", 9),
        ("abc", "axc", 1),
        ("a b c", "a c", 2),
        ("line one  \n" * 400, "line one\n" * 400, 800),
        ("x" * 5000, "y" * 6000, 6000),
        ("head" + "x" * 5000 + "tail", "head" + "y" * 5000 + "tail", 5000),
    ],
)
def test_distance_in_characters(a, b, expected):
    assert distance(a, b) == expected


@relaxed
@given(st.text("ab\n", max_size=30), st.text("ab\n", max_size=30))
def test_distance_bounds(a, b):
    assert max(abs(len(a) - len(b)), a != b) <= distance(a, b) <= len(a) + len(b)
    kept = sum(block.size for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
    assert distance(a, b) <= len(a) + len(b) - kept
