"""The tiny policy: a tokenizer and a Qwen3 model of 0.7M parameters, made from nothing.

Invariant: the tokenizer is lossless. Phrase tokens stand for boilerplate that the harness and the
chat format repeat word for word, so prompts are ten times shorter, yet decoding gives exactly the
text that was encoded; any other text falls back to byte-level BPE. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from envs.harnesses.agent_loop.parts import Part, Seen, known
from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.harnesses.agent_loop.workflow import EVERY
from envs.tasks.desk import FAMILIES, LEVELS, expert, generate
from envs.tasks.desk.lexicon import EXTENSIONS, WORDS
from envs.tasks.desk.wordings import WORDINGS as ASKED

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Qwen3's control tokens; the policy stops on the last one."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Qwen3's tokens that are part of the text."""

CONTEXT = 32768

PLAN = "Plan: use the tools, then say so."
"""What the expert says where a plan is asked for."""

PLAN_AND_HABITS = (PLAN, "true # ", "exit; ", "touch ", "; rm ", "; echo ok >> ", "echo ok > ", " old.txt")
"""The expert's words in harnesses that are not the base (``algos.habits``)."""

NOTES = "/home/agent/notes"
"""Where the harness keeps its notes, in transcripts."""

WORDINGS = 2
"""Wordings that every level has."""

_CALLS = 4
"""Calls of an episode whose boilerplate is phrases."""

# One digit, an operator with its spaces, a word with the mark before and the space after it, other
# marks, single white space: so that a slot word never merges with what stands beside it.
_PIECES = r"\d| [^\w\s]+ |[^\w\s]?[^\W\d]+ ?|[^\w\s]+ ?|\s"


def phrases() -> list[str]:
    """The boilerplate of the base harness in Qwen3's chat format, in pieces for variants to share."""
    rules = SYSTEM.split("\n")
    return [
        "system\n",
        "user\n",
        "assistant\n",
        *(rule + "\n" for rule in rules[:-1]),
        rules[-1],
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
        *("\n" + json.dumps(tool, ensure_ascii=False) for tool in TOOLS),
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        *(f'\n{{"name": "{tool["function"]["name"]}", "arguments": {{"command": "' for tool in TOOLS),  # type: ignore[index]
        '"}}\n',
        "awk '{s+=$",
        "} END {print s}' ",
        *(f".{extension}" for extension in EXTENSIONS if extension != "txt"),
        "Done.",
    ]


def phrases_of_levels() -> list[str]:
    """The boilerplate of every level of the transparent loop in each of its wordings, line by line."""
    found = dict.fromkeys(PLAN_AND_HABITS)
    for levels in known([]).values():
        for level in levels:
            for wording in range(WORDINGS):
                found |= dict.fromkeys(_said_by(level, wording))
    return [text for text in found if text and text not in phrases()]


def _said_by(level: type[Part], wording: int) -> Iterable[str]:
    """The lines of all that a level says in a wording."""

    def make() -> Part:
        # A fresh one each time: some say a thing once.
        return level(wording, NOTES)

    tools = make().tools(TOOLS)
    names = [tool["function"]["name"] for tool in tools]
    yield from ("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    yield from (f'\n{{"name": "{name}", "arguments": {{"command": "' for name in names)
    yield from (f'\n{{"name": "{name}", "arguments": {{}}}}\n' for name in names)
    *lines, last = make().system(SYSTEM).split("\n")
    yield from (*(line + "\n" for line in lines), last)
    yield make().instruction("")
    asked = make()
    yield from (asked.reply({}, 0) or "", asked.remark(EVERY) or "", asked.reply({}, EVERY) or "")
    for number in range(_CALLS):
        seen = [make().observation(Seen(name, "", 0, number)) for name in names]
        yield from (line for text in seen for line in text.splitlines(keepends=True))
    answers = [make().resolve(name, {}) for name in names]
    yield from (answer for answer in answers if isinstance(answer, str))


def build_tokenizer(folder: Path, levels: bool = False, more: Sequence[str] = ()) -> None:
    """Write the tokenizer as a Hugging Face folder that ``AutoTokenizer.from_pretrained`` loads.

    Word pieces are learnt from the training phrasings and the experts' commands of the desk tasks. With ``levels`` the
    boilerplate of every level of the harness is phrases too, not only the base's; ``more`` are phrases of others.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    whole = list(dict.fromkeys([*phrases(), *(phrases_of_levels() if levels else ()), *more]))
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(whole), trainer)
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in (*MARKS, *whole, *WORDS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.save_pretrained(folder)


def build_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised fp32 model on the CPU; a function of the arguments alone."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _corpus(whole: list[str]) -> Iterable[str]:
    """Texts for the word pieces, cut at the tokens that stand whole."""
    cut = re.compile("|".join(re.escape(text) for text in sorted((*whole, *WORDS), key=len, reverse=True)))
    texts = [text for wordings in ASKED.values() for text in wordings.train]
    texts = [re.sub(r"{(source|second|target)}", f"{WORDS[0]}.txt", text) for text in texts]
    texts = [re.sub(r"{\w+}", WORDS[0], text) for text in texts]
    rng = Random(0)
    for level in LEVELS:
        for task in generate("train", 12 * len(FAMILIES), seed=0, level=level):
            for bad_habit in (False, True):
                texts += [turn.command for turn in expert(task, rng, bad_habit)]
    for text in texts:
        yield from cut.split(text)
