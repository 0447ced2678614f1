"""The tiny policy's tokenizer and model."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.rendering import Rendering
from algos.tiny import build_model, build_tokenizer, phrases
from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.protocols.canonical import Message
from envs.tasks.desk import LEVELS, generate
from envs.tasks.desk.lexicon import WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def rendering(folder):
    return Rendering(folder)


def encode(rendering, text):
    return rendering.tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80))
def test_any_text_comes_back(rendering, text):
    assert rendering.tokenizer.decode(encode(rendering, text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "amber.txt",
        "chambers  and\tblackbirch\r\n",
        'é 漢字 🦀 \u200b "quoted" \\n',
        "<tool_call>\n{}\n</tool_call><|im_end|>",
        *phrases(),
        "".join(phrases()),
    ],
)
def test_known_pieces_in_any_company_come_back(rendering, text):
    assert rendering.tokenizer.decode(encode(rendering, text)) == text


@pytest.mark.parametrize("text", [*WORDS, *phrases()])
def test_words_and_phrases_are_one_token(rendering, text):
    assert len(encode(rendering, text)) == 1
    assert encode(rendering, f"x{text}x")[1:-1] == encode(rendering, text)


def test_transformers_loads_the_same_tokenizer(folder, rendering):
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "Count the lines with amber in birch.txt; 12 of them, isn't it?"
    assert loaded.encode(text) == encode(rendering, text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_building_again_gives_the_same_bytes(folder, tmp_path):
    build_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(("level", "longest"), [(1, 40), (2, 50)])
def test_prompts_are_short_and_decode_to_the_qwen3_format(rendering, level, longest):
    assert rendering.name == "qwen3"
    for task in generate("train", 64, 0, level=level):
        ids = rendering.first([Message("system", SYSTEM), Message("user", task.instruction)], TOOLS)
        assert len(ids) <= longest
        text = rendering.tokenizer.decode(ids)
        assert text.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n\n")
        assert all("\n" + json.dumps(tool) + "\n" in text for tool in TOOLS)
        assert text.endswith(f"<|im_start|>user\n{task.instruction}<|im_end|>\n<|im_start|>assistant\n")


def test_levels_share_the_vocabulary(rendering):
    for level in LEVELS:
        ids = encode(rendering, " ".join(task.instruction for task in generate("wording", 64, 0, level=level)))
        letters = [i for i in ids if len(piece := rendering.tokenizer.decode([i])) == 1 and piece.isalpha()]
        assert not letters, "an instruction of a held-out wording falls apart into letters"


def test_model_is_small_fp32_and_fixed_by_its_seed(tmp_path):
    model = build_model(560, seed=3)
    size = sum(p.numel() for p in model.parameters())
    assert 0.6e6 < size < 0.7e6
    again, other = build_model(560, seed=3), build_model(560, seed=4)
    for mine, same in zip(model.parameters(), again.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, same)
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_building_a_model_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model(560, seed=3)
    assert torch.equal(torch.rand(3), expected)
