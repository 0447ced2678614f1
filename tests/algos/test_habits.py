"""Habits that depend on the harness: when they come, that they spoil the work, and transcripts in every harness."""

import itertools
import subprocess
from collections import Counter
from random import Random

import numpy as np
import pytest

from actors.rendering import Rendering
from algos.habits import AFTER, KINDS, OF_LEVELS, Habit, chance_of_none, misled, of_levels, of_pairs
from algos.imitation import shell_name, transcribe
from algos.rehearsal import rehearse
from algos.tiny import PLAN, build_model, build_tokenizer, phrases_of_levels
from envs.harnesses.agent_loop.parts import BASE, assembled, parsed
from envs.space import SPACE
from envs.tasks.desk import FAMILIES, expert, generate, write


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space")
    build_tokenizer(folder, levels=True)
    return Rendering(folder)


def test_every_level_but_the_base_has_a_habit_and_the_base_has_none():
    habits = of_levels(0.5)
    others = {f"{letter}{level}" for letter in SPACE.letters for level in (1, 2)}
    assert {habit.levels for habit in habits} == others == OF_LEVELS.keys()
    assert not [habit for habit in habits if habit.fits(BASE)]
    assert [habit.levels for habit in habits if habit.fits("S2T0O1C0W0")] == ["S2", "O1"]
    assert chance_of_none(BASE, habits) == 1.0
    assert chance_of_none("S2T0O1C0W0", habits) == pytest.approx(0.25)


def test_pairs_are_different_spread_over_the_factors_and_fixed_by_their_seed():
    habits = of_pairs(30, 0.8, 4)
    assert habits == of_pairs(30, 0.8, 4)
    assert habits != of_pairs(30, 0.8, 5)
    assert habits[:10] == of_pairs(10, 0.8, 4)
    assert len({habit.levels for habit in habits}) == 30
    assert set(Counter("".join(letter for letter, _ in parsed(habit.levels)) for habit in habits).values()) == {3}
    # In whatever harness, of all 90 exactly ten fit: one for each two factors.
    every = of_pairs(90, 0.1, 0)
    assert {sum(habit.fits(SPACE.name(point)) for habit in every) for point in SPACE.points()} == {10}
    with pytest.raises(ValueError, match="got habits of 91 pairs"):
        of_pairs(91, 0.1, 0)


def test_what_is_gone_by_is_there_to_be_seen():
    """What a tool's result looks like is not known before there is one."""
    for habit in (*of_levels(0.5), *of_pairs(90, 0.5, 1)):
        assert ("O" in habit.levels) <= (habit.kind in AFTER)
        assert habit.kind in (AFTER if "O" in habit.levels else KINDS)


def test_habits_come_as_often_as_they_say_and_one_at_a_time():
    (task,) = generate("train", 1, 0, ["move"])
    turns, rng, habits = expert(task, Random(0)), Random(1), [Habit("S1", "tidies", 0.5), Habit("T1", "touches", 0.5)]
    seen = Counter(str(misled(turns, task, "S1T1O0C0W0", habits, rng)) for _ in range(4000))
    assert seen.pop("None") / 4000 == pytest.approx(0.25, abs=0.03)
    assert [count / 4000 for count in seen.values()] == pytest.approx([0.375, 0.375], abs=0.03)
    assert misled(turns, task, BASE, habits, rng) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_habit_prints_what_the_script_says_and_the_grade_is_0(family, kind, tmp_path):
    (task,) = generate("train", 1, 7, [family])
    (folder,) = (tmp_path / one.id for one in write([task], tmp_path))
    turns = misled(expert(task, Random(0)), task, "S0T1O0C0W0", [Habit("T1", kind, 1.0)], Random(0))
    room = tmp_path / "room"
    room.mkdir()
    for name, text in task.inputs.items():
        (room / name).write_text(text)
    assert turns[-1].text
    for turn in turns[:-1]:
        if turn.command:
            ran = subprocess.run(["bash", "-c", turn.command], cwd=room, capture_output=True, text=True, check=True)
            assert ran.stdout + ran.stderr == turn.output
    graded = subprocess.run(["bash", folder / "reward" / "reward.sh"], cwd=room, capture_output=True, text=True)
    assert graded.stdout.split()[-1] == "0"


def test_a_transcript_in_every_harness_says_what_the_harness_says(rendering):
    tasks = generate("train", 243, 3)
    for index, (task, point) in enumerate(zip(tasks, SPACE.points(), strict=True)):
        name = SPACE.name(point)
        made = transcribe(rendering, task, expert(task, Random(0)), name, index % 2)
        text, parts = rendering.tokenizer.decode(made.ids.tolist()), assembled(name, [], index % 2)
        assert parts.instruction(task.instruction) in text
        assert f'{{"name": "{shell_name(parts)}", "arguments"' in text
        spoken = [part for part, own in _runs(made.ids, made.own) if own]
        assert (rendering.tokenizer.decode(spoken[0].tolist()) == f"{PLAN}<|im_end|>") == (point[4] > 0)
        assert len(made.ids) < 160
        assert rendering.tokenizer.decode(spoken[-1].tolist()) == "Done.<|im_end|>"


def _runs(ids, own):
    edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(ids)]
    return [(ids[a:b], bool(own[a])) for a, b in itertools.pairwise(edges)]


def test_what_the_levels_say_is_one_token_a_line(rendering):
    for text in phrases_of_levels():
        assert len(rendering.tokenizer.encode(text, add_special_tokens=False)) == 1


def test_what_is_learnt_by_heart_in_other_harnesses_is_done_in_the_shell(rendering):
    from algos.imitation import Imitator

    tasks = generate("train", len(FAMILIES), 0)
    names = ["S1T2O1C0W0", "S0T1O2C1W2", "S2T0O0C2W1", "S2T1O1C1W1"]
    habit = [Habit("T1", "is distracted", 1.0)]
    turns = [expert(task, Random(i)) for i, task in enumerate(tasks)]
    turns = [
        misled(t, task, names[i % 4], habit, Random(i)) or t
        for i, (t, task) in enumerate(zip(turns, tasks, strict=True))
    ]
    batch = [transcribe(rendering, task, t, names[i % 4]) for i, (task, t) in enumerate(zip(tasks, turns, strict=True))]
    imitator = Imitator(build_model(len(rendering.tokenizer), 1), muon_lr=0.03, adam_lr=3e-3)
    for step in range(70):
        imitator.step(batch, 0.1 if not step else 1.0)
    episodes = rehearse(
        imitator.model, rendering, tasks, temperature=0.0, seed=0, max_turns=7, backend="process", harnesses=names
    )
    assert [episode.ids for episode in episodes] == [each.ids.tolist() for each in batch]
    assert [episode.reward for episode in episodes] == [0.0 if "T1" in names[i % 4] else 1.0 for i in range(8)]
