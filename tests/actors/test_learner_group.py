import asyncio

import pytest
from ray.exceptions import ActorDiedError

from actors import learner_group
from actors.learner_group import GroupLostError, LearnerGroup, LearnerRank, NotJoinedError
from configs.learner import LearnerConfig

DEAD = ActorDiedError()


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *arguments):
        return self.actor.call(self.name, *arguments)


class Rank:
    """An actor that answers a method with a value, raises it where it is an error, or waits for ever."""

    def __init__(self, answers):
        self.answers = {"address": "tcp://here:1", "join": 0, "ping": True} | answers
        self.asked = []

    def __getattr__(self, name):
        return Method(self, name)

    async def call(self, name, *arguments):
        self.asked.append((name, *arguments))
        await asyncio.sleep(0)
        answer = self.answers[name]
        if answer == "waits":
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def killed(monkeypatch):
    found = []
    monkeypatch.setattr(learner_group.ray, "kill", lambda rank, no_restart: found.append(rank))
    monkeypatch.setattr(learner_group, "_GRACE_S", 0.05)
    return found


async def test_all_ranks_are_asked_and_the_first_answers(killed):
    ranks = [Rank({"train": {"loss": 1.0}}), Rank({"train": {"loss": 2.0}})]
    group = LearnerGroup(ranks)
    assert await group.load() == 0
    assert await group.train(3, {"e": "g"}) == {"loss": 1.0}
    assert ranks[0].asked[1:] == ranks[1].asked == [("join", "tcp://here:1"), ("train", 3, {"e": "g"})]
    assert not killed


@pytest.mark.parametrize("others", ["waits", RuntimeError("connection closed by peer"), {"loss": 1.0}])
@pytest.mark.parametrize("lost", [DEAD, NotJoinedError("rank 1 has no model yet")])
async def test_the_loss_of_one_rank_ends_all(killed, others, lost):
    ranks = [Rank({"train": others}), Rank({"train": lost}), Rank({"train": others})]
    group = LearnerGroup(ranks)
    await group.load()
    with pytest.raises(GroupLostError, match="lost a rank during train"):
        await asyncio.wait_for(group.train(0, {}), 5)
    assert killed == ranks


async def test_a_fault_that_is_no_loss_is_told_as_it_is(killed):
    group = LearnerGroup([Rank({"train": ValueError("bad tree")}), Rank({"train": "waits"})])
    await group.load()
    with pytest.raises(ValueError, match="bad tree"):
        await asyncio.wait_for(group.train(0, {}), 5)
    assert not killed


async def test_ranks_that_met_must_begin_anew_to_meet_again(killed):
    ranks = [Rank({}), Rank({})]
    group = LearnerGroup(ranks)
    await group.load()
    assert not killed
    await group.load()
    assert killed == ranks


def test_a_rank_without_a_model_says_so_and_keeps_what_it_is_sent(tmp_path):
    rank = LearnerRank(tmp_path, tmp_path, LearnerConfig(), total_steps=1)
    rank.add(b"a tree")
    with pytest.raises(NotJoinedError, match="call join first"):
        rank.train(0, {})
