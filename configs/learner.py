"""How the policy learns. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Config, Device


class LoraSettings(Config):
    """Low-rank adapters in place of training all weights."""

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="What they add is scaled by alpha / rank.")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="Names of the linear layers that get one.",
    )


class CriticConfig(Config):
    """What estimates values for PPO. It learns with the learner's optimiser settings, AdamW, and all weights."""

    shared: bool = Field(
        False,
        description="true: a value head on the policy's own hidden states, which then learn from both losses; false: a "
        "model of its own that begins as the policy began.",
    )
    learning_rate: float = Field(1e-3, gt=0, description="AdamW's, with the warm-up and decay of the policy's.")
    warmup_steps: int = Field(
        0, ge=0, description="Training steps at the start in which only the critic learns and the policy stays."
    )
    value_clip: float | None = Field(
        0.5,
        gt=0,
        description="How far a value may move from the one before the step: 0.5 for small models, 1.0 for large ones; "
        "none: any way.",
    )
    coef: float = Field(0.5, gt=0, description="Weight of the value loss.")
    epochs: int = Field(
        1, ge=1, description="Passes of a critic of its own over the episodes of each of the policy's optimiser steps."
    )
    minibatches: int = Field(1, ge=1, description="Optimiser steps of the critic in each of these passes.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of one trained token.")
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="1: the whole outcome, as the paper has it; below: less noise, more bias."
    )

    @model_validator(mode="after")
    def _only_of_its_own(self) -> CriticConfig:
        if self.shared and (self.epochs, self.minibatches) != (1, 1):
            raise ValueError(
                f"epochs, minibatches: got {self.epochs} and {self.minibatches} with shared=true, expected 1: a shared "
                "critic learns in the policy's own pass; leave them out, or set shared=false"
            )
        return self


class LearnerConfig(Config):
    """From a step's trees to new weights."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "gae"] = Field(
        "grpo", description="How rewards become advantages: within their group, or gae: PPO with a critic."
    )
    critic: CriticConfig | None = Field(None, description="The critic of advantage=gae; none: no critic.")
    loss: Literal["token", "gspo", "cispo"] = Field(
        "token",
        description="What is clipped: a token's ratio, the episode's (gspo; its clips are near 3e-4 and 4e-4), or a "
        "weight without a gradient (cispo; clip_low=1 leaves it unbounded below).",
    )
    normalise: Literal["token", "episode", "constant"] = Field(
        "token",
        description="Mean over all trained tokens, over episodes of their token means, or over episodes of their sums "
        "divided by normalise_constant.",
    )
    normalise_constant: int | None = Field(
        None, ge=1, description="normalise=constant: tokens, such as the most that an episode may sample."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for matrices inside of layers, with AdamW for all other weights."
    )
    muon_learning_rate: float = Field(
        0.002, gt=0, description="Muon's size of a step, with the warm-up and decay of learning_rate."
    )
    lora: LoraSettings | None = Field(
        None, description="Train low-rank adapters, published merged into the weights; none: train all weights."
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
    epochs: int = Field(1, ge=1, description="Times that a training step goes over its episodes.")
    clip_low: float = Field(0.20, gt=0, le=1, description="How far the ratio may fall below 1 before it is clipped.")
    clip_high: float = Field(0.28, gt=0, description="How far the ratio may rise above 1 before it is clipped.")
    dual_clip: float | None = Field(
        None, gt=1, description="Largest ratio that a token with a negative advantage pays for; none: any."
    )
    tis_cap: float | None = Field(
        2.0, gt=0, description="Cap of the truncated importance weight old/mu; none: no such weight."
    )
    tis_mode: Literal["truncate", "mask"] = Field(
        "truncate", description="A token with a weight above the cap takes the cap, or drops out of the loss."
    )
    tis_floor: float | None = Field(
        None, gt=0, description="tis_mode=mask: tokens with a weight below it drop out too; none: 1 / tis_cap."
    )
    reject_mean: float | None = Field(
        None,
        gt=1,
        description="An episode is not trained where the geometric mean of its weights old/mu is beyond this bound or "
        "its inverse; none: no bound.",
    )
    reject_max: float | None = Field(
        None, gt=1, description="The same for the weight of any of its tokens; none: no bound."
    )
    kl_coef: float = Field(0.0, ge=0, description="Penalty on the divergence from the policy before the step.")
    entropy_coef: float = Field(0.0, ge=0, description="Bonus on the policy's entropy.")
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
    ranks: int = Field(
        1, ge=1, description="Processes that hold a shard of the model each and share the micro-batches; a GPU each."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of compute and of published weights; weights, sums and optimiser stay float32."
    )
    checkpoint_activations: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, a third more work."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each rank of the learner.")
    device: Device = Field("cpu", description="cpu, cuda or cuda:N.")
    gpus: float | None = Field(
        None, ge=0, description="GPUs that Ray sets aside for each rank; none: 1 on cuda, else 0."
    )

    @property
    def each_gpus(self) -> float:
        """GPUs that Ray sets aside for a rank."""
        if self.gpus is not None:
            return self.gpus
        return 1 if self.device.startswith("cuda") else 0

    @model_validator(mode="after")
    def _consistent(self) -> LearnerConfig:
        if (self.advantage == "gae") != (self.critic is not None):
            raise ValueError(
                f"advantage, critic: got advantage={self.advantage} {'with' if self.critic else 'without'} a critic, "
                "expected a critic with advantage=gae and with no other; for its defaults set critic.shared=false"
            )
        if self.tis_mode == "mask" and self.tis_floor is None and self.tis_cap is not None and self.tis_cap <= 1:
            raise ValueError(
                f"tis_cap: got {self.tis_cap} with tis_mode=mask and no tis_floor, expected above 1: the floor is "
                "1 / tis_cap, and no token would be left"
            )
        if (self.normalise == "constant") != (self.normalise_constant is not None):
            raise ValueError(
                f"normalise, normalise_constant: got {self.normalise} and {self.normalise_constant}, expected a "
                "number of tokens with normalise=constant and with no other"
            )
        if self.loss == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"dual_clip: got {self.dual_clip} with loss=cispo, whose weight clip_high bounds already; leave it out"
            )
        if self.tis_mode == "mask" and self.tis_cap is None:
            raise ValueError("tis_mode: got mask with tis_cap=none, expected a cap: a weight beyond it is masked")
        if self.tis_floor is not None and (self.tis_mode != "mask" or self.tis_floor > (self.tis_cap or 0)):
            raise ValueError(
                f"tis_floor: got {self.tis_floor} with tis_mode={self.tis_mode} and tis_cap={self.tis_cap}, expected "
                "it with tis_mode=mask only, and not above the cap"
            )
        return self
