"""Random and hand-made sessions for the tests of trees."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from trees.build import TreeBuilder
from trees.record import CallRecord, VersionSpan
from trees.tree import Tree

KINDS = ("main", "subagent", "compaction", "after-compaction", "side")
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For property tests on machines whose cores are shared with others."""


def call(ordinal, parent=None, prompt=(), sampled=(), **fields) -> CallRecord:
    """A record named ``c<ordinal>``; its log-probabilities and version follow from its ordinal."""
    fields.setdefault("versions", (VersionSpan(ordinal, 0, len(sampled)),) if len(sampled) else ())
    fields.setdefault("logprobs", -(np.arange(len(sampled), dtype=np.float32) + 1) / (ordinal + 3))
    return CallRecord(
        session="s",
        call=f"c{ordinal}",
        parent=None if parent is None else f"c{parent}",
        ordinal=ordinal,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        temperature=fields.pop("temperature", 1.0),
        finish=fields.pop("finish", "stop"),
        **fields,
    )


def grow(*records: CallRecord) -> Tree:
    builder = TreeBuilder("s")
    for record in records:
        builder.add(record)
    return builder.tree()


def full_prompts(records) -> dict[str, list[int]]:
    """The whole prompt of each call, by the contract of the record and nothing else."""
    by_call = {record.call: record for record in records}

    def through(name):
        record = by_call[name]
        before = through(record.parent) if record.parent else []
        return before + record.prompt_ids.tolist() + record.sampled_ids.tolist()

    return {
        name: (through(record.parent) if record.parent else []) + record.prompt_ids.tolist()
        for name, record in by_call.items()
    }


@st.composite
def _spans(draw, length):
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=2))) if length else []
    edges = [0, *cuts, length]
    versions = draw(st.lists(st.integers(0, 2**20), min_size=len(edges), max_size=len(edges)))
    return tuple(
        VersionSpan(version, start, end)
        for version, start, end in zip(versions, edges, edges[1:], strict=False)
        if end > start
    )


@st.composite
def sessions(draw, max_calls=9):
    """Records whose tails are short words over three tokens, so that they share and split often."""
    records = []
    token = st.one_of(st.integers(0, 2), st.integers(0, 2**31 - 1)) if draw(st.booleans()) else st.integers(0, 2)
    for ordinal in range(draw(st.integers(0, max_calls))):
        sampled = draw(st.lists(token, max_size=3))
        records.append(
            call(
                ordinal,
                draw(st.one_of(st.none(), st.integers(0, ordinal - 1))) if ordinal else None,
                draw(st.lists(token, max_size=5)),
                sampled,
                logprobs=np.array(
                    draw(st.lists(st.floats(-1e3, 0.0, width=32), min_size=len(sampled), max_size=len(sampled))),
                    np.float32,
                ),
                versions=draw(_spans(len(sampled))),
                temperature=draw(st.sampled_from([0.0, 0.6, 1.0])),
                finish=draw(st.sampled_from(["stop", "stop", "length", "abort"])),
                kind=draw(st.sampled_from(KINDS)),
                fork=draw(st.sampled_from(["", "retry", "reply dropped", "history edited", "tools changed"])),
                why=draw(st.sampled_from(["", "agent header"])),
                drift=draw(st.integers(0, 9)),
                clean=draw(st.booleans()),
                extra=draw(st.sampled_from([{}, {"é": 1.5}])),
            )
        )
    return records


def dump(tree: Tree) -> list:
    """Everything in a tree as plain values, floats by their bits."""
    return [
        tree.meta,
        [
            (
                node.id,
                node.parent,
                node.ids.dtype,
                node.ids.tolist(),
                node.sampled,
                node.logprobs.dtype,
                node.logprobs.tobytes(),
                node.versions,
                node.temperature,
                (node.call, node.ordinal, node.kind, node.why, node.fork, node.drift),
                (node.finish, node.clean, node.trained, node.reason),
            )
            for node in tree.nodes
        ],
    ]


def path_of(packed, token):
    """Places of the tokens on the path of one, by its predecessors."""
    places = []
    while token >= 0:
        places.append(token)
        token = int(packed.before[token])
    return places[::-1]


@st.composite
def deep_sequences(draw, vocabulary=64):
    """Ids of the paths of a tree of up to 12 runs in depth and 6 branches at a fork, runs of 0 to 5 tokens."""
    paths, depths, branches = [[]], [0], [0]
    run = st.one_of(st.just([]), st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=1), _run(vocabulary))
    for _ in range(draw(st.integers(1, 40))):
        open_ = [i for i in range(len(paths)) if depths[i] < 12 and branches[i] < 6]
        parent = open_[-draw(st.integers(1, min(4, len(open_))))]
        branches[parent] += 1
        paths.append(paths[parent] + draw(run))
        depths.append(depths[parent] + 1)
        branches.append(0)
    ends = [path for path, below in zip(paths, branches, strict=True) if path and (not below or draw(st.booleans()))]
    return [np.array(path, np.int32) for path in ends or [[0]]]


def _run(vocabulary):
    return st.lists(st.integers(0, vocabulary - 1), min_size=2, max_size=5)
