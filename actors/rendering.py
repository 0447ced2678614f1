"""Between conversations and tokens, for one tokenizer.

Invariant: ``extend`` returns only new ids. What is held is never rendered again, so
``prompt_ids + sampled_ids + extend(...)`` has the held ids as an exact prefix whatever the policy sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from renderers import (
    DefaultRendererConfig,
    Qwen3RendererConfig,
    Qwen35RendererConfig,
    Renderer,
    create_renderer,
)
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from actors.renderer import Ids, Tools, UnrenderableError
from actors.toolcalls import as_text, valid_call
from envs.protocols.canonical import Message, ToolCall

RendererName = Literal["auto", "qwen3", "qwen3.5", "default"]

_QWEN3_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_TOKENS = {
    "qwen3": _QWEN3_TOKENS,
    "qwen3.5": (*_QWEN3_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
}
# "all" keeps the reasoning of earlier turns, as the held ids do; then the bridge has no reason to ask for a fresh
# rendering.
_FAMILIES = {
    "qwen3": Qwen3RendererConfig(thinking_retention="all"),
    "qwen3.5": Qwen35RendererConfig(thinking_retention="all"),
}
_OPENING = "<|im_start|>assistant\n"
"""The one text by which the library itself means marks: it looks for the opening of a turn in a prompt."""
_MARK = "reins-turn-mark"
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""How a template, which is somebody else's program, ends on a conversation that it was not written for."""


