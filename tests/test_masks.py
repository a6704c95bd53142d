"""What attention masks do to our caches: padding, masks of the caller's own, windows, and what is refused."""

import types

import pytest
import torch
from conftest import tiny_llama
from generating import ROUNDING, assert_same_run, conversation, generate, own_prompt, prompts, tokens
from numerics import assert_close
from reference import Distinct, ReferenceCache, Window, reference_attention
from transformers import DynamicCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.attention import attend
from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.pages import NULL_PAGE
from hf_kvplus.placement import Resident
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding

PAGE = 8


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.2)


def cache_of(model, name: str = "paged_native", **options):
    return hf_kvplus.make_cache(name, model, page_size=PAGE, **options)


def feed(model, cache, ids, mask=None, positions=None):
    """Logits of `ids`, which follow what `cache` holds; `mask` is 2-D or 4-D."""
    start = cache.get_seq_length()
    if positions is None and mask is not None and mask.ndim == 2:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
    if positions is None:
        positions = torch.arange(start, start + ids.shape[1]).expand(len(ids), -1)
    name = forward_cache_name(model)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}).logits


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(40,), (3, 20, 17), (7, 7, 7, 7, 7, 5)])
@pytest.mark.parametrize("name", ["paged_native", "paged_int8", "offloaded_paged_native"])
def test_pages_of_padding_alone_are_not_stored(model, name, chunks):
    inputs = prompts(40, 3, 20, 8)
    cache, ids, mask, start = cache_of(model, name), *inputs.values(), 0
    for count in chunks:
        feed(model, cache, ids[:, start : start + count], mask[:, : start + count])
        start += count
    feed(model, cache, ids[:, :1], torch.cat([mask, mask[:, -1:]], 1))
    for layer in cache.layers:
        (segment,) = layer.sealed.segments
        blank = mask[:, : segment.slots].bool().unflatten(1, (-1, PAGE)).any(-1).logical_not()
        assert torch.equal(segment.table.ids == NULL_PAGE, blank[:, None].expand_as(segment.table.ids))
        assert segment.table.has_null
        assert len(segment.pool.live()) == 2 * int((~blank).sum())


def padded_cache(model, name: str = "paged_native", **options):
    """A cache that holds a padded prompt of 40, whose second row has 5 tokens; and the 2-D mask of it."""
    inputs = prompts(40, 5)
    cache = cache_of(model, name, **options)
    feed(model, cache, *inputs.values())
    return cache, inputs["attention_mask"]


@pytest.mark.parametrize("count", [1, 6, 20])
def test_a_mask_that_shows_padding_again_is_refused(model, count):
    cache, _ = padded_cache(model)
    shown = torch.ones(2, 40 + count, dtype=torch.long)
    shown[1, :3] = 0
    with pytest.raises(ValueError, match="`attention_mask` shows tokens that were padding"):
        feed(model, cache, tokens(2, count), shown)


@pytest.mark.parametrize("count", [1, 6, 20])
def test_no_mask_where_padding_was_is_refused(model, count):
    cache, _ = padded_cache(model)
    positions = torch.arange(40, 40 + count).expand(2, -1)
    seen = []
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="`attention_mask`"):
        seen.append(feed(model, cache, tokens(2, count), None, positions))
    assert not seen


@pytest.mark.parametrize("count", [1, 6, 20])
def test_padding_within_a_page_may_be_shown_again(model, count):
    """It is stored with the tokens beside it, as every cache of transformers stores it."""
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    inputs = prompts(12, 9)
    for cache in (ours, theirs):
        feed(model, cache, *inputs.values())
    outs = [feed(model, cache, tokens(2, count)) for cache in (ours, theirs)]
    assert_close("logits", *outs, ROUNDING)


@pytest.mark.parametrize("count", [1, 6, 20])
@pytest.mark.parametrize(
    ("name", "options"), [("sliding_paged_native", {"window": 30}), ("keydiff_paged_native", {"budget": 20})]
)
def test_a_cache_that_evicts_knows_its_padding_without_a_mask(model, name, options, count):
    outs = []
    for shown in (True, False):
        cache, mask = padded_cache(model, name, **options)
        mask = torch.cat([mask, torch.ones(2, count, dtype=torch.long)], 1)
        positions = (mask.cumsum(1) - 1)[:, 40:]
        outs.append(feed(model, cache, tokens(2, count), mask if shown else None, positions))
    assert_close("logits", *outs, ROUNDING)


