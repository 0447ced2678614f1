"""Figures that follow from those of one line of ``metrics.jsonl``.

Invariant: the stages of a step add up to its seconds.
"""

from __future__ import annotations

STAGES = {
    "stage/rollouts": "waiting for rollouts",
    "stage/old": "learner: old log-probabilities",
    "stage/passes": "learner: forward, backward, optimiser",
    "stage/critic": "learner: critic",
    "stage/learner": "learner: the rest",
    "stage/update": "new weights to the engine",
    "stage/eval": "evaluation",
    "stage/rest": "everything else",
}
"""In the order in which a step goes through them, with what people read."""


def derived(row: dict[str, float]) -> dict[str, float]:
    """Seconds by stage, and rates; what the row has nothing for is left out.

    Rates are per second of a step without its evaluation: they are of training, not of what is measured beside it. The
    first step has none, since its rollouts ran beside the evaluation before it.
    """
    found = _stages(row)
    if row.get("step", 0) <= 1:
        return found
    busy = row.get("seconds/step", 0.0) - row.get("seconds/eval", 0.0)
    if busy > 0:
        found |= {name: row[key] / busy for name, key in _PER_SECOND.items() if key in row}
    if row.get("train/tokens_computed", 0.0) > 0 and "train/tokens_of_paths" in row:
        found["rate/shared"] = row["train/tokens_of_paths"] / row["train/tokens_computed"]
    if row.get("seconds/train", 0.0) > 0 and "train/tokens_computed" in row:
        found["rate/learner_tokens"] = row["train/tokens_computed"] / row["seconds/train"]
    return found


_PER_SECOND = {"rate/episodes": "episodes/scheduled", "rate/tokens": "tokens/sampled"}


def _stages(row: dict[str, float]) -> dict[str, float]:
    def seconds(*names: str) -> float:
        return sum(row.get(f"seconds/{name}", 0.0) for name in names)

    whole = row.get("seconds/step", row.get("seconds/eval"))
    if whole is None:
        return {}
    known = {
        "stage/rollouts": seconds("rollout_wait"),
        "stage/old": seconds("learner_old"),
        "stage/passes": seconds("learner_forward", "learner_backward", "learner_optimiser"),
        "stage/critic": seconds("learner_critic"),
        "stage/update": seconds("update"),
        "stage/eval": seconds("eval"),
    }
    inside = known["stage/old"] + known["stage/passes"] + known["stage/critic"]
    known["stage/learner"] = max(0.0, seconds("train") - inside)
    known["stage/rest"] = max(0.0, whole - sum(known.values()))
    return {name: known[name] for name in STAGES}
