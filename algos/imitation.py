"""Expert transcripts as tokens, and the model's step towards them.

Invariant: a transcript's ids are what the proxy would hold after the same episode: the first prompt
rendered, the expert's turns encoded, every later prompt the held ids plus the newly rendered tail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from actors.rendering import Rendering
from algos.muon import Muon
from algos.overheard import Overheard
from algos.tiny import NOTES, PLAN
from envs.harnesses.agent_loop.client import Client
from envs.harnesses.agent_loop.loop import run
from envs.harnesses.agent_loop.parts import BASE, Part, assembled, parsed
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.harnesses.agent_loop.tools import Tools
from envs.protocols.canonical import Message
from envs.tasks.desk import DeskTask, Turn
from envs.tasks.desk.lexicon import EXTENSIONS, WORDS

SLOTS = (*WORDS, *(f".{extension}" for extension in EXTENSIONS), *"123456789")
"""What instructions hold to be copied; each is one token of the policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """``ids`` int64 [T]; ``own`` bool [T], true where the policy would have sampled the token."""

    family: str
    ids: np.ndarray
    own: np.ndarray


def transcribe(
    rendering: Rendering, task: DeskTask, turns: Sequence[Turn], harness: str = BASE, wording: int = 0
) -> Transcript:
    """An episode of these turns in a harness of the transparent loop, as the policy would have lived it.

    The harness itself runs; only the model's answers and what the shell prints are the script's.
    """
    parts = assembled(harness, [], wording, NOTES)
    plans = dict(parsed(harness)).get("W", 0) > 0
    script = _Script(rendering, [Turn(text=PLAN), *turns] if plans else turns, shell_name(parts))
    run(script, _Printed(script, parts), task.instruction, len(turns), parts)
    return Transcript(task.family, np.array(script.ids, np.int64), np.array(script.own))


def transcribe_outside(rendering: Rendering, task: DeskTask, turns: Sequence[Turn], heard: Overheard) -> Transcript:
    """An episode of these turns in a harness that was overheard, in its words."""
    said = [*turns[:-1], Turn(heard.last)] if heard.last else turns
    script = _Script(rendering, said, heard.shell)
    messages, tools = heard.messages(task.instruction), list(heard.tools)
    for turn in said:
        answer = script.complete(messages, tools)["message"]
        result = {"role": "tool", "content": heard.result(turn.command, turn.output), "tool_call_id": "call0"}
        messages = [*messages, {"role": "assistant", **answer}, result]
    return Transcript(task.family, np.array(script.ids, np.int64), np.array(script.own))


def shell_name(parts: Part) -> str:
    """What a harness calls the shell."""
    names = [tool["function"]["name"] for tool in parts.tools(TOOLS)]
    return next(name for name in names if parts.resolve(name, {}) == ("execute_bash", {}))


class _Script(Client):
    """Says the turns in order and holds the tokens as the proxy would."""

    def __init__(self, rendering: Rendering, turns: Sequence[Turn], shell: str) -> None:
        self._rendering = rendering
        self._turns = iter(turns)
        self._shell = shell
        self._prompt: list[int] = []
        self._seen = 0
        self.turn = Turn()
        self.ids: list[int] = []
        self.own: list[bool] = []

    def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        new = [Message(each["role"], each["content"], tool_call_id=each.get("tool_call_id", "")) for each in messages]
        if self._prompt:
            # The first that is new is the turn before this one.
            tail = self._rendering.extend(self._prompt, self.ids[len(self._prompt) :], new[self._seen + 1 :], tools)
            assert tail is not None
        else:
            tail = self._rendering.first(new, tools)
        # Where the workflow asks once more at the end, the last turn is said again.
        self.turn = turn = next(self._turns, self.turn)
        call = {"name": turn.tool or self._shell, "arguments": {"command": turn.command} if turn.command else {}}
        calls = [{"id": "call0", "function": call}] if turn.command or turn.tool else []
        text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" if calls else turn.text
        said = self._rendering.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        self._seen = len(messages)
        self._prompt = self.ids + tail
        self.ids = self._prompt + said
        self.own += [False] * len(tail) + [True] * len(said)
        return {"message": {"content": turn.text, "tool_calls": calls}}