@pytest.mark.parametrize("lengths", [[(41, 5, 24), (3, 14, 9), (9, 25, 2)], [(10, 12), (40, 3), (2, 16)]])
@pytest.mark.parametrize("whole", [True, False], ids=["all_tokens_again", "new_tokens_only"])
def test_padding_between_turns(model, lengths, whole):
    """Messages of different lengths: the same as DynamicCache, and each row as in a conversation of its own."""
    name, turns = forward_cache_name(model), [prompts(*turn) for turn in lengths]

    def run(cache, inputs):
        return generate(model, inputs, max_new_tokens=11, **{name: cache})

    ours = conversation(run, cache_of(model), turns, whole)
    for one, other in zip(ours, conversation(run, DynamicCache(config=model.config), turns, whole)):
        assert_same_run(one, other)
    for row in range(len(lengths[0])):
        alone = conversation(run, cache_of(model), [own_prompt(turn, row) for turn in turns], whole)
        for together, single in zip(ours, alone):
            assert together.sequences[row, -11:].tolist() == single.sequences[0, -11:].tolist()


# --- masks of the caller's own ----------------------------------------------------------------------------------------

CACHES = {
    "all": ("paged_native", {}, None),
    "sliding": ("sliding_paged_native", {"window": 11, "sink_tokens": 2}, Window(11, 2)),
    "keydiff": ("keydiff_paged_native", {"budget": 15}, Distinct(15)),
}


def custom_masks(steps, rows: int, heads: int, kind):
    """For every pass a causal 4-D mask that hides a third of the past; every query sees itself."""
    generator, total = torch.Generator().manual_seed(0), 0
    for count in steps:
        total += count
        shown = torch.rand(rows, heads, count, total, generator=generator) > 0.3
        key, query = torch.arange(total), torch.arange(total - count, total)[:, None]
        shown = (shown & (key < query)) | (key == query)
        yield shown if kind == torch.bool else torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(kind).min)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("steps", [(24, 1, 1, 5, 1), (9, 30, 1, 1), (20, 16, 17, 3)])
@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (2, 4)], ids=["per_row", "one_for_all_rows", "per_head"])
@pytest.mark.parametrize("kept", CACHES)
def test_custom_masks(model, kept, shape, steps, kind):
    name, options, policy = CACHES[kept]
    ours = cache_of(model, name, **options)
    theirs = ReferenceCache(model.config, policy, PAGE) if policy else DynamicCache(config=model.config)
    for seed, mask in enumerate(custom_masks(steps, *shape, kind)):
        ids = tokens(2, mask.shape[2], seed)
        logits = feed(model, ours, ids, mask.clone())
        if policy:
            with reference_attention(model, theirs):
                expected = feed(model, theirs, ids, mask)
        else:
            expected = feed(model, theirs, ids, mask)
        assert_close(f"logits of pass {seed}", logits, expected, ROUNDING)


