import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.token_path import TokenPath

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=2000)


@given(st.lists(st.tuples(st.integers(0, 10**6), IDS), max_size=12))
def test_every_path_stays_what_it_was(steps):
    """Any path may be extended any number of times, in any order."""
    paths, expected = [TokenPath()], [[]]
    for which, new in steps:
        which %= len(paths)
        paths.append(paths[which].then(new))
        expected.append(expected[which] + new)
    for path, ids in zip(paths, expected, strict=True):
        assert (path.ids.tolist(), len(path), path.ids.dtype) == (ids, len(ids), np.int32)


def test_the_first_extension_copies_nothing_and_ids_are_not_written_to():
    path = TokenPath([1, 2])
    assert np.shares_memory(path.then([3]).ids, path.ids)
    assert not np.shares_memory(path.then([4]).ids, path.ids)
    assert not path.ids.flags.writeable
