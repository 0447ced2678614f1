"""How the policy learns. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Config


class LearnerConfig(Config):
    """From a step's trees to new weights."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="How rewards of a group become advantages."
    )
    learning_rate: float = Field(8e-4, gt=0, description="AdamW's learning rate after the warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay of first and second moments.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    warmup_steps: int = Field(6, ge=0, description="Steps over which the learning rate rises linearly.")
    decay: Literal["linear", "cosine"] = Field("linear", description="Form of the decay after the warm-up.")
    final_lr_factor: float = Field(
        0.3, ge=0, le=1, description="Learning rate of the last step as a share of the full one."
    )
    minibatches: int = Field(2, ge=1, description="Optimiser steps of a training step, each on its share of episodes.")
    clip_low: float = Field(0.20, gt=0, le=1, description="How far the ratio may fall below 1 before it is clipped.")
    clip_high: float = Field(0.28, gt=0, description="How far the ratio may rise above 1 before it is clipped.")
    tis_cap: float | None = Field(
        2.0, gt=0, description="Cap of the truncated importance weight old/mu; none: no such weight."
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; longer ones are scaled down.")
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="Tokens of one forward pass; changes memory and speed, not the result.",
    )
    layout: Literal["auto", "tree", "paths"] = Field(
        "auto",
        description="tree computes a beginning that paths share once, paths computes each path; auto: tree where that "
        "spares a fifth of the tokens. Changes speed, not the result.",
    )
    logit_chunk: int = Field(
        1024, ge=1, description="Tokens whose logits are held at once; changes memory and speed, not the result."
    )
    train_truncated: bool = Field(
        True, description="Train episodes cut by a budget; false: they leave the batch and the baseline."
    )
    aux_credit: Literal["none", "outcome", "scaled"] = Field(
        "none",
        description="What auxiliary branches take of the episode's advantage, where trees.train_kinds names any: "
        "all of it, or each an equal share.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the learner.")
    device: str = Field("cpu", description="cpu, cuda or cuda:N.")
    gpus: float | None = Field(
        None, ge=0, description="GPUs that Ray sets aside for the learner; none: 1 on cuda, else 0."
    )
