"""What a plan says of GPUs, memory and the schedule."""

import json
from pathlib import Path

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from algos import run
from algos.forecast import PUBLISHED, forecast, shape_of
from configs.loader import load
from configs.schema import RunConfig

PAPER = Path(run.__file__).parents[1] / "configs" / "paper"
SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "model",
    [
        Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, intermediate_size=40, tie_word_embeddings=True)),
        Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, intermediate_size=40, tie_word_embeddings=False)),
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SMALL, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
                intermediate_size=40, tie_word_embeddings=False,
            )
        ),
    ],
    ids=["qwen3-tied", "qwen3", "qwen3-moe"],
)  # fmt: skip
def test_parameters_are_those_that_the_model_has(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    shape = shape_of(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    cache = model(input_ids=model.dummy_inputs["input_ids"] % 50, use_cache=True).past_key_values
    keys = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in cache.layers)
    assert shape.cached == keys


def test_a_llama_is_told_within_its_norms_of_queries(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=40))
    model.config.save_pretrained(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(tmp_path).parameters == pytest.approx(counted, rel=0.01)


def test_the_published_shapes_have_the_published_sizes():
    small, large = shape_of(Path("any/Qwen3-4B")), shape_of(Path("any/Qwen3-30B-A3B"))
    assert (round(small.parameters / 1e9, 2), small.used) == (4.02, small.parameters)
    assert round(large.parameters / 1e9, 1) == 30.5
    assert large.used / 1e9 == pytest.approx(3.3, abs=0.06)


def test_what_is_of_another_form_has_no_estimate(tmp_path):
    assert shape_of(None) is None
    assert shape_of(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 768}))
    assert shape_of(tmp_path) is None
    assert [line.split()[0] for line in forecast(RunConfig.model_validate({"model": {"path": tmp_path}}))] == [
        "placement",
        "schedule",
    ]


GPUS = {"qwen3_4b_grpo": 16, "mix_harness": 16, "jobbench": 16, "officeqa": 16}


@pytest.mark.parametrize("file", sorted(PAPER.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_papers_runs_are_told_whole_with_what_is_not_here(file, tmp_path, capsys):
    assert run.main([str(file), "--dry-run", f"dir={tmp_path}", "wandb.mode=disabled", "sandbox.backend=process"]) == 2
    told, missing = capsys.readouterr()
    config = load(file, [])
    assert f": {GPUS.get(file.stem, 32)} GPUs\n" in told
    assert f"memory      {'4.02' if file.stem in GPUS else '30.5'} B parameters" in told
    assert "tasks.path: " in missing
    assert "model.path: " in missing
    assert config.model.path.name in PUBLISHED
    # As the papers have it.
    assert (config.steps, config.rollout.groups * config.rollout.group_size) == (300, 128)
    assert (config.learner.learning_rate, config.learner.clip_low, config.learner.clip_high) == (1e-6, 0.20, 0.28)
    assert (config.learner.kl_coef, config.learner.entropy_coef) == (0, 0)
    assert not list(tmp_path.iterdir())


def test_more_ranks_hold_less_and_adapters_need_no_moments():
    whole = ["model.path=m/Qwen3-4B", "learner.device=cuda"]

    def said(*more: str) -> str:
        return next(line for line in forecast(load(None, [*whole, *more])) if "a rank" in line)

    assert "59.9 GiB weights and optimiser" in said()
    assert "7.49 GiB weights and optimiser" in said("learner.ranks=8")
    assert "15 GiB weights and optimiser" in said("learner.lora.rank=8")
    assert "120 GiB weights and optimiser with the critic's" in said(
        "learner.advantage=gae", "learner.critic.shared=false"
    )


def test_the_schedule_says_how_the_learning_rate_goes():
    def said(*settings: str) -> str:
        return next(line for line in forecast(load(None, list(settings))) if line.startswith("schedule"))

    assert (
        "learning rate 6 steps up to 0.0008, then linear to 0.00024; 2 optimiser steps of 32 episodes a step" in said()
    )
    assert "learning rate 1e-06; " in said(
        "learner.learning_rate=1e-6", "learner.warmup_steps=0", "learner.final_lr_factor=1"
    )
    assert "blocks of 4 steps" in said("space={}", "assignment={kind: locality, k: 4}")
