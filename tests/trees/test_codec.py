import io
import itertools
import tracemalloc
from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tree_sessions import call, dump, grow, relaxed, sessions

from trees import codec, frames
from trees.codec import CodecError
from trees.filters import apply
from trees.record import CallRecord
from trees.tree import Tree

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
SMALL = grow(call(0, None, [1, 2], [3]), call(1, 0, [4], [5, 6]))
OTHER = grow(call(0, None, [1, 2, 7], [8]))
START = 35


def facts(record: CallRecord) -> list:
    values = [getattr(record, field.name) for field in fields(record)]
    return [(v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]


def signed(*bodies: bytes, kind: int = frames.TREE) -> bytes:
    """Frames with right lengths and digests around any bodies."""
    return b"".join(frames.pack(kind, bodies, 1))


def noise(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60000, size).tolist()


@relaxed
@given(sessions(), st.dictionaries(st.text(max_size=5), PLAIN, max_size=3), st.integers(1, 3))
def test_a_tree_comes_back_bit_by_bit(records, meta, max_leaves):
    for tree in (grow(*records), apply(grow(*records), max_leaves)[0]):
        tree.meta.update(meta)
        assert dump(codec.decode(codec.encode(tree))) == dump(tree)


@relaxed
@given(st.lists(sessions(max_calls=4), min_size=1, max_size=4))
def test_a_group_comes_back_bit_by_bit(group):
    trees = [grow(*records) for records in group]
    assert [dump(tree) for tree in codec.decode_group(codec.encode_group(trees))] == [dump(tree) for tree in trees]


@relaxed
@given(sessions())
def test_records_come_back_bit_by_bit(records):
    back = codec.decode_records(codec.encode_records(records))
    assert [facts(record) for record in back] == [facts(record) for record in records]


def test_a_record_that_the_builder_would_refuse_still_travels():
    bad = replace(call(0, None, [1], [2, 3]), logprobs=np.zeros(0, np.float32))
    (back,) = codec.decode_records(codec.encode_records([bad]))
    assert facts(back) == facts(bad)


@relaxed
@given(arrays(np.uint32, st.integers(0, 20)))
def test_floats_are_exact_whatever_their_bits(bits):
    tree = _sampled(bits.view(np.float32))
    assert codec.decode(codec.encode(tree)).nodes[1].logprobs.view(np.uint32).tolist() == bits.tolist()


def _sampled(logprobs: np.ndarray) -> Tree:
    node = replace(SMALL.nodes[2], id=1, parent=0, ids=np.zeros(len(logprobs), np.int32), logprobs=logprobs)
    return Tree((SMALL.nodes[0], node))


@relaxed
@given(arrays(np.float32, st.integers(0, 20), elements=st.floats(-65504, 0, width=32)))
def test_half_precision_keeps_the_stated_bound_and_says_so(logprobs):
    tree = _sampled(logprobs)
    data = codec.encode(tree, float16=True)
    back = codec.decode(data)
    kept = back.nodes[1].logprobs
    assert kept.dtype == np.float32
    wide = logprobs.astype(np.float64)
    assert (np.abs(kept - wide) <= np.maximum(2**-11 * np.abs(wide), 2**-25)).all()
    assert dump(codec.decode(codec.encode(back, float16=True))) == dump(back)
    assert [head.float16 for head in codec.heads(io.BytesIO(data + codec.encode(tree)))] == [True, False]


def test_half_precision_leaves_everything_else_exact():
    back = codec.decode_group(codec.encode_group([SMALL, OTHER], float16=True))
    for tree, kept in zip((SMALL, OTHER), back, strict=True):
        restored = [replace(k, logprobs=n.logprobs) for k, n in zip(kept.nodes, tree.nodes, strict=True)]
        assert dump(Tree(tuple(restored), kept.meta)) == dump(tree)


def test_a_log_probability_beyond_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"got log-probability -70000.0, expected at most 65504 off 0"):
        codec.encode(_sampled(np.array([-7e4], np.float32)), float16=True)


@pytest.mark.parametrize(
    ("value", "back"), [(np.float64(0.5), 0.5), (np.int32(3), 3), (np.bool_(True), True), ((1, 2), [1, 2])]
)
def test_meta_takes_scalars_of_numpy_and_tuples(value, back):
    decoded = codec.decode(codec.encode(Tree(SMALL.nodes, {"reward": value}))).meta["reward"]
    assert decoded == back
    assert type(decoded) is type(back)


def test_meta_that_is_not_plain_is_named():
    with pytest.raises(TypeError, match="of type set, expected plain values"):
        codec.encode(Tree(SMALL.nodes, {"x": {1}}))


