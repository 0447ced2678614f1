"""The settings of supervised fine-tuning. Importing this module imports neither torch nor ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from configs.base import Config, Device


def _listed(value: Any) -> Any:
    """One path alone is a list of it."""
    return [value] if isinstance(value, str | Path) else value


class SftModelConfig(Config):
    """The policy to begin with."""

    path: Path | None = Field(None, description="Folder of a Hugging Face model with its tokenizer; required.")
    renderer: Literal["auto", "qwen3", "qwen3.5", "default"] = Field(
        "auto", description="How messages become tokens: a renderer by name, or found by the model's family."
    )


class SftDataConfig(Config):
    """What is imitated."""

    path: Annotated[list[Path], BeforeValidator(_listed)] = Field(
        default_factory=list,
        description="Run folders, folders with .tree or .jsonl files, or such files; required. [A, B] names several.",
    )
    min_reward: float | None = Field(
        None, description="Only episodes and rows with at least this reward; none: all, graded or not."
    )
    splits: list[str] | None = Field(None, min_length=1, description="Trees: only of these splits; none: of all.")
    kinds: list[Literal["main", "subagent", "compaction", "after-compaction", "side"]] | None = Field(
        None,
        min_length=1,
        description="Trees: train calls of these kinds, dead leaves excepted; none: what the run that made them kept.",
    )
    train_on: Literal["assistant", "all"] = Field(
        "assistant", description="assistant: the policy's own tokens; all: what it was fed as well."
    )
    max_len: int | None = Field(
        None, ge=2, description="Longest trajectory in tokens; none: the longest that the model has positions for."
    )
    long: Literal["error", "drop"] = Field(
        "error", description="A longer one: an error that names it, or it is left out and counted."
    )
    heldout: float = Field(
        0.05, ge=0, lt=1, description="Share of the prompts whose loss is measured and which are not trained."
    )
    skip_bad: bool = Field(False, description="Leave broken rows and files out instead of stopping.")


class SftConfig(Config):
    """Supervised fine-tuning: from trajectories to a policy that run.py takes as model.path."""

    model: SftModelConfig = Field(default_factory=SftModelConfig)
    data: SftDataConfig = Field(default_factory=SftDataConfig)
    out: Path | None = Field(None, description="Folder of the result, which is a Hugging Face model; required.")
    seed: int = Field(0, ge=0, description="Of the order of the trajectories and of which are held out.")
    epochs: int = Field(2, ge=1, description="How often every trajectory is trained.")
    batch_tokens: int = Field(
        32768, ge=1, description="Tokens of the trajectories of one optimiser step, about: each stays whole."
    )
    learning_rate: float = Field(1e-5, gt=0, description="AdamW's learning rate after the warm-up.")
    warmup: float = Field(0.05, ge=0, le=1, description="Share of the steps over which the learning rate rises.")
    decay: Literal["linear", "cosine"] = Field("cosine", description="Form of the decay after the warm-up.")
    final_lr_factor: float = Field(
        0.1, ge=0, le=1, description="Learning rate of the last step as a share of the full one."
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay of first and second moments.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; longer ones are scaled down.")
    max_tokens_per_microbatch: int = Field(
        16384, ge=1, description="Tokens of one forward pass; changes memory and speed, not the result."
    )
    layout: Literal["auto", "tree", "paths"] = Field(
        "auto",
        description="tree computes a beginning that trajectories share once, paths each trajectory; auto: tree where "
        "that spares a fifth of the tokens. Changes speed, not the result.",
    )
    checkpoint_every: int = Field(50, ge=1, description="Optimiser steps between checkpoints, for --resume.")
    threads: int = Field(1, ge=1, description="CPU threads.")
    device: Device = Field("cpu", description="cpu, cuda or cuda:N.")