@pytest.mark.parametrize("kept", CACHES)
def test_tree_of_drafts(model, kept):
    """Two drafted branches in one pass, each blind to the other, are as if each had come alone."""
    name, options, _ = CACHES[kept]
    trunk = cache_of(model, name, **options)
    feed(model, trunk, tokens(1, 30))
    branches = [tokens(1, 3, seed) for seed in (1, 2)]
    mask = torch.zeros(1, 1, 6, 36, dtype=torch.bool)
    mask[..., :30] = True
    for start in (30, 33):
        mask[..., start - 30 : start - 27, start : start + 3] = torch.ones(3, 3, dtype=torch.bool).tril()
    positions = torch.arange(30, 33).repeat(2)[None]
    together = feed(model, trunk.fork(), torch.cat(branches, 1), mask, positions)
    for branch, ids in enumerate(branches):
        alone = feed(model, trunk.fork(), ids)
        if kept != "sliding":  # a window counts the tokens in between, whichever branch they are on
            assert_close(f"branch {branch}", together[:, 3 * branch : 3 * branch + 3], alone, ROUNDING)
        elif branch == 0:
            assert_close("the first branch", together[:, :3], alone, ROUNDING)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_in_place(model, mode):
    """The object is the same; what it says is not."""
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    with mode():
        mask = causal.repeat(2, 1, 1, 1)
        for hidden in (0, 33, 12):
            mask.copy_(causal)
            mask[1, :, :, :hidden] = False
            cache = cache_of(model)
            feed(model, cache, tokens(2, 40), mask)
            (segment,) = cache.layers[0].sealed.segments
            assert (segment.table.ids == NULL_PAGE).sum(-1).tolist() == [[0, 0], [hidden // PAGE] * 2]


# --- windows and masks as attention functions of other kinds are given them -------------------------------------------

POLICIES = {"all": None, "sliding": Sliding(window=9, sink_tokens=2), "keydiff": KeyDiff(budget=20)}
ROWS, HEADS, KV_HEADS, DIM = 3, 4, 2, 8


class OneLayer:
    """A layer of ours, and beside it all that it was given."""

    def __init__(self, policy, lengths) -> None:
        self.layer = PagedLayer(FORMATS["native"], Resident(), policy, PAGE)
        self.keys = self.values = torch.zeros(ROWS, KV_HEADS, 0, DIM)
        self.real = torch.zeros(ROWS, 0, dtype=torch.bool)
        prompt = max(lengths)
        self.add(prompt, torch.arange(prompt) >= prompt - torch.tensor(lengths)[:, None])
        self.layer.commit(~self.real)

    def add(self, count, real=None):
        keys, values = torch.randn(2, ROWS, KV_HEADS, count, DIM)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        real = torch.ones(ROWS, count, dtype=torch.bool) if real is None else real
        self.real = torch.cat([self.real, real], 1)
        return self.layer.update(keys, values)

    def expected(self, query, window):
        """Naive attention over what the layer holds, causal, within the window, without padding."""
        seen, new = self.keys.shape[2], query.shape[2]
        positions = self.layer.slot_positions().long() if self.layer.retention else torch.arange(seen)
        held = torch.zeros(ROWS, KV_HEADS, seen + 1, dtype=torch.bool)
        held.scatter_(2, positions.expand(ROWS, KV_HEADS, -1) % (seen + 1), True)  # -1 goes to the last place
        held = held[..., :seen] & self.real[:, None]
        key, asked = torch.arange(seen), torch.arange(seen - new, seen)[:, None]
        shown = held[:, :, None] & (key <= asked)
        if window is not None:
            shown = shown & (key > asked - window)
        if isinstance(self.layer.retention, Sliding):
            first = self.real.int().argmax(1)[:, None, None, None]
            policy = self.layer.retention
            shown = shown & ((key > asked - policy.window) | (key < first + policy.sink_tokens))
        shown, keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (shown, self.keys, self.values))
        weights = (query @ keys.mT * DIM**-0.5).masked_fill(~shown, float("-inf")).softmax(-1)
        return (weights.nan_to_num(0.0) @ values).transpose(1, 2)


def flash_like(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
    raise AssertionError("a function that takes no 4-D masks was called for a cache that needs one")


flash_like.__module__ = "transformers.integrations.flash_attention"


@pytest.mark.parametrize("window", [None, 6, 1000])
@pytest.mark.parametrize("mask", ["none", "2-D"])
@pytest.mark.parametrize("new", [1, 5, 20])
@pytest.mark.parametrize("lengths", [(30, 30, 30), (30, 4, 19)], ids=["full", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_windows_with_flash_masks(policy, lengths, new, mask, window):
    """Flash attention is given no mask or a 2-D one, and the window as an argument."""
    case = OneLayer(POLICIES[policy], lengths)
    query, standins = torch.randn(ROWS, HEADS, new, DIM), case.add(new)
    given = case.real.long() if mask == "2-D" else None
    if policy == "all" and mask == "none" and lengths != (30, 30, 30):
        with pytest.raises(ValueError, match="`attention_mask` is missing"):
            attend(flash_like, types.SimpleNamespace(), query, *standins, given, scaling=DIM**-0.5)
        return
    inner, calls = flash_like, []
    if policy == "all" and new > 16:  # handed on, with all tokens and the mask as it came

        def inner(module, query, keys, values, attention_mask, **kwargs):
            calls.append((keys, values, attention_mask, kwargs["sliding_window"]))
            return case.expected(query, window), None

    out, _ = attend(
        inner, types.SimpleNamespace(), query, *standins, given, scaling=DIM**-0.5, sliding_window=window, dropout=0.0
    )
    assert_close("output", out, case.expected(query, window), 1e-5)
    if calls:
        keys, values, handed, handed_window = calls[0]
        shown = case.real[:, None].expand(-1, KV_HEADS, -1)
        assert torch.equal(keys[shown], case.keys[shown])
        assert torch.equal(values[shown], case.values[shown])
        assert handed is given
        assert handed_window == window
