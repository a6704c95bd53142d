"""A layer driven in any order of its methods, against a model that keeps every token in plain tensors."""

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from accounting import held_bytes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numerics import TOLERANCE, assert_close

from hf_kvplus import segment
from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import MAX_DECODE_TOKENS, PagedLayer
from hf_kvplus.ops.decode_attention import decode_attention
from hf_kvplus.pages import NULL_PAGE, PagePool
from hf_kvplus.placement import Offloaded, Resident
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding
from hf_kvplus.stats import collect

KEY_DIM, VALUE_DIM = 6, 10
INT8 = FORMATS["int8"]
FORMAT_SPECS = {
    "native": FORMATS["native"],
    "int8": INT8,
    "int8, first page native, 5 recent": INT8.with_options(native_pages=1, residual=5),
}
PLACEMENTS = {"resident": Resident(), "cpu": Offloaded("cpu"), "disk": Offloaded("disk")}


class Watched:
    """A policy that reports what it is asked and what it answers."""

    def select(self, state):
        keep = super().select(state)
        self.report(state, keep)
        return keep


class WatchedSliding(Watched, Sliding):
    def check(self, kept, positions, keys, seen, first, recent):
        assert kept == {p for p in positions if p < first + self.sink_tokens or p > seen - self.window}


class WatchedKeyDiff(Watched, KeyDiff):
    def check(self, kept, positions, keys, seen, first, recent):
        budget = self.budget if isinstance(self.budget, int) else max(1, round(self.budget * (seen - first)))
        assert len(kept) == min(len(positions), max(0, budget - recent))
        unit = [key / key.norm() for key in keys.double()]
        likeness = {p: float(key @ sum(unit) / sum(unit).norm()) for p, key in zip(positions, unit)}
        dropped = set(positions) - kept
        if kept and dropped:
            assert max(likeness[p] for p in kept) <= min(likeness[p] for p in dropped) + 1e-5


POLICIES = {
    "all": None,
    "sliding": WatchedSliding(window=20, sink_tokens=3),
    "keydiff": WatchedKeyDiff(budget=24),
    "keydiff, a fraction": WatchedKeyDiff(budget=0.5),
}


class WatchedPool(PagePool):
    """A pool that notes the most pages it had to provide at once."""

    peak = 0

    def allocate(self, count):
        named = torch.cat([table.ids.flatten() for table in self._tables])
        self.peak = max(self.peak, len(set(named.tolist()) - {NULL_PAGE}) + count)
        return super().allocate(count)


@dataclass
class Model:
    """What a layer was given: `keys`, `values` `[rows, heads, seen, dim]`; what is padding, and what must be held."""

    keys: torch.Tensor
    values: torch.Tensor
    padding: torch.Tensor  # bool [rows, seen]
    held: torch.Tensor  # bool [rows, heads, seen]
    pending: int = 0  # newest tokens that no commit has taken in
    copies: int = 1  # the pending rows come in groups of so many equal ones
    cropped: bool = False
    wanted: torch.Tensor | None = None  # as `held`: what the policy has just chosen

    @property
    def rows(self):
        return self.keys.shape[0]

    @property
    def seen(self):
        return self.keys.shape[2]

    @property
    def first(self):
        return self.padding.long().cumprod(dim=1).sum(dim=1)

    def add(self, keys, values):
        new, rows = keys.shape[2], keys.shape[0]
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.padding = torch.cat([self.padding, torch.zeros(rows, new, dtype=torch.bool)], 1)
        self.held = torch.cat([self.held, torch.ones(rows, keys.shape[1], new, dtype=torch.bool)], 2)

    def hide(self, padding):
        """The newest tokens turn out to be padding."""
        self.padding[:, self.seen - padding.shape[1] :] |= padding
        self.held &= ~self.padding[:, None]

    def select(self, index):
        self.keys, self.values, self.padding, self.held = (
            tensor[index] for tensor in (self.keys, self.values, self.padding, self.held)
        )
        self.wanted = None if self.wanted is None else self.wanted[index]

    def crop(self, seen):
        self.cropped = True
        self.keys, self.values = self.keys[:, :, :seen], self.values[:, :, :seen]
        self.padding, self.held = self.padding[:, :seen].clone(), self.held[:, :, :seen].clone()


