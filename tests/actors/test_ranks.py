"""Several ranks train as one does."""

import multiprocessing
import pickle
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_work import trained, work
from test_learner import model_path, rollouts, same  # noqa: F401

from actors.engines import weights
from algos.ranks import ALONE, balanced

SIZE = 4


def real(test):
    """Of those that look at what the same ranks did."""
    return pytest.mark.harness(pytest.mark.xdist_group("ranks")(test))


def on_ranks(size, cases, folder):
    """What each rank says to each case."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["actors.learner", "transformers.models.qwen3.modeling_qwen3"])
    out = folder / "found"
    processes = [context.Process(target=work, args=(rank, size, folder / "store", cases, out)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
        assert process.exitcode == 0
    found = [pickle.loads(out.with_suffix(f".{rank}").read_bytes()) for rank in range(size)]
    for rank, each in enumerate(found):
        assert not isinstance(each, str), f"rank {rank}: {each}"
    return found


def prepare(model, run, steps=2, first=0):
    """Trees on disk of steps whose episodes do not depend on what is trained; the steps."""
    found = []
    for step in range(first, first + steps):
        batch, groups = rollouts(model, step, version=0, size=5)
        folder = run / "trees" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, data in batch.items():
            (folder / f"{name}.tree").write_bytes(data)
        found.append((step, groups))
    return found


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


CASES = {
    "trees": {"layout": "tree"},
    "paths": {"layout": "paths"},
    "float64": {"layout": "tree"},
    "recomputed": {"layout": "tree", "checkpoint_activations": True},
    "muon": {"optimizer": "muon"},
    "lora": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.01, "entropy_coef": 0.01},
    "own critic": {"advantage": "gae", "critic": {"epochs": 2, "minibatches": 2}},
    "shared critic": {"advantage": "gae", "critic": {"shared": True}},
    "few batches": {"max_tokens_per_microbatch": 100_000},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def alone_and_together(model_path, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("ranks")
    cases = {size: [] for size in (1, SIZE)}
    for name, settings in CASES.items():
        for size, those in cases.items():
            run = folder / f"{name} {size}"
            case = {"model": model_path, "run": run, "settings": settings, "steps": prepare(model_path, run)}
            those.append(case | {"double": name == "float64"})
    passed_on = {"model": model_path, "settings": {}, "save_at": 2}
    for size, those in cases.items():
        run = folder / f"saver {size}"
        those.append(passed_on | {"run": run, "steps": prepare(model_path, run, steps=3)})
    last = cases[1][-1]["steps"][2:]
    alone = [trained(case, ALONE) for case in cases[1]]
    shutil.copytree(folder / "saver 1", folder / f"reader {SIZE}", symlinks=True)
    cases[SIZE].append(passed_on | {"run": folder / f"reader {SIZE}", "steps": last, "load": True})
    together = on_ranks(SIZE, cases[SIZE], folder)
    shutil.copytree(folder / f"saver {SIZE}", folder / "reader 1", symlinks=True)
    resumed = trained(passed_on | {"run": folder / "reader 1", "steps": last, "load": True}, ALONE)
    found = {name: (alone[i], [each[i] for each in together]) for i, name in enumerate(CASES)}
    saver, reader = together[0][-2:]
    return found | {"savers": {1: alone[-1], SIZE: saver}, "readers": {1: resumed, SIZE: reader}}


@real
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_give_the_update_of_one(alone_and_together, model_path, name):  # noqa: F811
    """In float32 to 2e-5 after four optimiser steps of 8e-4 each; sums are of another order, and AdamW divides.

    In float64 to 1e-9, with norms that compute in it too.
    """
    (rows, tensors), together = alone_and_together[name]
    narrow = name == "bfloat16"
    assert largest_difference(tensors, together[0][1]) < {"bfloat16": 8e-3, "float64": 1e-9}.get(name, 2e-5)
    for mine, theirs in zip(rows, together[0][0], strict=True):
        assert mine["train/optimiser_steps"] == 2
        assert mine.keys() == theirs.keys()
        watched = {"loss", "grad_norm", "entropy", "ratio_mean", "tokens", "value_loss", "value_mean"}
        for key in sorted({f"train/{name}" for name in watched} & mine.keys()):
            assert mine[key] == pytest.approx(theirs[key], rel=2e-2 if narrow else 1e-4, abs=5e-3 if narrow else 1e-6)


@real
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_say_the_same(alone_and_together, name):
    def told(rows):
        return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]

    together = alone_and_together[name][1]
    assert all(told(rows) == told(together[0][0]) for rows, _ in together)


@real
@pytest.mark.parametrize(("saver", "reader"), [(1, SIZE), (SIZE, 1)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(alone_and_together, saver, reader):
    went_on, resumed = alone_and_together["savers"][saver], alone_and_together["readers"][reader]
    assert largest_difference(went_on[1], resumed[1]) < 2e-5
    assert went_on[0][-1]["train/loss"] == pytest.approx(resumed[0][-1]["train/loss"], rel=1e-4, abs=1e-6)


@real
def test_recomputed_activations_change_nothing(alone_and_together):
    plain, recomputed = (alone_and_together[name][0][1] for name in ("trees", "recomputed"))
    assert same(plain, recomputed)


@real
def test_adapters_are_published_merged_into_what_they_target(alone_and_together, model_path):  # noqa: F811
    after, before = alone_and_together["lora"][0][1], weights.read(model_path)
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if any(part in name for part in ("q_proj", "v_proj", "down_proj"))}


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_every_micro_batch_has_one_rank_and_none_has_much_more(costs, hands):
    """LPT leaves at most 4/3 of the best, which is at least the mean and the longest."""
    found = balanced(costs, hands)
    assert sorted(place for hand in found for place in hand) == list(range(len(costs)))
    loads = [sum(costs[place] for place in hand) for hand in found]
    assert max(loads) <= sum(costs) / hands + max(costs, default=0)
    assert found == balanced(costs, hands)