def test_a_group_stores_what_its_trees_share_once_wherever_it_stands():
    prompt, file = noise(4000, 0), noise(2000, 1)
    group = [
        grow(
            call(0, None, prompt, noise(20, 10 + i)),
            call(1, 0, noise(30 * i, 20 + i), noise(20, 30 + i)),
            call(2, 1, [5, *file, 6], noise(20, 40 + i)),
        )
        for i in range(8)
    ]
    alone = [len(codec.encode(tree)) for tree in group]
    together = len(codec.encode_group(group))
    assert min(alone) > 2 * 6000 * 0.95
    assert together < alone[0] + sum(size - 2 * 6000 * 0.95 for size in alone[1:])


def test_every_truncation_of_one_frame_is_an_error_that_says_what_is_lacking():
    data = codec.encode(SMALL)
    for length in range(1, len(data)):
        with pytest.raises(CodecError, match=rf"got {length if length < START else length - START} bytes.*expected"):
            codec.decode(data[:length])


def test_every_truncation_of_a_file_reads_the_whole_trees_before_it():
    items = [SMALL, [SMALL, OTHER, grow()], grow(call(0, None, [7], [8]))]
    trees = [SMALL, SMALL, OTHER, grow(), items[2]]
    file = io.BytesIO()
    assert codec.write(file, items) == 5
    data = file.getvalue()
    assert [dump(tree) for tree in codec.read(io.BytesIO(data))] == [dump(tree) for tree in trees]
    ends = list(itertools.accumulate(START + head.packed for head in codec.heads(io.BytesIO(data))))
    whole_items = (0, ends[0], ends[3], ends[4])
    for length in range(len(data) + 1):
        whole = sum(end <= length for end in ends)
        got = []
        reading = codec.read(io.BytesIO(data[:length]))
        if length in whole_items:
            got = list(reading)
        else:
            with pytest.raises(CodecError, match=f"after {whole} whole trees, at byte {[0, *ends][whole]}: got"):
                got.extend(reading)
        assert [dump(tree) for tree in got] == [dump(tree) for tree in trees[:whole]]


@pytest.mark.parametrize("data", [codec.encode(SMALL), codec.encode_group([SMALL, OTHER])], ids=["alone", "group"])
def test_every_flipped_byte_is_noticed(data):
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        with pytest.raises(CodecError):
            codec.decode_group(bytes(damaged))


def cut(data: bytes) -> list[bytes]:
    """Frames one by one."""
    sizes = [START + head.packed for head in codec.heads(io.BytesIO(data))]
    ends = [0, *itertools.accumulate(sizes)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 1), "after 2 whole trees, at byte .*: got 2 of a group, expected 3: cut short"),
        ((0, 2, 1), "after 1 whole trees, at byte .*: got number 2 of 3 of a group, expected 1 of 3"),
        ((0, 0, 1, 2), "got number 0 of 3 of a group, expected 1 of 3"),
        ((1, 2), "after 0 whole trees, at byte 0: got number 1 of 3 of a group, expected 0 of 3"),
    ],
)
def test_trees_of_a_group_that_are_left_out_or_moved_are_noticed(order, message):
    parts = cut(codec.encode_group([SMALL, OTHER, SMALL]))
    with pytest.raises(CodecError, match=message):
        list(codec.read(io.BytesIO(b"".join(parts[i] for i in order))))


def test_a_tree_of_another_group_is_noticed():
    one, other = cut(codec.encode_group([SMALL, OTHER])), cut(codec.encode_group([OTHER, OTHER]))
    with pytest.raises(CodecError, match=r"after 1 whole trees, .*digest .* is not the one written"):
        codec.decode_group(one[0] + other[1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got 0 bytes"),
        (b"PK\x03\x04" + bytes(60), r"got b'PK\\x03\\x04', expected b'RNTR'"),
        (codec.encode(SMALL) + b"x", "got 1 bytes after it"),
        (codec.encode(SMALL) * 2, "use read"),
        (codec.encode_group([SMALL, OTHER]), "got a group of 2 trees.*use decode_group"),
        (codec.encode_records([]), "got a frame of kind 2, expected 1"),
        (frames.MAGIC + bytes([1]) + codec.encode(SMALL)[5:], "got format version 1, expected 2"),
    ],
)
def test_what_is_not_one_tree_is_refused(data, message):
    with pytest.raises(CodecError, match=message):
        codec.decode(data)


def test_records_are_not_read_as_trees():
    with pytest.raises(CodecError, match="got a frame of kind 2, expected 1"):
        list(codec.read(io.BytesIO(codec.encode_records([call(0, None, [1], [2])]))))


