"""Transcripts as tokens, learning from them, and measuring what was learnt with a real shell."""

import math
from random import Random

import pytest
import torch

from actors.rendering import Rendering
from algos.imitation import SLOTS, Imitator, Transcript, alike, chances, drill, padded, token_losses, transcribe
from algos.rehearsal import rehearse, success
from algos.tiny import build_model, build_tokenizer
from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.protocols.canonical import Message
from envs.tasks.desk import FAMILIES, expert, generate


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder)
    return Rendering(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad_habit", [False, True])
def test_a_transcript_holds_the_turns_and_what_the_shell_said(rendering, family, bad_habit):
    (task,) = generate("train", 1, 0, [family], level=2)
    turns = expert(task, Random(1), bad_habit)
    made = transcribe(rendering, task, turns)
    ids, own = made.ids.tolist(), made.own.tolist()
    first = rendering.first([Message("system", SYSTEM), Message("user", task.instruction)], TOOLS)
    assert ids[: len(first)] == first
    assert not any(own[: len(first)])
    at = len(first)
    for turn in turns:
        end = own.index(False, at) if False in own[at:] else len(own)
        message, readable = rendering.parse(ids[at:end], ids[:at], TOOLS)
        assert readable
        assert ids[end - 1] in rendering.stop_ids
        assert [call.arguments for call in message.tool_calls] == ([{"command": turn.command}] if turn.command else [])
        if not turn.command:
            assert message.text == turn.text
            assert end == len(ids)
            continue
        tail = rendering.extend(ids[:at], ids[at:end], [Message("tool", turn.output, tool_call_id="t")], TOOLS)
        assert ids[end : end + len(tail)] == tail
        at = end + len(tail)


def test_drills_are_slots_said_twice(rendering):
    made = drill(rendering, Random(3), 40)
    first, second = made.ids[:40].tolist(), made.ids[40:].tolist()
    assert first == second
    assert made.own.tolist() == [False] * 40 + [True] * 40
    said = {rendering.tokenizer.decode([i]) for i in first}
    assert said <= set(SLOTS)
    assert len(said) > 20
    assert all(len(rendering.tokenizer.encode(slot)) == 1 for slot in SLOTS)


def test_padding_changes_no_loss(rendering):
    model = build_model(len(rendering.tokenizer), 0)
    batch = [transcribe(rendering, task, expert(task, Random(0))) for task in generate("train", 8, 0)]
    ids, own = padded(batch)
    with torch.no_grad():
        together = token_losses(model, ids)
        for row, each in enumerate(batch):
            alone = token_losses(model, torch.from_numpy(each.ids)[None])[0]
            torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)
            assert own[row].sum() == each.own.sum()


def test_rows_of_unlike_lengths_give_the_gradient_of_all_in_one(rendering):
    """Of which those of like lengths are one pass, in their order."""
    model = build_model(len(rendering.tokenizer), 0).double()
    batch = [transcribe(rendering, task, expert(task, Random(0))) for task in generate("train", 8, 0)]
    batch = [
        Transcript(each.family, each.ids[: 10 * (i + 1)], each.own[: 10 * (i + 1)]) for i, each in enumerate(batch)
    ]
    groups = alike(batch)
    assert [[len(each.ids) for each in group] for group in groups] == [[40, 50, 58, 53, 65], [20, 30], [10]]
    imitator = Imitator(model, muon_lr=0.03, adam_lr=3e-3, prompt_weight=0.1)
    loss = imitator.backward(batch)
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    numerator, denominator, mine = torch.zeros((), dtype=torch.float64), 0.0, []
    for each in batch:
        losses = token_losses(model, torch.from_numpy(each.ids)[None])[0]
        for token_loss, own in zip(losses, each.own[1:], strict=True):
            numerator = numerator + token_loss * (1.0 if own else 0.1)
            denominator += 1.0 if own else 0.1
            mine += [float(token_loss.detach())] if own else []
    (numerator / denominator).backward()
    # The norms of transformers are float32 also in a float64 model.
    for gradient, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-7)
    assert loss == pytest.approx(sum(mine) / len(mine))


def test_chances_are_products_of_probabilities(rendering):
    model = build_model(len(rendering.tokenizer), 0)
    batch = [transcribe(rendering, task, expert(task, Random(0))) for task in generate("train", 2, 0, ["move"])]
    # A fresh model is near uniform over the vocabulary; the right chance is tiny but exact.
    expected = []
    for each in batch:
        ids = torch.from_numpy(each.ids)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
        own = [i for i in range(1, len(each.ids)) if each.own[i]]
        expected.append(math.exp(sum(float(logprobs[i - 1, each.ids[i]]) for i in own)))
    assert chances(model, batch)["move"] == pytest.approx(sum(expected) / 2, rel=1e-3)


def test_what_is_learnt_by_heart_is_done_in_the_shell(rendering):
    """Eight transcripts, every other one with its bad habit: the grades are 0 and 1 in turn."""
    tasks = generate("train", len(FAMILIES), 0)
    habits = [bool(i % 2) for i in range(len(tasks))]
    turns = [expert(task, Random(i), habit) for i, (task, habit) in enumerate(zip(tasks, habits, strict=True))]
    batch = [transcribe(rendering, *each) for each in zip(tasks, turns, strict=True)]
    model = build_model(len(rendering.tokenizer), 1)
    imitator = Imitator(model, muon_lr=0.03, adam_lr=3e-3)
    first = imitator.step(batch, 0.1)
    for _ in range(55):
        last = imitator.step(batch, 1.0)
    assert last < 0.05 < first
    assert min(chances(model, batch).values()) > 0.8
    episodes = rehearse(model, rendering, tasks, temperature=0.0, seed=0, backend="process")
    for episode, task, habit, transcript in zip(episodes, tasks, habits, batch, strict=True):
        assert episode.clean
        assert episode.reward == (0.0 if habit else 1.0)
        assert episode.ids == transcript.ids.tolist()
        assert success(episodes)[task.family] == episode.reward


def test_rehearsal_is_a_function_of_its_seed_and_a_fresh_model_fails(rendering):
    model = build_model(len(rendering.tokenizer), 0)
    tasks = generate("heldout", 8, 0)
    runs = [rehearse(model, rendering, tasks, temperature=1.0, seed=seed, backend="process") for seed in (0, 0, 1)]
    assert [e.ids for e in runs[0]] == [e.ids for e in runs[1]]
    assert [e.ids for e in runs[0]] != [e.ids for e in runs[2]]
    assert set(success(runs[0]).values()) == {0.0}