class Rendering:
    """Renders, extends and parses. Stateless between calls; safe to share between sessions."""

    def __init__(self, folder: Path, renderer: RendererName = "auto") -> None:
        """Load the tokenizer in ``folder``.

        ``auto`` takes the first family's renderer that gives the same ids as the tokenizer's own chat template
        on a probe conversation (Qwen3's, where there is no template but all of its tokens), else the template.

        Raises ``ValueError`` when the named renderer does not fit the tokenizer.
        """
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.name = _choose(self.tokenizer) if renderer == "auto" else renderer
        if self.name in _FAMILIES:
            _require_tokens(self.tokenizer, folder, self.name)
            self._encoder: Any = _Plain(self.tokenizer)
            self._renderer: Renderer = create_renderer(self._encoder, _FAMILIES[self.name])
        else:
            if not self.tokenizer.chat_template:
                raise ValueError(
                    f"{folder}: got a tokenizer without a chat template, expected one; add "
                    "chat_template.jinja to the folder or choose renderer: qwen3"
                )
            parser = "qwen3" if _has_tokens(self.tokenizer, ("<tool_call>", "</tool_call>")) else None
            self._encoder = self.tokenizer
            self._renderer = create_renderer(self.tokenizer, DefaultRendererConfig(tool_parser=parser))
        self.stop_ids: tuple[int, ...] = _stop_ids(folder, self._renderer)
        self._stops = frozenset(self.stop_ids)

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The prompt of a conversation from nothing, up to where the policy's turn begins.

        Raises ``UnrenderableError`` when the chat template refuses the conversation.
        """
        return self._render([_wire(message) for message in messages], tools, opening=True)

    def extend(
        self, prompt_ids: Ids, sampled_ids: Sequence[int], new: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """The ids that follow ``prompt_ids + sampled_ids`` when ``new`` messages come after that turn.

        ``new`` may hold assistant turns that the policy did not sample, which are rendered as text, and may be
        empty: the policy then begins another turn. None when the tail cannot be rendered alone.
        """
        tail: list[int] = []
        turn = self._turn(prompt_ids)
        sampled = list(sampled_ids)
        run: list[Message] = []
        for message in new:
            if message.role != "assistant":
                run.append(message)
                continue
            bridged = self._bridge(turn, sampled, run, tools)
            body = self._assistant_body(message)
            if bridged is None or body is None:
                return None
            tail += bridged + body
            turn, sampled, run = self._turn(bridged), body, []
        bridged = self._bridge(turn, sampled, run, tools)
        return None if bridged is None else tail + bridged

    def parse(self, sampled_ids: Sequence[int], prompt_ids: Ids, tools: Tools = ()) -> tuple[Message, bool]:
        """The decoded copy of a completion, and whether it could be read without a doubt.

        Never raises: a tool call that cannot be parsed stays in the text as the policy wrote it, and the
        second value is False. Tool-call ids are empty; the session mints them.
        """
        try:
            parsed = self._renderer.parse_response(
                list(sampled_ids), tools=list(tools) or None, prompt_ids=self._turn(prompt_ids)
            )
        except Exception:
            # What a policy can sample has no bounds (nesting, digits); the text is always an answer.
            return Message("assistant", self.decode(sampled_ids)), False
        calls, broken = [], []
        for attempt in parsed.tool_calls:
            call = valid_call(attempt, tools)
            if call is None:
                broken.append(as_text(attempt))
            else:
                calls.append(call)
        text = "\n".join(part for part in (parsed.content, *broken) if part)
        message = Message("assistant", text, reasoning=parsed.reasoning_content or "", tool_calls=tuple(calls))
        return message, not broken and parsed.reasoning_complete is not False

    def _render(self, messages: list[dict[str, Any]], tools: Tools, opening: bool) -> list[int]:
        try:
            return self._renderer.render_ids(
                messages,
                tools=list(tools) or None,
                add_generation_prompt=opening,
            )
        except _TEMPLATE_FAULTS as error:
            raise UnrenderableError(f"the policy's chat template refuses this: {error}") from error

    def _turn(self, prompt_ids: Ids) -> list[int]:
        """The opening of the turn that a prompt ends with: all a renderer looks at, so cost stays flat."""
        start = len(prompt_ids)
        while start > 0 and prompt_ids[start - 1] not in self._stops:
            start -= 1
        return [int(i) for i in prompt_ids[start:]]

    def _bridge(self, turn: list[int], sampled: list[int], new: list[Message], tools: Tools) -> list[int] | None:
        """The end of a turn that was cut, ``new`` messages, and the opening of the policy's next turn."""
        if not new:
            return self._next_turn(turn, sampled, tools)
        if self.name == "default":
            return self._template_tail(sampled, new, tools)
        closed = bool(sampled) and sampled[-1] in self._stops
        # A turn that ended with its stop id is over whatever stands in it (an unclosed <think>, say), so the
        # renderer sees only its end; a turn that was cut is shown whole, opening and all, for it to close.
        shown = sampled[-1:] if closed else sampled
        head = turn if turn and not closed else [self.stop_ids[0]]
        bridged = self._renderer.bridge_to_next_turn(
            head,
            shown,
            [_wire(message) for message in new],
            tools=list(tools) or None,
        )
        held = head + shown
        if bridged is None or bridged.token_ids[: len(held)] != held:
            return None
        return bridged.token_ids[len(held) :]

    def _next_turn(self, turn: list[int], sampled: list[int], tools: Tools) -> list[int] | None:
        """The opening of a turn that comes right after the policy's own: what follows a message in between."""
        bridged = self._bridge(turn, sampled, [Message("user", ".")], tools)
        if bridged is None:
            return None
        ends = [i for i, token in enumerate(bridged) if token in self._stops]
        closer = [] if sampled and sampled[-1] in self._stops else bridged[: ends[0] + 1]
        return closer + bridged[ends[-1] + 1 :] if ends else None

    def _template_tail(self, sampled: list[int], new: list[Message], tools: Tools) -> list[int] | None:
        """The tail cut out of a stand-in conversation that the tokenizer's own template renders."""
        calls = tuple(ToolCall(m.tool_call_id, m.name or "tool", {}) for m in new if m.role == "tool")
        before = (Message("user", "."), Message("assistant", _MARK, tool_calls=calls))
        messages = [_wire(message) for message in (*before, *new)]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except _TEMPLATE_FAULTS:
            return None
        mark = text.find(_MARK)
        closers = {self.tokenizer.convert_ids_to_tokens(i): i for i in self.stop_ids}
        ends = sorted((text.find(closer, mark), closer) for closer in closers if text.find(closer, mark) >= 0)
        if mark < 0 or not ends:
            return None
        at, closer = ends[0]
        nth = text.count(closer, 0, at) + 1
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        places = [i for i, token in enumerate(ids) if token == closers[closer]]
        if len(places) < nth:
            return None
        tail = ids[places[nth - 1] + 1 :]
        return tail if sampled and sampled[-1] in self._stops else [closers[closer], *tail]

    def _assistant_body(self, message: Message) -> list[int] | None:
        """The ids of a foreign assistant turn as it stands inside a history, up to its stop id."""
        around: dict[str, Any] = {"role": "user", "content": "."}
        try:
            opening = self._render([around], (), opening=True)
            whole = self._render([around, _wire(message), around], (), opening=False)
        except UnrenderableError:
            return None
        if whole[: len(opening)] != opening:
            return None
        for i in range(len(opening), len(whole)):
            if whole[i] in self._stops:
                return whole[len(opening) : i + 1]
        return None

    def spoken(self, message: Message, cut: bool = False) -> list[int]:
        """The ids of an answer that came as words, as if the policy had given it: with a stop id, unless it was cut.

        There are ids for every answer: of its bare text, where the chat template refuses it.
        """
        # Inside a history a turn has no reasoning, and at its end an empty one that nobody gave.
        body = None if message.reasoning else self._assistant_body(message)
        if body is not None:
            return body[:-1] if cut else body
        around: dict[str, Any] = {"role": "user", "content": "."}
        text = _bare(message)
        try:
            opening = self._render([around], (), opening=True)
            whole = self._render([around, _wire(message)], (), opening=False)
        except UnrenderableError:
            opening, whole = [], []
        ends = [i for i in range(len(whole)) if whole[i] in self._stops]
        # By text, not by ids: the opening may end inside a token of the whole turn.
        before, turn = self.decode(opening), self.decode(whole[: ends[-1]] if ends else whole)
        if whole and turn.startswith(before):
            text = turn.removeprefix(before)
        ids = self._encoder.encode(text, add_special_tokens=False)
        return ids if cut else [*ids, *self.stop_ids[:1]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the stop id that ends it; other special tokens as they are written."""
        kept = list(ids[:-1]) if ids and ids[-1] in self._stops else list(ids)
        return self.tokenizer.decode(kept, skip_special_tokens=False)


class _Plain:
    """A fast tokenizer with the few methods a renderer needs, straight to its Rust half.

    Without character offsets, which nothing here reads: they cost three quarters of the time of encoding. Special
    tokens that are spelled out in a text are text: a renderer sets its own by their ids, and what a user or a tool
    says must not end a turn and begin another.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._marked = tokenizer.backend_tokenizer
        self._rust = Tokenizer.from_str(self._marked.to_str())
        self._rust.encode_special_tokens = True

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if text == _OPENING:
            return self._marked.encode(text, add_special_tokens=add_special_tokens).ids
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._rust.token_to_id(token)


def _wire(message: Message) -> dict[str, Any]:
    """A message as the ``renderers`` library and chat templates take it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
        if message.name:
            wire["name"] = message.name
    return wire


def _bare(message: Message) -> str:
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.text, *calls) if part)


def _has_tokens(tokenizer: Any, tokens: Sequence[str]) -> bool:
    known = tokenizer.get_vocab()
    return all(token in known for token in tokens)


def _require_tokens(tokenizer: Any, folder: Path, name: str) -> None:
    missing = [token for token in _TOKENS[name] if not _has_tokens(tokenizer, (token,))]
    if missing:
        raise ValueError(
            f"{folder}: got a tokenizer without {', '.join(missing)}, expected the tokens of {name}; choose "
            "renderer: default to use the tokenizer's own chat template"
        )


def _stop_ids(folder: Path, renderer: Renderer) -> tuple[int, ...]:
    """The renderer's stop ids and those of ``generation_config.json``, without repetition."""
    ids = list(renderer.get_stop_token_ids())
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids += more if isinstance(more, list) else [] if more is None else [more]
    return tuple(dict.fromkeys(ids))


def _choose(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        return "qwen3" if _has_tokens(tokenizer, _TOKENS["qwen3"]) else "default"
    function = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": {"a": "b"}}}
    probe = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "r"},
    ]
    try:
        own = tokenizer.apply_chat_template(
            probe, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError:
        return "default"
    for name, config in _FAMILIES.items():
        if _has_tokens(tokenizer, _TOKENS[name]):
            mine = create_renderer(tokenizer, config).render_ids(probe, tools=tools, add_generation_prompt=True)
            if mine == list(own):
                return name
    return "default"
