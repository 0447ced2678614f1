import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tree_sessions import relaxed

from trees import columns


@relaxed
@given(
    arrays(np.int64, st.integers(0, 30))
    | arrays(np.uint8, st.integers(0, 30))
    | arrays(np.int64, st.integers(100, 150), elements=st.integers(0, 300), fill=st.just(7))
    | arrays(np.int64, st.integers(100, 150), elements=st.integers(-130, 2**62), fill=st.just(-3))
)
def test_integers_are_exact(values):
    assert columns.unpack_ints(columns.pack_ints(values)).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ([0, 255], 1),
        ([-128, 127], 1),
        ([0, 256], 2),
        ([0, 65535], 2),
        ([70000, 5], 4),
        (list(range(100, 600)), 1),
        ([2**40, 2**41], 8),
        (list(range(0, 200000, 200)), 1),
    ],
)
def test_integers_take_the_smallest_type(values, width):
    packed = columns.pack_ints(values)
    assert sum(len(part) for part in packed if isinstance(part, bytes)) == width * len(values)
    assert columns.unpack_ints(packed).tolist() == values


@pytest.mark.parametrize("rare", [65536, 151_000])
def test_a_few_large_ids_do_not_widen_the_others(rare):
    values = [*range(0, 60000, 7), rare, 5, rare]
    kind, is_delta, data, outliers = columns.pack_ints(np.random.default_rng(0).permutation(values))
    assert (len(data), is_delta) == (2 * len(values), False)
    assert columns.unpack_ints(outliers).tolist() == [rare, rare]
    assert columns.unpack_ints([kind, is_delta, data, outliers]).max() == rare


def test_texts_are_held_once():
    texts = ["main", "", "é", "main", "main"]
    packed = columns.pack_texts(texts)
    assert packed[0] == ["main", "", "é"]
    assert columns.unpack_texts(packed) == texts


@pytest.mark.parametrize(
    ("unpack", "packed", "message"),
    [
        (columns.unpack_ints, [7, False, b""], "got type 7"),
        (columns.unpack_ints, [-1, False, b""], "got type -1"),
        (columns.unpack_ints, [0, False, b"", [0, False, b""], [0, False, b""]], "2 columns of outliers"),
        (columns.unpack_ints, [0, False, b"\xff\xff\xff", [0, False, b"\x01\x02"]], "2 input values"),
        (columns.unpack_ints, [1, False, b"\x00"], "multiple of element size"),
        (columns.unpack_texts, [["a"], columns.pack_ints([0, 1])], "places from 0 to 1, expected 0 to 0"),
        (columns.unpack_texts, [["a"], columns.pack_ints([-1])], "places from -1 to -1"),
        (columns.unpack_texts, [["a", 3], columns.pack_ints([0])], "expected strings"),
        (columns.unpack_runs, [columns.pack_ints([1]), columns.pack_ints([2**31])], "expected 32-bit ones"),
        (columns.unpack_runs, [columns.pack_ints([2, -1]), columns.pack_ints([5])], "pieces of 0 or more"),
        (columns.unpack_runs, [columns.pack_ints([2**62, 2**62]), columns.pack_ints([5])], "got 1 values, expected 9"),
    ],
)
def test_what_was_not_packed_is_refused(unpack, packed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        unpack(packed)


def test_flags_of_another_number_are_refused_before_memory_is_taken_for_them():
    with pytest.raises(ValueError, match="got 1 bytes of flags, expected 125000000000"):
        columns.unpack_flags(b"\x01", 10**12)
