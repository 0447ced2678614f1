"""Continuous batching over slots, synchronous and single-threaded.

Invariant: rows ``[0, decoding)`` run and have one token to feed, rows ``[decoding, running)`` run and
have more (they are prefilled), rows ``[running, used)`` are idle prefixes. So both kinds of forward
call read contiguous rows and copy none.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.base import EngineStats, Generate, Generated, Piece
from actors.engines.sampling import draw
from actors.engines.slots import Slots, cache_keyword
from trees.record import Finish, VersionSpan

WORTH_WAITING = 16
"""Tokens that a request must save to wait until another one has computed them."""


@dataclass(slots=True, eq=False)
class Running:
    """A request on its way. ``deliver`` is called once, in the model's thread."""

    request: Generate
    deliver: Callable[[Generated | Exception], None]
    prompt: np.ndarray
    random: np.random.Generator | None
    progress: Callable[[Piece], None] | None = None
    """Called with every token, in the model's thread, where somebody listens."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it sampled), in order."""
    cached: int | None = None
    """Prompt tokens that were in the cache when it was first admitted; None before."""
    row: int = -1

    def tokens(self) -> np.ndarray:
        """Prompt and sampled ids, int32."""
        return np.concatenate([self.prompt, np.asarray(self.ids, np.int32)])

    def finish(self, finish: Finish) -> None:
        # A request that ends before its first token has no span.
        ends = [*(start for _, start in self.starts), len(self.ids)][1:]
        spans = tuple(VersionSpan(v, s, e) for (v, s), e in zip(self.starts, ends, strict=True))
        self.deliver(Generated(self.ids, self.logprobs, finish, spans, self.cached or 0))


