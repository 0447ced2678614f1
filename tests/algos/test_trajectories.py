"""Reading what is imitated: what is broken, what is chosen, what is held out."""

import pytest
from message_rows import GOOD, USER, heard, said, write
from tree_sessions import call, grow

from actors.rendering import Rendering
from algos.tiny import build_tokenizer
from algos.trajectories import DataError, load, split
from configs.sft import SftDataConfig
from trees import codec


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Rendering(folder)


def read(path, rendering, longest=4096, **settings):
    return load(SftDataConfig(path=path, **settings), lambda: rendering, longest, len(rendering.tokenizer))


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


def test_a_folder_of_trees_and_conversations_gives_both(rendering, tmp_path):
    (tmp_path / "a.tree").write_bytes(codec.encode(stored("a", 1.0)))
    write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "u"}, said("a")]}])
    assert len(read(tmp_path, rendering).trajectories) == 2


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