def test_a_file_can_be_appended_to(tmp_path):
    for _ in range(2):
        with (tmp_path / "trees").open("ab") as file:
            codec.write(file, [SMALL, [OTHER, SMALL]])
    with (tmp_path / "trees").open("rb") as file:
        assert [dump(tree) for tree in codec.read(file)] == [dump(SMALL), dump(OTHER), dump(SMALL)] * 2


def test_decoded_arrays_are_read_only():
    node = codec.decode(codec.encode(SMALL)).nodes[2]
    with pytest.raises(ValueError, match="read-only"):
        node.logprobs[0] = 0


def test_a_group_of_no_trees_is_refused():
    with pytest.raises(ValueError, match="got a group of 0, expected 1 to 65535"):
        codec.encode_group([])


def test_a_tree_that_no_frame_holds_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="for one frame, expected at most 100"):
        codec.encode(SMALL)


def forged(payload: bytes, unpacked: int, place: int = 0, of: int = 1) -> bytes:
    """A frame by somebody who knows the format."""
    head = frames._HEAD.pack(frames.MAGIC, frames.VERSION, frames.TREE, 0, place, of, len(payload), unpacked)
    return head + frames._digest(head, b"", payload) + payload


def test_a_bomb_takes_no_more_memory_than_its_head_states():
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    tracemalloc.start()
    with pytest.raises(CodecError, match=r"unpacks to .* or more bytes, expected 1000"):
        codec.decode(forged(bomb, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (forged(b"", 1 << 31), "got flags 0 and 0 bytes for 2147483648, expected"),
        (forged(b"not zstandard", 5), "cannot be unpacked"),
        (forged(zstandard.compress(b"four"), 5), "unpacks to 4 bytes, expected 5"),
        (forged(zstandard.compress(b"four") * 2000, 4), "cannot be unpacked"),
        (forged(b"", 0, 0, 0), "got number 0 of 0 of a group"),
        (signed(b""), "not what this codec writes"),
        (signed(msgpack.packb([1, 2])), "not what this codec writes"),
        (signed(b"\x91" * 5000), "not what this codec writes"),
    ],
)
def test_forged_frames_are_refused(data, message):
    with pytest.raises(CodecError, match=message):
        codec.decode(data)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, -1, 7, 10**12, 2**62]),
    st.floats(),
    st.binary(max_size=9),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


@st.composite
def _altered(draw, value):
    """A plain value with one part of it replaced, taken out or doubled."""
    places = []

    def visit(inside):
        for i in range(len(inside)):
            places.append((inside, i))
            if isinstance(inside[i], list):
                visit(inside[i])

    visit(value)
    inside, i = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["replaced", "replaced", "out", "doubled"]))
    inside[i : i + 1] = {"replaced": [draw(LEAVES)], "out": [], "doubled": [inside[i]] * 2}[what]
    return value


@relaxed
@given(st.data())
def test_well_signed_nonsense_is_a_codec_error_or_a_tree(data):
    tree = grow(call(0, None, noise(80, 0), [3, 4]), call(1, 0, [70000, 5], [6], kind="side"), call(2, 0, [1], [2]))
    body = msgpack.unpackb(codec._tree_body(tree, "<f4"))
    for _ in range(20):
        forgery = signed(msgpack.packb(data.draw(_altered(msgpack.unpackb(msgpack.packb(body))))))
        try:
            assert isinstance(codec.decode(forgery), Tree)
        except CodecError:
            continue


@relaxed
@given(st.data())
def test_well_signed_nonsense_is_a_codec_error_or_records(data):
    records = codec.encode_records([call(0, None, [1], [2]), call(1, 0, [3, 4], [5, 6], extra={"a": 1})])
    ((_, body),) = frames.unpack(frames.scan(io.BytesIO(records), frames.RECORDS))
    for _ in range(20):
        altered = data.draw(_altered(msgpack.unpackb(body)))
        try:
            back = codec.decode_records(signed(msgpack.packb(altered), kind=frames.RECORDS))
        except CodecError:
            continue
        assert all(isinstance(record, CallRecord) for record in back)


@relaxed
@given(st.data())
def test_bytes_flipped_before_the_digest_was_made_are_a_codec_error_or_a_tree(data):
    payload = bytearray(cut(codec.encode(SMALL))[0][START:])
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        payload[at] ^= data.draw(st.integers(1, 255))
    size = next(codec.heads(io.BytesIO(codec.encode(SMALL)))).unpacked
    try:
        assert isinstance(codec.decode(forged(bytes(payload), size)), Tree)
    except CodecError:
        return
