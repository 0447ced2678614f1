"""The board of weights, with replicas that a test plays."""

import asyncio
from pathlib import Path

import pytest

from actors.engines.board import WeightsBoard

PATH = Path("weights")


class Actor:
    """A handle that is alive."""

    class __ray_ready__:  # noqa: N801
        @staticmethod
        async def remote():
            return True


@pytest.fixture
def board():
    return WeightsBoard()


async def asks(board, name, version, error="", failed=-1):
    return await asyncio.wait_for(board.next(name, Actor, version, error, failed), 2)


async def test_all_replicas_are_waited_for(board):
    one, two = (asyncio.create_task(asks(board, name, 0)) for name in "ab")
    await asyncio.sleep(0)
    announced = asyncio.create_task(board.announce(1, PATH))
    assert await one == await two == (1, "weights")
    again = asyncio.create_task(board.next("a", Actor, 1))
    await asyncio.sleep(0.05)
    assert not announced.done()
    other = asyncio.create_task(board.next("b", Actor, 1))
    await asyncio.wait_for(announced, 2)
    assert await board.versions() == {"a": 1, "b": 1}
    again.cancel()
    other.cancel()


async def test_a_newer_version_is_as_good_and_nobody_goes_back(board):
    waiting = asyncio.create_task(board.next("a", Actor, 7))
    await asyncio.sleep(0)
    await asyncio.wait_for(board.announce(5, PATH), 2)
    assert not waiting.done()
    waiting.cancel()


async def test_two_announcements_at_once(board):
    first = asyncio.create_task(asks(board, "a", 0))
    await asyncio.sleep(0)
    both = [asyncio.create_task(board.announce(version, PATH)) for version in (3, 4)]
    assert await first == (4, "weights")
    last = asyncio.create_task(board.next("a", Actor, 4))
    await asyncio.wait_for(asyncio.gather(*both), 2)
    last.cancel()


async def test_a_refusal_is_told_once_and_the_version_may_be_announced_again(board):
    first = asyncio.create_task(asks(board, "a", 0))
    await asyncio.sleep(0)
    announced = asyncio.create_task(board.announce(1, PATH))
    assert await first == (1, "weights")
    refusing = asyncio.create_task(board.next("a", Actor, 0, "torn", 1))
    with pytest.raises(ValueError, match="engine a did not take version 1: torn"):
        await asyncio.wait_for(announced, 2)
    assert not refusing.done()
    again = asyncio.create_task(board.announce(1, PATH))
    assert await asyncio.wait_for(refusing, 2) == (1, "weights")
    taken = asyncio.create_task(board.next("a", Actor, 1))
    await asyncio.wait_for(again, 2)
    taken.cancel()


async def test_without_a_replica_it_ends(board, monkeypatch):
    monkeypatch.setattr("actors.engines.board._ALONE_S", 0.01)
    with pytest.raises(TimeoutError, match="no engine"):
        await asyncio.wait_for(board.announce(1, PATH), 5)