class Batch:
    """All methods are for one thread, under ``torch.inference_mode``.

    ``chunk`` bounds the tokens, padding included, of one prefill call, so that a long prompt does not
    hold up the rows that decode.
    """

    def __init__(self, model: PreTrainedModel, *, version: int, slots: int, max_len: int, chunk: int) -> None:
        self.model, self.version, self.chunk, self.max_len = model, version, chunk, max_len
        self.slots = Slots(model, slots, max_len)
        self.cache_keyword = cache_keyword(model)
        self.capacity = slots
        self.waiting: deque[Running] = deque()
        self.decoding = 0
        self.running = 0
        self.rows: list[Running | None] = [None] * slots
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.last_used = np.zeros(slots, np.int64)
        self.clock = 0
        self.paused = False
        self.random = np.random.default_rng()
        self.count: Counter[str] = Counter()
        self.busy_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return not self.paused and bool(self.running or self.waiting)

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def add(self, entry: Running) -> None:
        self.waiting.append(entry)

    def abort(self, picks: Callable[[Running], bool]) -> None:
        """End every request that ``picks`` names; each is delivered with what it has sampled."""
        for entry in [e for e in self.waiting if picks(e)]:
            self.waiting.remove(entry)
            entry.finish("abort")
        for entry in [e for e in self.rows[: self.running] if e is not None and picks(e)]:
            self._release(entry.row)
            entry.finish("abort")

    def swap_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy checked ``tensors`` into the model. Every cached key and value is forgotten; what runs is
        admitted again with all its tokens, ahead of what waits, so that shared beginnings are fed once.
        """
        held = self.model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            held[name].data.copy_(tensor)
        self.count["weight_loads"] += 1
        self.count["weight_rollbacks"] += version <= self.version
        self.version = version
        self.count["forgotten_tokens"] += int(self.slots.length[: self.running].sum())
        self.waiting.extendleft(reversed(self._clear()))

    def fail(self, error: Exception) -> None:
        """Deliver ``error`` to every running request and start again with empty slots."""
        for entry in self._clear():
            entry.deliver(error)

    def _clear(self) -> list[Running]:
        """Empty all slots; returns what ran."""
        entries = [entry for entry in self.rows if entry is not None]
        self.rows = [None] * self.capacity
        self.running = self.decoding = self.slots.used = 0
        self.slots.length[:] = 0
        self.slots.known[:] = 0
        return entries

    def end(self, error: Exception) -> None:
        """Deliver ``error`` to all requests, waiting ones too."""
        self.fail(error)
        while self.waiting:
            self.waiting.popleft().deliver(error)

    def step(self) -> None:
        """Admit what fits, feed one prefill chunk, and decode one token for every row that is ready."""
        if self.paused:
            return
        began = time.perf_counter()
        self._admit()
        if self.running > self.decoding:
            self._prefill()
        if self.decoding:
            self._decode()
        self.busy_s += time.perf_counter() - began

    def stats(self) -> EngineStats:
        c = self.count
        own = ("prefill_tokens", "cached_tokens", "decode_tokens", "decode_steps")
        extra = {name: float(value) for name, value in c.items() if name not in own}
        extra["cache_bytes"] = float(self.slots.data.nbytes)
        return EngineStats(
            version=self.version,
            running=self.running,
            waiting=len(self.waiting),
            prefill_tokens=c["prefill_tokens"],
            cached_tokens=c["cached_tokens"],
            decode_tokens=c["decode_tokens"],
            decode_steps=c["decode_steps"],
            busy_s=self.busy_s,
            extra=extra,
        )

    def _admit(self) -> None:
        deferred: list[Running] = []
        while self.waiting and self.running < self.capacity:
            entry = self.waiting[0]
            if not self._place(entry):
                deferred.append(entry)
            self.waiting.popleft()
        self.waiting.extendleft(reversed(deferred))

    def _place(self, entry: Running) -> bool:
        """Give ``entry`` a row with the longest cached prefix; False when waiting for another row pays."""
        slots, tokens = self.slots, entry.tokens()
        size = len(tokens)
        row, cached = slots.used, 0
        if slots.used:
            common, length = slots.match(tokens), slots.length[: slots.used]
            # The last token is always fed: its logits give the next one.
            matched = np.minimum(common, size - 1)
            ready = np.minimum(matched, length)
            whole = (ready > 0) & (common >= length)
            whole[: self.running] = False
            row = int((2 * ready + whole).argmax())
            cached = int(ready[row])
            if matched[: self.running].max(initial=0) >= cached + WORTH_WAITING:
                return False
            if not whole[row]:
                source, row = row, self._free_row()
                if row != source and cached:
                    slots.reserve(max(slots.used, row + 1), cached)
                    slots.copy_prefix(source, row, cached)
                    self.count["copied_tokens"] += cached
        slots.used = max(slots.used, row + 1)
        slots.reserve(slots.used, size + 1)
        slots.tokens[row, :size] = tokens
        slots.length[row], slots.known[row] = cached, size
        self.rows[row], entry.row = entry, row
        self.temperature[row], self.top_p[row] = entry.request.temperature, entry.request.top_p
        self.count["cached_tokens"] += cached
        if entry.cached is None:
            entry.cached = cached
            self.count["requests"] += 1
        self._swap(row, self.running)
        self.running += 1
        if size - cached == 1:
            self.count["prefill_tokens"] += 1
            self._promote(self.running - 1)
        return True

    def _free_row(self) -> int:
        """A row never used, else the idle one that was used longest ago."""
        slots = self.slots
        if slots.used < self.capacity:
            return slots.used
        row = self.running + int(self.last_used[self.running : slots.used].argmin())
        self.count["evictions"] += bool(slots.length[row])
        return row

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.slots.swap(a, b)
        for array in (self.temperature, self.top_p, self.last_used):
            array[[a, b]] = array[[b, a]]
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        for row in (a, b):
            entry = self.rows[row]
            if entry is not None:
                entry.row = row

    def _promote(self, row: int) -> None:
        self._swap(row, self.decoding)
        self.decoding += 1

    def _release(self, row: int) -> None:
        """Turn a running row into an idle prefix of what is cached."""
        if row < self.decoding:
            self.decoding -= 1
            self._swap(row, self.decoding)
            row = self.decoding
        self.running -= 1
        self._swap(row, self.running)
        row = self.running
        self.rows[row] = None
        self.clock += 1
        self.last_used[row] = self.clock
        self.slots.known[row] = self.slots.length[row]

    def _prefill(self) -> None:
        slots, first = self.slots, self.decoding
        pending = (slots.known - slots.length)[first : self.running]
        take = np.minimum(pending, self.chunk)
        # Padded cost of the first 1, 2, ... rows; at least one row always goes.
        cost = np.maximum.accumulate(take) * np.arange(1, len(take) + 1)
        rows = max(1, int((cost <= self.chunk).sum()))
        take = take[:rows]
        span = slice(first, first + rows)
        logits = self._forward(span, take)
        self.count["prefill_tokens"] += int(take.sum())
        self.count["prefill_steps"] += 1
        done = (take == pending[:rows]).nonzero()[0]
        if not len(done):
            return
        entries = [self.rows[first + i] for i in done.tolist()]
        self._sample(logits if len(done) == rows else logits[torch.from_numpy(done)], first + done)
        # Those that ended are idle now; an entry that still runs has kept or changed its row.
        for entry in entries:
            if entry is not None and entry.row >= 0:
                self._promote(entry.row)

    def _decode(self) -> None:
        rows = self.decoding
        logits = self._forward(slice(0, rows), np.ones(rows, np.int64))
        self.count["decode_steps"] += 1
        self._sample(logits, np.arange(rows))

    def _forward(self, span: slice, take: np.ndarray) -> torch.Tensor:
        """Feed the next ``take`` tokens of the rows; logits [rows, vocabulary] after the newest of each."""
        ids, positions, mask = self.slots.feed(span, take)
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_keyword: self.slots},
        )
        self.slots.length[span] += take
        return out.logits[:, -1]

    def _sample(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Draw the next token of ``rows`` (ascending) and release those that it ends."""
        slots, device = self.slots, logits.device
        entries = [self.rows[row] for row in rows.tolist()]
        uniform = self.random.random(len(rows))
        for i, entry in enumerate(entries):
            if entry is not None and entry.random is not None:
                uniform[i] = entry.random.random()
        ids, logprobs = draw(
            logits,
            torch.from_numpy(self.temperature[rows]).to(device),
            torch.from_numpy(self.top_p[rows]).to(device),
            torch.from_numpy(uniform).to(device),
        )
        if not bool(torch.isfinite(logprobs).all()):
            raise FloatingPointError(
                f"got log-probabilities that are not finite under policy version {self.version}, "
                f"expected finite ones; load weights that have not diverged"
            )
        slots.reserve(slots.used, int(slots.known[rows].max()) + 1)
        slots.tokens[rows, slots.known[rows]] = ids.cpu().numpy()
        slots.known[rows] += 1
        self.count["decode_tokens"] += len(rows)
        ended: list[tuple[Running, Finish]] = []
        for entry, token, logprob in zip(entries, ids.tolist(), logprobs.tolist(), strict=True):
            if entry is None:
                continue
            if not entry.starts or entry.starts[-1][0] != self.version:
                entry.starts.append((self.version, len(entry.ids)))
            entry.ids.append(token)
            entry.logprobs.append(logprob)
            if entry.progress is not None:
                span = (VersionSpan(self.version, 0, 1),)
                entry.progress(Piece([token], [logprob], span, cached_tokens=entry.cached or 0))
            if token in entry.request.stop_ids:
                ended.append((entry, "stop"))
            elif len(entry.ids) == entry.request.max_tokens or len(entry.prompt) + len(entry.ids) == self.max_len:
                ended.append((entry, "length"))
        # From the back, so that a release moves no row that is still to be released.
        for entry, finish in reversed(ended):
            self._release(entry.row)
            entry.row = -1
            entry.finish(finish)
