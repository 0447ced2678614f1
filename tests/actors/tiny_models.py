"""Tiny random models and the plain forward that the engine is compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

VOCABULARY = 300
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "qwen3": Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**COMMON, sliding_window=32),
}


def make(kind: str, folder: Path, seed: int) -> PreTrainedModel:
    """Save a random model of ``kind`` in ``folder`` and return it; wide weights make peaked distributions."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel, prompt: list[int], sampled: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each sampled token by one full forward of prompt and sampled, [sampled] float32."""
    logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0].float() / (temperature or 1.0)
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