class _Printed(Tools):
    """Prints what the script says that the shell prints."""

    def __init__(self, script: _Script, parts: Part) -> None:
        super().__init__(1.0, 1, parts)
        self._script = script

    def _carried_out(self, name: object, arguments: object) -> tuple[str, int | None]:
        assert isinstance(arguments, dict)
        found = self.parts.resolve(name, arguments)
        return (found, None) if isinstance(found, str) else (self._script.turn.output, 0)


def drill(rendering: Rendering, rng: Random, words: int) -> Transcript:
    """Random ``SLOTS`` said twice; the second time counts as the policy's own.

    With a few of these in the first batches copying emerges in half the steps: they hold far more to copy
    than a transcript does.
    """
    known = [rendering.tokenizer.encode(slot, add_special_tokens=False)[0] for slot in SLOTS]
    ids = rng.choices(known, k=words)
    own = [False] * words + [True] * words
    return Transcript("drill", np.array(ids + ids, np.int64), np.array(own))


def padded(batch: Sequence[Transcript]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids int64 [B, T] and own bool [B, T]; padding is not own and has id 0."""
    length = max(len(each.ids) for each in batch)
    ids = np.zeros((len(batch), length), np.int64)
    own = np.zeros((len(batch), length), bool)
    for row, each in enumerate(batch):
        ids[row, : len(each.ids)] = each.ids
        own[row, : len(each.own)] = each.own
    return torch.from_numpy(ids), torch.from_numpy(own)


def alike(batch: Sequence[Transcript]) -> list[list[Transcript]]:
    """Groups of which no row is twice as long as another, so that little is padding; the batch's order within each."""
    bounds: list[int] = []
    for length in sorted({len(each.ids) for each in batch}, reverse=True):
        if not bounds or 2 * length <= bounds[-1]:
            bounds.append(length)
    return [
        [each for each in batch if shorter < len(each.ids) <= longest] for longest, shorter in pairwise([*bounds, 0])
    ]


def token_losses(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each token after the first given those before it, [B, T - 1].

    Padding on the right needs no mask: no real token looks ahead.
    """
    logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), ids_BT[:, 1:], reduction="none")


@torch.no_grad()
def chances(model: PreTrainedModel, transcripts: Sequence[Transcript]) -> dict[str, float]:
    """How probable the policy makes each transcript's own tokens as a whole, averaged by family.

    For transcripts without bad habits this is the expected success of sampling at temperature 1, counting
    the expert's way alone: a measurement without sampling noise.
    """
    ids, own = padded(transcripts)
    logprobs = -(token_losses(model, ids) * own[:, 1:]).sum(1)
    found: dict[str, list[float]] = {}
    for each, chance in zip(transcripts, logprobs.exp().tolist(), strict=True):
        found.setdefault(each.family, []).append(chance)
    return {family: sum(each) / len(each) for family, each in found.items()}


class Imitator:
    """The optimisers: Muon on the matrices, AdamW on the tied embedding and the norms.

    ``prompt_weight`` is the loss weight of tokens that are not the policy's own: reading what the shell
    printed teaches copying.
    """

    def __init__(self, model: PreTrainedModel, muon_lr: float, adam_lr: float, prompt_weight: float = 0.1) -> None:
        self.model = model
        self.prompt_weight = prompt_weight
        embedding = model.get_input_embeddings().weight
        matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
        self._others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
        self._optimizers = (
            (muon_lr, Muon(matrices, muon_lr)),
            (adam_lr, torch.optim.AdamW(self._others, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)),
        )

    def backward(self, batch: Sequence[Transcript]) -> float:
        """Add the gradient of the weighted mean loss; returns the mean loss of the policy's own tokens."""
        groups = []
        for rows in alike(batch):
            ids, own = padded(rows)
            real = torch.tensor([len(each.ids) for each in rows])[:, None] > torch.arange(1, ids.shape[1])
            groups.append((ids, own[:, 1:], torch.where(own[:, 1:], 1.0, self.prompt_weight) * real))
        total = sum(weights.sum() for _, _, weights in groups)
        loss = 0.0
        for ids, mine, weights in groups:
            losses = token_losses(self.model, ids)
            ((losses * weights).sum() / total).backward()
            loss += float((losses.detach() * mine).sum())
        return loss / sum(int(mine.sum()) for _, mine, _ in groups)

    def step(self, batch: Sequence[Transcript], scale: float) -> float:
        """One update at ``scale`` times the learning rates; the mean loss of the policy's own tokens."""
        loss = self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for lr, optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss
