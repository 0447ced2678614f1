"""Supervised fine-tuning: what is trained of which trajectory, the loss, the loop and the command."""

import json
import math
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from bpe import save_bpe
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from tree_sessions import call, grow, relaxed, sessions

from actors import checkpoints
from actors.engines.base import Generated
from actors.rendering import Rendering
from actors.session import Session
from actors.session_contract import SessionSpec
from algos import sft
from algos.coldstart import coldstart
from algos.conversations import tree_of
from algos.finetune import FineTuning
from algos.imitation import chances, transcribe
from algos.runlog import read_jsonl
from algos.supervised import accumulate, batches, learning_rate, measure, samples_of
from algos.tiny import build_model, build_tokenizer
from algos.trajectories import DataError, load, split
from configs.loader import load_as
from configs.proxy import ProxyConfig
from configs.schema import ColdstartConfig
from configs.sft import SftConfig, SftDataConfig
from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.protocols import openai_chat
from envs.protocols.errors import WireError
from envs.tasks.desk import FAMILIES, expert, generate
from trees import codec
from trees.build import TreeBuilder
from trees.record import VersionSpan


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The tiny policy before its cold start."""
    folder = tmp_path_factory.mktemp("policy")
    build_tokenizer(folder)
    rendering = Rendering(folder)
    build_model(len(rendering.tokenizer), seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rendering(policy):
    return Rendering(policy)


@pytest.fixture(scope="module")
def model():
    return build_model(60, seed=3).double().eval()


def said(text="", *commands, at=0, **more):
    """An assistant turn; its calls are named by ``at``."""
    calls = [
        {
            "id": f"call{at}_{i}",
            "type": "function",
            "function": {"name": "execute_bash", "arguments": json.dumps({"command": command})},
        }
        for i, command in enumerate(commands)
    ]
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {}), **more}


def heard(text, at=0, nth=0):
    return {"role": "tool", "tool_call_id": f"call{at}_{nth}", "content": text}


USER = {"role": "user", "content": "count the lines"}


def desk_row(task, rng, bad_habit=False):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
    for turn in expert(task, rng, bad_habit):
        messages += [said("", turn.command), heard(turn.output)] if turn.command else [said(turn.text)]
    return {"messages": messages, "tools": TOOLS, "reward": float(not bad_habit)}


def write(path, rows):
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def read(path, rendering, longest=4096, **settings):
    return load(SftDataConfig(path=path, **settings), lambda: rendering, longest, len(rendering.tokenizer))


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


# What is trained


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
    cold = transcribe(rendering, task, Random(1), bad_habit)
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


@relaxed
@given(sessions(), st.booleans())
def test_every_token_of_a_tree_is_trained_once_or_not_at_all(records, everything):
    tree = grow(*records)
    trained = [node for node in tree.nodes if node.trained and len(node)]
    if not everything and any(len(tree.ids(node.parent)) == 0 for node in trained):
        # A call without a prompt: nothing predicts its first token.
        with pytest.raises(ValueError, match="first token"):
            samples_of(tree)
        return
    samples = samples_of(tree, everything)
    count = sum(len(sample.targets) for sample in samples)
    if not everything:
        assert count == sum(map(len, trained))
        return
    above = {node.id for leaf in trained for node in tree.path(leaf.id)}
    firsts = {next(node.id for node in tree.path(i) if len(node)) for i in above if len(tree.ids(i))}
    reached = sum(len(tree.nodes[i]) for i in above)
    assert reached - len(firsts) <= count <= tree.counts().tokens - len(firsts)
    for sample in samples:
        assert not sample.mask[0]
        assert torch.equal(sample.targets, sample.ids[sample.mask])


def forked():
    """Two calls after one prompt and one more after the first; ten trained tokens."""
    return grow(
        call(0, None, [5, 6, 7, 8], [9, 10, 11]),
        call(1, None, [5, 6, 7, 8], [9, 12, 13, 14]),
        call(2, 0, [20, 21], [22, 23, 24]),
    )


@pytest.mark.parametrize("layout", ["paths", "tree"])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 13, 10_000])
def test_loss_and_gradient_equal_a_reference_call_by_call(model, layout, everything, max_tokens):
    trees = [forked(), grow(call(0, None, [5, 6, 7, 8], [30, 31])), grow(call(0, None, [40, 41, 42], [43]))]
    model.zero_grad()
    total, tokens, seen = torch.zeros((), dtype=torch.float64), 0, set()
    for number, tree in enumerate(trees):
        for leaf in tree.calls():
            ids, at = tree.ids(leaf.id), 0
            logprobs = torch.log_softmax(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0], -1)
            for node in tree.path(leaf.id):
                for place in range(at, at + len(node)):
                    if place and (node.sampled or everything) and (number, node.id, place) not in seen:
                        seen.add((number, node.id, place))
                        total, tokens = total - logprobs[place - 1, ids[place]], tokens + 1
                at += len(node)
    (total / tokens).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    samples = [sample for tree in trees for sample in samples_of(tree, everything)]
    sums = accumulate(model, samples, max_tokens, layout)
    assert sums.tokens == tokens
    assert sums.loss == pytest.approx((total / tokens).item(), abs=1e-6)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-6)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert measure(model, samples[::-1], max_tokens, layout).loss == pytest.approx(sums.loss, abs=1e-6)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_a_step_is_a_mean_over_all_of_its_tokens(model):
    """L3: the mean of long and short trajectories is over tokens, not over trajectories or micro-batches."""
    long, short = grow(call(0, None, [5], list(range(6, 36)))), grow(call(0, None, [40], [41]))
    parts = [measure(model, samples_of(tree), 1) for tree in (long, short)]
    both = measure(model, samples_of(long) + samples_of(short), 1)
    assert both.loss == pytest.approx((30 * parts[0].loss + parts[1].loss) / 31)
    assert math.isnan(measure(model, [], 1).loss)


# The plan


@relaxed
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 200), st.integers(0, 5))
def test_every_epoch_has_every_trajectory_once_in_steps_of_about_the_size(tokens, epochs, size, seed):
    plan = batches(tokens, epochs, size, seed)
    assert plan == batches(tokens, epochs, size, seed)
    for epoch in plan:
        assert sorted(place for step in epoch for place in step) == list(range(len(tokens)))
        assert all(sum(tokens[place] for place in step) <= size + max(tokens) for step in epoch)
        assert len(epoch) <= math.ceil(sum(tokens) / size)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_learning_rate_rises_and_falls(decay):
    rates = [learning_rate(i, 40, peak=2.0, warmup=0.1, decay=decay, final_factor=0.25) for i in range(40)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.5)
    assert learning_rate(0, 1, peak=2.0, warmup=0.1) == 2.0


# Reading


BAD = {
    "no json": (b'{"messages": [', ["no valid JSON"]),
    "not an object": (b"[1]", ["row", "object with messages"]),
    "no messages": ({"tools": []}, ["messages", "None", "list"]),
    "no assistant turn": ({"messages": [USER]}, ["messages", "assistant turn"]),
    "begins with an answer": ({"messages": [said("hi"), USER, said("x")]}, ["messages[0].role", "user message"]),
    "tool message without a call": ({"messages": [USER, heard("7"), said("x")]}, ["messages[1].tool_call_id"]),
    "result of an older call": (
        {"messages": [USER, said("", "ls"), heard("a"), said("x"), heard("a"), said("y")]},
        ["messages[4].tool_call_id", "call0_0"],
    ),
    "unknown role": ({"messages": [USER, {"role": "bot", "content": "x"}]}, ["messages[1].role", "bot"]),
    "content of a wrong type": ({"messages": [USER, {"role": "assistant", "content": 3}]}, ["messages[1].content"]),
    "says nothing": ({"messages": [USER, said("")]}, ["messages[1].content", "tool_calls"]),
    "arguments no json": (
        {
            "messages": [
                USER,
                {**said("", "x"), "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        ["messages[1].tool_calls[0].function.arguments", "JSON object"],
    ),
    "call without id": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        ["messages[1].tool_calls[0].id"],
    ),
    "weight": ({"messages": [{**USER, "weight": 1}, said("x")]}, ["messages[0].weight"]),
    "half a weight": ({"messages": [USER, said("x", weight=0.5)]}, ["messages[1].weight", "0.5"]),
    "tools": ({"messages": [USER, said("x")], "tools": [{"name": "f"}]}, ["tools[0]"]),
    "marks of a call in a text": (
        {"messages": [USER, said('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')]},
        ["messages[1]", "read as the turn itself"],
    ),
    "reward": ({"messages": [USER, said("x")], "reward": "good"}, ["reward", "good"]),
    "nested": (b'{"messages": ' + b"[" * 100_000, ["no valid JSON"]),
}
GOOD = {"messages": [USER, said("x")]}


@pytest.mark.parametrize(("row", "words"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named_by_file_line_and_field_or_left_out(rendering, tmp_path, row, words):
    path = write(tmp_path / "rows.jsonl", [GOOD, b"", row, GOOD])
    with pytest.raises(DataError) as caught:
        read(path, rendering)
    for word in [f"{path}: line 3: ", *words, "--skip-bad"]:
        assert word in str(caught.value)
    loaded = read(path, rendering, skip_bad=True)
    assert len(loaded.trajectories) == 2
    assert loaded.repeated == 1
    assert len(loaded.faults) == 1


def test_many_faults_are_told_in_few_lines(rendering, tmp_path):
    path = write(tmp_path / "rows.jsonl", [b"{"] * 50)
    with pytest.raises(DataError, match="and 30 more"):
        read(path, rendering)
    with pytest.raises(DataError, match="nothing to train"):
        read(path, rendering, skip_bad=True)


@pytest.mark.parametrize("name", ["empty.jsonl", "blank.jsonl", "empty.tree", "rows.json", "no_folder", "none"])
def test_a_place_without_data_is_told(rendering, tmp_path, name):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "empty.tree").touch()
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, rendering)
    assert name in str(caught.value)


def test_half_a_surrogate_and_a_byte_order_mark_do_no_harm(rendering, tmp_path):
    row = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "ok"}]}'
    assert len(read(write(tmp_path / "rows.jsonl", [row]), rendering).trajectories) == 1


def test_a_long_row_is_an_error_or_left_out(rendering, tmp_path):
    huge = {"messages": [{"role": "user", "content": "zq " * 50_000}, said("x")]}
    path = write(tmp_path / "rows.jsonl", [GOOD, huge])
    with pytest.raises(DataError, match=r"line 2: got \d+ tokens, expected at most 4096"):
        read(path, rendering)
    loaded = read(path, rendering, long="drop")
    assert len(loaded.trajectories) == 1
    assert loaded.left_out == {"of more than 4096 tokens": 1}


def stored(episode, reward, task="t", split="train", **fields):
    tree = grow(
        call(0, None, [5, 6, 7], [9, 10, len(episode)]),
        call(1, None, [5, 6, 8], [11, 12], kind="side"),
        call(2, 0, [13], [14]),
    )
    tree.meta |= {"episode": episode, "reward": reward, "task": task, "split": split, **fields}
    return tree


def test_trees_are_chosen_by_reward_split_and_kind_as_the_run_kept_them(rendering, tmp_path):
    from trees import filters

    kept, _ = filters.apply(stored("a", 1.0), 8)
    folder = tmp_path / "run" / "trees" / "step_000000"
    folder.mkdir(parents=True)
    group = [kept, stored("bb", 0.0), stored("ccc", None), stored("dddd", 1.0, split="eval")]
    (folder / "g.tree").write_bytes(codec.encode_group(group))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    everything = read(tmp_path / "run", rendering)
    assert [each.trained for each in everything.trajectories] == [4, 6, 6, 6]
    chosen = read(tmp_path / "run", rendering, min_reward=0.5, splits=["train"])
    assert [each.trained for each in chosen.trajectories] == [4]
    assert chosen.left_out == {"with a reward below 0.5": 1, "without a reward": 1, "of another split": 1}
    assert [each.trained for each in read(folder, rendering, kinds=["side"]).trajectories] == [2] * 4
    assert [each.trained for each in read(folder, rendering, kinds=["side", "main"]).trajectories] == [6] * 4
    with pytest.raises(DataError, match="4 without a token to train"):
        read(folder, rendering, kinds=["subagent"])


def test_a_damaged_tree_and_one_of_another_tokenizer_are_named(rendering, tmp_path):
    good = codec.encode(stored("a", 1.0))
    (tmp_path / "a.tree").write_bytes(good)
    (tmp_path / "b.tree").write_bytes(good[:-3])
    (tmp_path / "c.tree").write_bytes(codec.encode(grow(call(0, None, [5], [10**6]))))
    with pytest.raises(DataError) as caught:
        read(tmp_path, rendering)
    assert "b.tree" in str(caught.value)
    assert "c.tree: episode 1: got token id 1000000" in str(caught.value)
    assert len(read(tmp_path, rendering, skip_bad=True).trajectories) == 1


def test_a_prompt_is_trained_or_held_out_whatever_was_answered(rendering, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"u{i % 10}"}, said(f"a{i}")]} for i in range(40)]
    loaded = read(write(tmp_path / "rows.jsonl", rows), rendering)
    trained, heldout = split(loaded.trajectories, 0.3, 0)
    assert len({each.prompt for each in heldout}) == 3
    assert not {each.prompt for each in heldout} & {each.prompt for each in trained}
    assert len(trained) + len(heldout) == 40
    assert split(loaded.trajectories, 0, 0)[1] == []
    assert {each.where for each in split(loaded.trajectories, 0.3, 1)[1]} != {each.where for each in heldout}
    with pytest.raises(DataError, match=r"data\.heldout"):
        split(loaded.trajectories[:1], 0.05, 0)


# The loop and the command


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    tasks = generate("train", 24, 0)
    rows = [desk_row(task, Random(i), bool(i % 3 == 0)) for i, task in enumerate(tasks)]
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)


def arguments(policy, rows, out, *more):
    return [f"model.path={policy}", f"data.path={rows}", f"out={out}", "batch_tokens=250", "checkpoint_every=2",
            "learning_rate=3e-3", "data.heldout=0.2", "epochs=3", "data.min_reward=1", *more]  # fmt: skip


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Killed(BaseException):
    pass


def test_it_learns_and_goes_on_after_a_kill_to_the_same_weights(policy, rows, tmp_path, capsys, monkeypatch):
    assert sft.main(arguments(policy, rows, tmp_path / "whole")) == 0
    told = capsys.readouterr().out
    assert f"model.path={tmp_path / 'whole'}" in told
    assert "left out    8 with a reward below 1" in told
    metrics = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert metrics[-1]["heldout/loss"] < metrics[0]["heldout/loss"] - 0.5
    assert [row["step"] for row in metrics] == list(range(len(metrics)))
    assert len(metrics) > 9
    assert [row["step"] for row in metrics if row["step"] and "heldout/loss" in row][-1] == len(metrics) - 1
    assert len([row for row in metrics if "heldout/loss" in row]) == 4
    assert Rendering(tmp_path / "whole").name == "qwen3"

    taken = FineTuning._step

    def dies(work):
        row = taken(work)
        if row["step"] == 5:
            raise Killed
        return row

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "_step", dies)
        with pytest.raises(Killed):
            sft.main(arguments(policy, rows, tmp_path / "cut"))
    assert not (tmp_path / "cut" / "config.json").exists()
    assert checkpoints.find(tmp_path / "cut" / "checkpoints")[0] == 4
    assert sft.main(["--resume", str(tmp_path / "cut")]) == 0
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    again = read_jsonl(tmp_path / "cut" / "metrics.jsonl")
    assert [row | {"seconds": 0} for row in metrics[1:]] == [row | {"seconds": 0} for row in again[1:]]
    assert not equal(weights(policy), weights(tmp_path / "whole"))
    capsys.readouterr()
    assert sft.main(["--resume", str(tmp_path / "cut")]) == 2
    assert "finished already" in capsys.readouterr().err


def test_an_interruption_ends_with_130_and_how_to_go_on(policy, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FineTuning, "run", lambda work: sft._interrupt())
    assert sft.main(arguments(policy, rows, tmp_path / "out")) == 130
    assert f"--resume {tmp_path / 'out'}" in capsys.readouterr().out
    assert sft.main(["--resume", str(tmp_path / "out"), "epochs=1"]) == 2
    assert "besides --resume" in capsys.readouterr().err


def test_it_does_not_go_on_with_other_data(policy, rows, tmp_path, capsys, monkeypatch):
    mine = tmp_path / "rows.jsonl"
    mine.write_bytes(rows.read_bytes())
    monkeypatch.setattr("algos.finetune._publish", lambda folder: None)
    assert sft.main(arguments(policy, mine, tmp_path / "out", "epochs=1")) == 0
    mine.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[1:]))
    # The first row is not good enough to be trained, so that nothing has changed.
    assert sft.main(["--resume", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    mine.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[2:]))
    assert sft.main(["--resume", str(tmp_path / "out")]) == 2
    assert f"error: {tmp_path / 'out'}: got other trajectories" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_and_a_place_that_cannot_be_written_are_told(policy, rows, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    (broken / "model.safetensors").unlink()
    assert sft.main(arguments(broken, rows, tmp_path / "out")) == 2
    (broken / "config.json").write_text("{}")
    assert sft.main(arguments(broken, rows, tmp_path / "other")) == 2
    assert capsys.readouterr().err.count(f"model.path: {broken}") >= 1
    assert sft.main(arguments(policy, rows, rows / "below")) == 2
    assert "out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data.path=null"], ["data.path"]),
        (["data.heldut=0.1"], ["did you mean 'data.heldout'"]),
        (["model.path=/no/where"], ["model.path", "config.json"]),
        (["learning_rate=-1"], ["learning_rate", "greater than 0"]),
        (["data.max_len=20"], ["line 2", "expected at most 20"]),
        (["model.renderer=qwen3.5"], ["model.renderer", "renderer: default"]),
    ],
)
def test_wrong_settings_end_before_anything_starts(policy, rows, tmp_path, capsys, more, words):
    assert sft.main(arguments(policy, rows, tmp_path / "out", *more)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_everything_and_writes_nothing(policy, rows, tmp_path, capsys):
    bad = write(tmp_path / "bad.jsonl", [GOOD, b"{"])
    listed = f"data.path=[{rows}, {bad}]"
    assert sft.main(["--dry-run", *arguments(policy, rows, tmp_path / "out", listed, "data.min_reward=null")]) == 2
    assert sft.main(["--dry-run", "--skip-bad", *arguments(policy, rows, tmp_path / "out", listed)]) == 0
    told = capsys.readouterr().out
    assert "left out    1 without a reward" in told
    assert "skipped" in told
    assert "optimiser steps" in told
    assert sorted(tmp_path.iterdir()) == [bad]


def test_a_result_is_not_written_over_anything(policy, rows, tmp_path, capsys):
    (tmp_path / "precious").touch()
    assert sft.main(arguments(policy, rows, tmp_path)) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_settings_file_is_valid_and_changes_no_default():
    assert load_as(SftConfig, sft.CONFIG) == SftConfig()
    assert load_as(SftConfig, sft.CONFIG, ["data.path=x"]).data.path == [Path("x")]


@pytest.mark.learning
@pytest.mark.timeout(1500)
def test_a_policy_with_bad_habits_learns_the_right_way_from_rows(tmp_path):
    """Held-out tasks of the quickstart's policy, by the chance of the right way, which has no sampling noise."""
    start = coldstart(ColdstartConfig().cache.expanduser(), seed=0)
    tasks = generate("train", 160, 5)
    rows = write(tmp_path / "rows.jsonl", [desk_row(task, Random(i)) for i, task in enumerate(tasks)])
    more = [f"model.path={start}", f"data.path={rows}", f"out={tmp_path / 'out'}"]
    assert sft.main([*more, "batch_tokens=1024", "learning_rate=1e-3", "epochs=3"]) == 0
    metrics = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert metrics[-1]["heldout/loss"] < 0.3 * metrics[0]["heldout/loss"]
    rendering = Rendering(tmp_path / "out")
    probe = [transcribe(rendering, task, Random(0), False) for task in generate("heldout", 64, 6)]
    before, after = (
        chances(AutoModelForCausalLM.from_pretrained(folder), probe) for folder in (start, tmp_path / "out")
    )
    assert sum(before.values()) / len(before) < 0.5
    assert sum(after.values()) / len(after) > 0.8