class Layer(RuleBasedStateMachine):
    """`branches` pairs each layer with its model; forks add branches that share pages."""

    def __init__(self):
        super().__init__()
        self.patch = mock.patch.object(segment, "PagePool", WatchedPool)
        self.patch.start()
        self.random = torch.Generator().manual_seed(0)
        self.branches: list[tuple[PagedLayer, Model | None]] = []
        self.current: Model | None = None

    def teardown(self):
        self.patch.stop()

    @initialize(
        data=st.data(),
        format=st.sampled_from(sorted(FORMAT_SPECS)),
        placement=st.sampled_from(sorted(PLACEMENTS)),
        page_size=st.sampled_from([4, 8, 16]),
        heads=st.sampled_from([(1, 1), (2, 2), (2, 4), (1, 3)]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def build(self, data, format, placement, page_size, heads, dtype):
        self.format, self.page_size, self.dtype = FORMAT_SPECS[format], page_size, dtype
        self.policy = POLICIES[data.draw(st.sampled_from(self.policies))]
        self.kv_heads, self.heads = heads
        self.exact = format == "native"
        if self.policy is not None:
            self.policy.report = self.policy_was_asked
        layer = PagedLayer(self.format, PLACEMENTS[placement], self.policy, page_size)
        self.branches = [[layer, None]]
        self.prompt(data)

    # --- the policy ---------------------------------------------------------------------------------------------

    def policy_was_asked(self, state, keep):
        """The policy must have seen the truth, and must answer as its own `check` demands."""
        model = self.current
        keys, old = state.read_keys(), model.seen - state.recent
        assert state.seen == model.seen
        assert state.first.tolist() == model.padding.sum(1)[state.rows].tolist()
        assert model.wanted is None
        wanted = model.held.clone()
        wanted[state.rows, :, :old] = False
        for index, row in enumerate(state.rows.tolist()):
            for head in range(self.kv_heads):
                slots = (state.positions[index, head] >= 0).nonzero().flatten()
                positions = state.positions[index, head, slots]
                columns = model.held[row, head, :old].nonzero().flatten()
                behind = model.padding[row].flip(0).cumsum(0).flip(0)  # padding counts as if it came before all tokens
                assert positions.tolist() == (columns + behind[columns]).tolist()
                self.check_tokens("keys for the policy", keys[index, head, slots], model.keys[row, head, columns])
                chosen = set(positions[keep[index, head, slots]].tolist())
                first = int(state.first[index])
                self.policy.check(chosen, positions.tolist(), keys[index, head, slots], state.seen, first, state.recent)
                wanted[row, head, columns[keep[index, head, slots]]] = True
        model.wanted = wanted

    # --- what may happen ----------------------------------------------------------------------------------------

    def pick(self, data, filled=True):
        branches = [branch for branch in self.branches if branch[1] is not None or not filled]
        branch = branches[data.draw(st.integers(0, len(branches) - 1))]
        self.current = branch[1]
        return branch

    def filled(self):
        return any(model is not None for _, model in self.branches)

    def tokens(self, rows, new, dim):
        return torch.randn(rows, self.kv_heads, new, dim, generator=self.random).to(self.dtype)

    @rule(data=st.data())
    def prompt(self, data):
        """A prompt or a chunk of one; attention commits it, and tells what is padding."""
        branch, new = self.pick(data, filled=False), data.draw(st.integers(1, 70))
        padded = data.draw(st.sampled_from([None, "left", "left", "holes"]))
        self.update(data, branch, new)
        layer, model = branch
        if not model.pending or padded is None:
            return
        groups = model.rows // model.copies
        some = st.one_of(st.just(new), st.integers(0, new))
        left = torch.tensor(data.draw(st.lists(some, min_size=groups, max_size=groups)))
        padding = torch.arange(new) < left[:, None]
        if padded == "holes":
            padding |= torch.rand(padding.shape, generator=self.random) < 0.2
        padding = padding.repeat_interleave(model.copies, dim=0)
        model.hide(padding)
        layer.commit(padding)
        self.settled(layer, model)
        if model.copies > 1 and model.seen == new:
            for part in layer.sealed.segments:
                ids = part.table.ids.unflatten(0, (-1, model.copies))
                assert (ids == ids[:, :1]).all(), "rows of one prompt do not share their pages"

    @precondition(filled)
    @rule(data=st.data(), steps=st.integers(1, 20))
    def decode(self, data, steps):
        branch = self.pick(data)
        for _ in range(steps):
            self.update(data, branch, 1)

    @precondition(filled)
    @rule(data=st.data(), drafted=st.integers(2, MAX_DECODE_TOKENS + 4))
    def verify_drafts(self, data, drafted):
        branch = self.pick(data)
        self.update(data, branch, drafted)
        if data.draw(st.booleans()):
            self.crop_by(branch, data.draw(st.integers(0, drafted)))

    def update(self, data, branch, new):
        layer, model = branch
        copies = 1
        if model is None:
            copies, groups = data.draw(st.sampled_from([1, 1, 2, 3])), data.draw(st.integers(1, 2))
            rows = groups * copies
            empty = torch.zeros(rows, self.kv_heads, 0, KEY_DIM, dtype=self.dtype)
            held = torch.zeros(rows, self.kv_heads, 0, dtype=torch.bool)
            model = Model(empty, empty.new_zeros(rows, self.kv_heads, 0, VALUE_DIM), held[:, 0], held)
            branch[1] = self.current = model
            layer.expansion = copies
        rows, was_empty = model.rows, model.seen == 0
        waits = was_empty or new > MAX_DECODE_TOKENS or bool((model.first == model.seen).any())
        keys, values = (self.tokens(rows, new, dim)[::copies] for dim in (KEY_DIM, VALUE_DIM))
        keys, values = keys.repeat_interleave(copies, dim=0), values.repeat_interleave(copies, dim=0)
        standins = layer.update(keys, values)
        self.settled(layer, model)
        model.add(keys, values)
        model.pending, model.copies = (0 if layer._pending is None else new), copies
        assert model.pending or not waits, "padding among these tokens would go unnoticed"

        for standin, whole in zip(standins, (model.keys, model.values)):
            assert standin.shape == whole.shape
            if was_empty:
                assert standin.fresh is not None
            elif self.policy is None:
                self.check_tokens("stand-in", *(t[self.shown(model)] for t in (standin.dense(), whole)))
        if self.policy is not None:
            capacity = self.policy.capacity(model.seen - int(model.first.min()))
            slack = 5 * self.page_size + self.format.residual + new
            assert int(model.held.sum(-1).max()) <= capacity + slack, "the layer outgrows its budget"

    @precondition(filled)
    @rule(data=st.data(), back=st.one_of(st.integers(1, 5), st.integers(6, 100)))
    def crop(self, data, back):
        self.crop_by(self.pick(data), back)

    def crop_by(self, branch, back):
        layer, model = branch
        layer.commit()
        self.settled(layer, model)
        target = max(0, model.seen - back)
        if target < layer.evicted_at:
            with pytest.raises(ValueError, match="evicted when"):
                layer.crop(-back)
        else:
            layer.crop(-back)
            model.crop(target)

    def reordered(self, branch, index, call):
        layer, model = branch
        call(layer)
        model.select(index)
        self.settled(layer, model)

    @precondition(filled)
    @rule(data=st.data(), how=st.sampled_from(["reorder", "numbers", "flags", "repeat"]))
    def move_rows(self, data, how):
        branch = self.pick(data)
        rows = branch[1].rows
        if how == "repeat":
            repeats = data.draw(st.integers(1, max(1, 6 // rows)))
            index = torch.arange(rows).repeat_interleave(repeats)
            self.reordered(branch, index, lambda layer: layer.batch_repeat_interleave(repeats))
        elif how == "flags":
            flags = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any)))
            self.reordered(branch, flags.nonzero().flatten(), lambda layer: layer.batch_select_indices(flags))
        else:
            most = rows if how == "numbers" else 6
            index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=most)))
            method = "reorder_cache" if how == "reorder" else "batch_select_indices"
            self.reordered(branch, index, lambda layer: getattr(layer, method)(index))

    @precondition(lambda self: len(self.branches) < 3)
    @rule(data=st.data(), repeats=st.integers(1, 2), deep=st.booleans())
    def fork(self, data, repeats, deep):
        layer, model = self.pick(data, filled=False)
        twin = copy.deepcopy(layer) if deep else layer.fork(repeats)
        if model is None:
            self.branches.append([twin, None])
            return
        self.settled(layer, model)
        other = Model(model.keys, model.values, model.padding, model.held, cropped=model.cropped)
        other.select(torch.arange(model.rows).repeat_interleave(1 if deep else repeats))
        self.branches.append([twin, other])

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data())
    def forget_a_branch(self, data):
        del self.branches[data.draw(st.integers(0, len(self.branches) - 1))]
        self.current = None

    @precondition(filled)
    @rule(data=st.data())
    def reset(self, data):
        branch = self.pick(data)
        branch[0].reset()
        branch[1] = None

    @precondition(filled)
    @rule(data=st.data(), record=st.booleans())
    def move_pages(self, data, record):
        layer, _ = self.pick(data)
        layer.offload()
        layer.prefetch()
        layer.record_past = record

    # --- what must hold -----------------------------------------------------------------------------------------

    def settled(self, layer, model):
        """Take over what an eviction has left: no less than the policy wanted, and no more than there was."""
        model.pending = 0
        if model.wanted is None:
            return
        left = self.stored(layer, model)
        assert not (model.wanted & ~left).any(), "tokens that the policy wanted are lost"
        assert not (left & ~model.held).any(), "tokens came back"
        if not self.policy.whole_pages:
            assert torch.equal(left, model.wanted)
        model.held, model.wanted = left, None

    def stored(self, layer, model):
        """Bool `[rows, heads, seen]`: the positions that the layer has among those of the model."""
        positions = layer.slot_positions().long()
        stored = torch.zeros(model.rows, self.kv_heads, layer.seen + 1, dtype=torch.bool)
        stored.scatter_(2, positions.masked_fill(positions < 0, layer.seen), True)
        return stored[..., : model.seen]

    def shown(self, model):
        return (~model.padding)[:, None].expand(-1, self.kv_heads, -1)

    def check_tokens(self, name, actual, expected):
        """Equal, or within what int8 pages lose (twice, where tokens were sealed again from bfloat16)."""
        if self.exact:
            assert torch.equal(actual, expected), name
            return
        actual, expected = actual.float(), expected.float()
        allowed = expected.abs().amax(-1, keepdim=True) * (0.503 / 127)
        if self.dtype == torch.bfloat16:
            allowed = 2 * allowed + expected.abs() * 2**-7
        assert ((actual - expected).abs() <= allowed + 1e-7).all(), name

    @invariant()
    def every_row_and_head_holds_its_own_tokens(self):
        for layer, model in self.branches:
            if model is None:
                assert not layer.is_initialized
                assert layer.get_seq_length() == 0
                continue
            assert layer.get_seq_length() == model.seen
            assert layer.rows == model.rows
            assert layer.get_mask_sizes(3) == (model.seen + 3, 0)
            if not model.pending and (self.policy is not None or not model.cropped):
                assert layer.padding.first.tolist() == model.first.tolist()
            if self.format.native_pages:
                assert layer.sealed.segments[0].table.columns <= self.format.native_pages
            for name, tokens in (("keys", model.keys), ("values", model.values)):
                if not model.cropped:  # cropped pages come back as they were sealed
                    recent = model.held & (torch.arange(model.seen) >= model.seen - self.format.residual)
                    assert torch.equal(layer.contiguous(name)[recent], tokens[recent]), "recent tokens are not native"
                if self.policy is None:
                    self.check_everything(layer, model, name, tokens)
                else:
                    self.check_what_is_left(layer, model, name, tokens)
            self.check_attention(layer, model)

    def check_everything(self, layer, model, name, tokens):
        dense = layer.dense(name)
        assert layer.slots == model.seen
        assert torch.equal(dense, layer.contiguous(name))
        shown = self.shown(model)
        self.check_tokens(name, dense[shown], tokens[shown])
        first = torch.arange(model.seen) < self.format.native_pages * self.page_size
        assert torch.equal(dense[shown & first], tokens[shown & first]), "the first pages are not native"
        columns = torch.cat([part.table.ids for part in layer.sealed.segments], dim=-1)
        blank = model.padding[:, : columns.shape[-1] * self.page_size].unflatten(1, (-1, self.page_size)).all(-1)
        missing, blank = columns == NULL_PAGE, blank[:, None].expand_as(columns)
        assert not (missing & ~blank).any(), "a page with tokens is not stored"
        if not model.cropped:  # pages do not remember which of their tokens are padding
            assert not (blank & ~missing).any(), "a page of padding alone is stored"

    def check_what_is_left(self, layer, model, name, tokens):
        positions, dense, contiguous = layer.slot_positions(), layer.dense(name), layer.contiguous(name)
        assert dense.shape[2] == positions.shape[2] == layer.slots
        assert contiguous.shape == tokens.shape
        assert not contiguous[~model.held].any()
        self.check_tokens(name, contiguous[model.held], tokens[model.held])
        filled = positions >= 0
        assert torch.equal(self.stored(layer, model), model.held)
        assert torch.equal(filled.sum(-1), model.held.sum(-1)), "a token is stored twice"
        if filled.any():
            assert torch.equal(positions.cummax(-1).values[filled], positions[filled]), "slots are out of order"
        where = positions.clamp(min=0).long()[..., None].expand_as(dense)
        assert torch.equal(dense[filled], contiguous.gather(2, where)[filled])

    def check_attention(self, layer, model):
        query = torch.randn(model.rows, self.heads, 1, KEY_DIM, generator=self.random).to(self.dtype)
        if self.policy is None:
            mask = self.shown(model)[:, :1, None]
        else:
            mask = (layer.slot_positions() >= 0)[:, :, None]
        out = decode_attention(query, layer.sealed.view(), *layer.unsealed(), mask, scale=0.4, backend="torch")
        group = self.heads // self.kv_heads
        keys, values, held = (t.repeat_interleave(group, dim=1) for t in (model.keys, model.values, model.held))
        scores = (query.double() @ keys.double().mT * 0.4).masked_fill(~held[:, :, None], float("-inf"))
        expected = scores.softmax(-1).nan_to_num(0) @ values.double()
        tolerance = max(TOLERANCE[self.dtype], 0 if self.exact else 4 * TOLERANCE[torch.int8])
        assert_close("attention", out, expected.transpose(1, 2), tolerance)

    @invariant()
    def no_page_is_leaked_and_every_byte_is_counted(self):
        named = {}
        for layer, model in self.branches:
            for part in layer.sealed.segments if model is not None else ():
                ids = part.table.ids.flatten().tolist()
                named.setdefault(part.pool, []).extend(page for page in ids if page != NULL_PAGE)
        for pool, pages in named.items():
            assert pool.live().tolist() == sorted(set(pages))
            assert pool.capacity <= pool.peak * 17 / 16
        for layer, model in self.branches:
            stats = collect([layer])
            assert {tier: size for tier, size in stats.bytes_by_tier.items() if size} == held_bytes(layer)
            if model is None:
                continue
            pages = shared = used = 0
            for part in layer.sealed.segments:
                own = set(part.table.ids.flatten().tolist()) - {NULL_PAGE}
                pages, used = pages + len(own), used + len(own) * part.bytes_per_page
                shared += sum(named[part.pool].count(page) > 1 for page in own)
            unsealed = layer.slots - layer.sealed.slots
            token = self.kv_heads * (KEY_DIM + VALUE_DIM) * self.dtype.itemsize
            assert (stats.pages, stats.shared_pages, stats.tokens) == (pages, shared, model.rows * model.seen)
            assert stats.bytes_used == used + model.rows * unsealed * token
            assert stats.compression == pytest.approx(model.rows * model.seen * token / stats.bytes_allocated)


class KeepingLayer(Layer):
    policies = ("all",)


class EvictingLayer(Layer):
    policies = ("sliding", "keydiff", "keydiff, a fraction")


for _machine in (KeepingLayer, EvictingLayer):
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
TestKeepingLayer = KeepingLayer.TestCase
TestEvictingLayer = EvictingLayer.TestCase
