"""KeyDiff against the paper's formula: the negative cosine similarity to the mean of the normalised keys."""

import math

import pytest
import torch

from hf_kvplus import CacheConfigError, PagedCache, PrunedPagedCache
from hf_kvplus.retention import LayerState
from hf_kvplus.retention.keydiff import KeyDiff


def scores_by_hand(keys: list[list[float]]) -> list[float]:
    """Park et al. 2025, section 3, number by number."""

    def unit(vector):
        length = math.sqrt(sum(x * x for x in vector))
        return [x / length for x in vector]

    normalised = [unit(key) for key in keys]
    anchor = unit([sum(column) / len(keys) for column in zip(*normalised)])
    return [-sum(a * b for a, b in zip(key, anchor)) for key in normalised]


def state_of(keys, positions=None, first=None, recent=0, seen=None):
    rows, heads, n, _ = keys.shape
    positions = torch.arange(n).expand(rows, heads, -1) if positions is None else positions
    first = torch.zeros(rows, dtype=torch.int64) if first is None else first
    return LayerState(positions.int(), seen or n + recent, first, recent, lambda: keys, torch.arange(rows))


def kept(policy, state, row=0, head=0) -> list[int]:
    """Positions that a policy keeps."""
    return state.positions[row, head][policy.select(state)[row, head]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_score_is_the_papers(dtype, scale):
    keys = (torch.randn(2, 3, 40, 8) * torch.rand(2, 3, 40, 1) * scale + 0.3 * scale).to(dtype).float()
    held = torch.ones(2, 3, 40, dtype=torch.bool)
    scores = KeyDiff().score(keys, held)
    for row in range(2):
        for head in range(3):
            expected = torch.tensor(scores_by_hand(keys[row, head].tolist()))
            torch.testing.assert_close(scores[row, head], expected, rtol=1e-5, atol=1e-5)


def test_empty_slots_do_not_count_and_are_not_kept():
    keys = torch.randn(1, 2, 30, 8)
    positions = torch.arange(30).expand(1, 2, -1).clone()
    positions[0, 0, 4::3] = -1
    keys[0, 0, 4::3] = 1e4 * torch.randn(8)
    state = state_of(keys, positions)
    present = (positions[0, 0] >= 0).nonzero().flatten()
    scores = scores_by_hand(keys[0, 0, present].tolist())
    best = sorted(range(len(present)), key=lambda i: -scores[i])[:12]
    assert kept(KeyDiff(12), state) == sorted(int(present[i]) for i in best)
    assert len(kept(KeyDiff(12), state, head=1)) == 12
    assert kept(KeyDiff(100), state) == present.tolist()


def test_the_odd_one_out_is_kept_and_heads_choose_for_themselves():
    keys = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(1, 2, 20, 1) + 0.01 * torch.randn(1, 2, 20, 4)
    keys[0, 0, 7] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    keys[0, 1, 13] = torch.tensor([-5.0, 0.0, 0.0, 0.0])
    assert kept(KeyDiff(1), state_of(keys), head=0) == [7]
    assert kept(KeyDiff(1), state_of(keys), head=1) == [13]
    assert 7 in kept(KeyDiff(5), state_of(keys), head=0)


@pytest.mark.parametrize(("budget", "length", "tokens"), [
    (1, 100, 1), (30, 100, 30), (100, 100, 100), (500, 100, 500),
    (0.5, 100, 50), (0.25, 30, 8), (0.1, 3, 1), (0.99, 10, 10),
])  # fmt: skip
def test_a_budget_is_tokens_or_a_fraction_of_those_seen(budget, length, tokens):
    assert KeyDiff(budget).capacity(length) == tokens


@pytest.mark.parametrize("budget", [12, 0.5])
def test_each_row_has_the_budget_of_its_own_length(budget):
    keys = torch.randn(3, 2, 40, 8)
    first = torch.tensor([0, 10, 36])
    positions = torch.arange(40).expand(3, 2, -1)
    positions = positions.masked_fill(positions < first[:, None, None], -1)
    state = state_of(keys, positions, first)
    for row in range(3):
        own = 40 - int(first[row])
        wanted = min(own, 12) if budget == 12 else own // 2
        assert [len(kept(KeyDiff(budget), state, row, head)) for head in range(2)] == [wanted] * 2
        alone = state_of(keys[row : row + 1, :, first[row] :])
        assert [p + int(first[row]) for p in kept(KeyDiff(budget), alone)] == kept(KeyDiff(budget), state, row)


@pytest.mark.parametrize(("recent", "left"), [(0, 20), (5, 15), (20, 0), (30, 0)])
def test_recent_tokens_take_their_part_of_the_budget(recent, left):
    state = state_of(torch.randn(2, 2, 50, 8), recent=recent)
    assert KeyDiff(20).select(state).sum(-1).tolist() == [[left] * 2] * 2


def test_everything_that_is_stored_is_visible():
    assert KeyDiff().visible(torch.arange(3), torch.zeros(1, 1, 5), torch.zeros(1)) is None


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.0, 1.5, -0.5, "64", True, None, float("nan")])
def test_arguments_that_are_refused(value):
    for build in (KeyDiff, lambda budget: PagedCache(retention="keydiff", budget=budget), PrunedPagedCache):
        with pytest.raises(
            CacheConfigError, match=r"`budget`: got .*, accepted: a whole number of tokens from 1, or a"
        ):
            build(budget=value)


def test_options_of_other_policies_are_refused():
    with pytest.raises(CacheConfigError, match=r"the key 'window'.*belongs to strings with sliding_"):
        PagedCache(retention="keydiff", window=3)
    with pytest.raises(CacheConfigError, match=r"the key 'budgett'.*Did you mean 'budget'\?"):
        PagedCache(retention="keydiff", budgett=3)
