"""What each process of a group of learners does in the tests; importable by a fresh process."""

import pickle
import traceback
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from actors.engines import weights
from actors.learner import Learner
from actors.trained_model import causal_model
from algos.ranks import Ranks
from configs.learner import LearnerConfig


def joined(rank, size, store):
    """This process as a rank of a group that meets at the file ``store``."""
    torch.set_num_threads(1)
    if size == 1:
        return Ranks()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    return Ranks(rank, size, dist.group.WORLD)


def learner_of(case, ranks):
    settings = {"warmup_steps": 0, "max_tokens_per_microbatch": 90, **case["settings"]}
    return Learner(case["model"], case["run"], LearnerConfig(**settings), total_steps=8, keep=9, ranks=ranks)


def in_double(path):
    """The model in float64 throughout: its norms would round every token to float32 on their way."""
    model = causal_model(path).double()
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(_norm, module)
    return model


def _norm(module, hidden):
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


def trained(case, ranks):
    """Metrics of each step of a case, whose trees lie on disk, with the weights published after the last."""
    learner = learner_of(case, ranks)
    if case.get("double"):
        learner._policy._build = in_double
        learner._policy.open(case["model"])
    if case.get("load"):
        assert learner.load() == case["steps"][0][0]
    rows = []
    for step, groups in case["steps"]:
        rows.append(learner.train(step, groups))
        if step + 1 == case.get("save_at"):
            learner.save(step + 1, wait=False)
    learner._checkpoints.finish()
    return rows, weights.read(weights.latest(case["run"] / "weights")[1]) if ranks.rank == 0 else {}


def work(rank, size, store, cases, out):
    """Do all cases as one rank; what came of them, or the traceback, is pickled to ``out``."""
    try:
        ranks = joined(rank, size, store)
        found = [trained(case, ranks) for case in cases]
    except BaseException:
        found = traceback.format_exc()
    out.with_suffix(f".{rank}").write_bytes(pickle.dumps(found))
