"""A window and attention sinks, against the sentence that defines them."""

import pytest
import torch

from hf_kvplus import CacheConfigError, PagedCache, SlidingPagedCache
from hf_kvplus.retention import LayerState
from hf_kvplus.retention.sliding import Sliding


def sees(query: int, position: int, first: int, window: int, sinks: int) -> bool:
    """A query sees itself, the `window - 1` tokens before it, and the first `sinks` of its row."""
    return position > query - window or position < first + sinks


WINDOWS = [(1, 0), (1, 4), (10, 0), (10, 3), (64, 4), (1000, 1)]


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_select_keeps_what_the_next_query_sees(window, sinks):
    positions = torch.arange(90, dtype=torch.int32).expand(3, 2, -1).clone()
    positions[:, :, 20:30] = -1  # slots of earlier evictions
    first = torch.tensor([0, 7, 60])
    positions = positions.masked_fill(positions < first[:, None, None], -1)
    state = LayerState(positions, 95, first, 5, lambda: pytest.fail("needs no keys"), torch.arange(3))
    keep = Sliding(window, sinks).select(state)
    assert keep.shape == positions.shape
    for row in range(3):
        for slot, position in enumerate(positions[row, 0].tolist()):
            if position >= 0:
                expected = sees(95, position, int(first[row]), window, sinks)
                assert keep[row, :, slot].tolist() == [expected] * 2


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize("queries", [[95], [93, 94, 95], list(range(70, 96))])
def test_visible_is_the_same_sentence_for_every_query(window, sinks, queries):
    positions = torch.tensor(
        [0, 1, 2, 3, 7, 8, 9, 10, 11, 40, 60, 61, 64, 80, 84, 85, 86, 90, 94, 95], dtype=torch.int32
    )
    first = torch.tensor([0, 7, 60])
    shown = Sliding(window, sinks).visible(torch.tensor(queries), positions.expand(3, 1, -1), first)
    assert shown.shape == (3, 1, len(queries), len(positions))
    for row in range(3):
        for q, query in enumerate(queries):
            expected = [sees(query, p, int(first[row]), window, sinks) for p in positions.tolist()]
            # what lies before a row's first token is padding: other masks hide it
            own = positions >= first[row]
            assert torch.equal(shown[row, 0, q][own], torch.tensor(expected)[own])


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_capacity_is_what_one_query_sees(window, sinks):
    for seen in (1, 5, 12, 13, 14, 67, 68, 69, 2000):
        most = sum(sees(seen - 1, position, 0, window, sinks) for position in range(seen))
        assert most <= Sliding(window, sinks).capacity(seen) <= min(seen, most + sinks)


@pytest.mark.parametrize(("argument", "value"), [
    ("window", 0), ("window", -3), ("window", 2.5), ("window", "64"), ("window", True), ("window", None),
    ("sink_tokens", -1), ("sink_tokens", 1.0), ("sink_tokens", False),
])  # fmt: skip
def test_arguments_that_are_refused(argument, value):
    for build in (Sliding, lambda **options: PagedCache(retention="sliding", **options), SlidingPagedCache):
        with pytest.raises(CacheConfigError, match=rf"`{argument}`: got .*, accepted: a whole number of tokens from"):
            build(**{argument: value})
