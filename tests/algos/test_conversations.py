"""Rows of messages: the ids of the proxy, and which of them are trained."""

from random import Random

import pytest
from bpe import save_bpe
from message_rows import USER, desk_row, heard, said

from actors.engines.base import Generated
from actors.rendering import Rendering
from actors.session import Session
from actors.session_contract import SessionSpec
from algos.conversations import tree_of
from algos.imitation import transcribe
from algos.supervised import samples_of
from algos.tiny import build_tokenizer
from configs.proxy import ProxyConfig
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.protocols import openai_chat
from envs.protocols.errors import WireError
from envs.tasks.desk import FAMILIES, expert, generate
from trees.build import TreeBuilder
from trees.record import VersionSpan


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Rendering(folder)


def own(rendering, sample):
    """The texts of the runs of trained tokens."""
    runs, ids, mask = [], sample.ids.tolist(), sample.mask.tolist()
    for i, token in enumerate(ids):
        if mask[i]:
            if i and mask[i - 1]:
                runs[-1].append(token)
            else:
                runs.append([token])
    return [rendering.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad_habit", [False, True])
def test_a_row_has_the_ids_of_the_proxys_tree_of_the_same_episode(rendering, family, bad_habit):
    (task,) = generate("train", 1, 0, [family], level=2)
    row = desk_row(task, Random(1), bad_habit)
    session, builder, messages = Session(SessionSpec("e"), rendering, ProxyConfig(), 4096), TreeBuilder("e"), []
    names = {}
    for wire in row["messages"]:
        if wire["role"] == "assistant":
            request = openai_chat.parse({"messages": messages, "tools": TOOLS}, {})
            prepared = session.prepare(request)
            turn = openai_chat.parse({"messages": [wire]}, {}).messages[0]
            ids = rendering.spoken(turn)
            logprobs = [-0.5] * len(ids)
            reply, record = session.complete(prepared, Generated(ids, logprobs, "stop", (VersionSpan(0, 0, len(ids)),)))
            builder.add(record)
            wire = openai_chat.dump(reply, request)["choices"][0]["message"]
            names = {f"call0_{i}": call["id"] for i, call in enumerate(wire.get("tool_calls", ()))}
        messages.append({**wire, **({"tool_call_id": names[wire["tool_call_id"]]} if "tool_call_id" in wire else {})})
    (mine,), (theirs,) = samples_of(tree_of(row, rendering)), samples_of(builder.tree())
    cold = transcribe(rendering, task, expert(task, Random(1), bad_habit))
    assert mine.ids.tolist() == theirs.ids.tolist() == cold.ids.tolist()
    assert mine.mask.tolist() == theirs.mask.tolist() == cold.own.tolist()


def test_reasoning_calls_and_stop_ids_are_trained_and_all_else_is_not(rendering):
    row = {
        "messages": [
            USER,
            said("look", "ls", "wc -l a.txt", reasoning_content="two things", at=1),
            heard("7", 1, 1),
            heard("a.txt", 1, 0),
            said("wait", weight=0),
            {"role": "user", "content": "ünï\u2028码 <|im_end|>"},
            said("7 Zeilen 🙂"),
            {"role": "user", "content": "left out"},
        ],
        "tools": TOOLS,
    }
    (sample,) = samples_of(tree_of(row, rendering))
    first, last = own(rendering, sample)
    assert first.startswith("<think>\ntwo things\n</think>\n\nlook")
    assert first.count("<tool_call>") == 2
    assert first.endswith("<|im_end|>")
    assert last == "7 Zeilen 🙂<|im_end|>"
    whole = rendering.tokenizer.decode(sample.ids.tolist())
    # Results stand in the order of their calls, and what a user spells out ends no turn.
    assert whole.index("a.txt\n</tool_response>") < whole.index("7\n</tool_response>")
    assert "left out" not in whole
    assert sum(token == rendering.stop_ids[0] for token in sample.ids.tolist()) == whole.count("<|im_end|>") - 1
    (everything,) = samples_of(tree_of(row, rendering), everything=True)
    # All but the first token and the turn that nobody should learn.
    before, after = own(rendering, everything)
    assert before.endswith("<|im_start|>assistant\n")
    assert after.startswith("\n<|im_start|>user")


@pytest.mark.parametrize(
    "message",
    [said("A"), said("", "ls"), said("A", "ls", reasoning_content="R"), said("A", reasoning_content="R")],
)
def test_what_is_trained_reads_back_as_the_turn_that_it_is_of(rendering, message):
    tree = tree_of({"messages": [USER, message], "tools": TOOLS}, rendering)
    (node,) = tree.calls()
    back, sure = rendering.parse(node.ids.tolist(), tree.prompt_ids(node.call), TOOLS)
    wire = openai_chat.parse({"messages": [message]}, {}).messages[0]
    assert sure
    assert (back.text, back.reasoning) == (wire.text, wire.reasoning)
    assert [(c.name, c.arguments) for c in back.tool_calls] == [(c.name, c.arguments) for c in wire.tool_calls]


CHATML = r"""{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_with_a_template_of_its_own_a_model_is_taught_what_that_can_say(tmp_path):
    rendering = Rendering(save_bpe(tmp_path, ["hello world"], 300, chat_template=CHATML))
    assert rendering.name == "default"
    row = {"messages": [USER, said("one"), {"role": "user", "content": "more"}, said("two")]}
    (sample,) = samples_of(tree_of(row, rendering))
    assert own(rendering, sample) == ["one<|im_end|>", "two<|im_end|>"]
    assert (
        sample.ids.tolist()
        == rendering.tokenizer.apply_chat_template(
            [USER, said("one"), {"role": "user", "content": "more"}, said("two")], return_dict=False
        )[: len(sample.ids)]
    )
    late = [USER, {"role": "system", "content": "late"}, said("x")]
    for messages, words in (([USER, said("", "ls")], "read as the turn itself"), (late, "refuses this: late")):
        with pytest.raises(WireError, match=words):
            tree_of({"messages": messages}, rendering)
