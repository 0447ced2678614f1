"""R1: the parts of a resumed run begin at its checkpoint, whatever was published after it."""

import asyncio
import os
import time

import pytest

from actors import start


class Learner:
    """Publishes ``version``, after a while."""

    def __init__(self, weights, version):
        self.weights, self.version = weights, version

    async def load(self):
        await asyncio.sleep(0.05)
        self.weights.mkdir(exist_ok=True)
        (self.weights / "LATEST").write_text(f"v{self.version:08d}")
        return self.version


async def test_an_engine_looks_for_weights_only_after_the_learner_went_back_to_its_checkpoint(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "LATEST").write_text("v00000007")
    seen = await start._loaded_and_served(Learner(weights, 5), weights, 5, (weights / "LATEST").read_text)
    assert seen == "v00000005"


async def test_in_a_new_run_engine_and_learner_start_beside_each_other(tmp_path):
    weights = tmp_path / "weights"
    began = []
    await start._loaded_and_served(Learner(weights, 0), weights, 0, lambda: began.append(weights.exists()))
    assert began == [False]


@pytest.mark.parametrize("published", [True, False])
async def test_a_learner_at_another_step_than_the_run_stops_it(tmp_path, published):
    weights = tmp_path / "weights"
    weights.mkdir()
    if published:
        (weights / "LATEST").write_text("v00000007")
    with pytest.raises(start.StartError, match=r"step 5, expected that of step 10.*--resume"):
        await start._loaded_and_served(Learner(weights, 5), weights, 10, lambda: time.sleep(0.01))


def test_a_ray_that_does_not_start_is_told_in_one_line(monkeypatch):
    def init(**_):
        assert kept["RAY_raylet_start_wait_time_s"] == "180"
        raise Exception("The current node timed out during startup.\n  Look at\nthe logs.")

    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(start.ray, "init", init)
    with pytest.raises(start.StartError) as told:
        start.connect()
    assert str(told.value) == ("Ray could not be started: The current node timed out during startup. Look at the logs.")
