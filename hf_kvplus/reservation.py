"""Handing a layer's state over to the tensors of a step (`step.py`), and taking it back."""

import copy

import torch

from . import step
from .pages import NULL_PAGE
from .segment import NO_TOKEN
from .standin import StandIn, stand_ins
from .step import Plan, StepState


class Reservation:
    """A layer whose pages are reserved up to `capacity` tokens: its state lives in tensors at fixed addresses.

    Attributes:
        state: the tensors that steps read and write, in the order in which the operators take them.
        plan: the name under which the operators find what never changes.
        capacity: tokens there is room for; masks are asked for over as many positions.
        padded: whether pages that would hold only padding are missing, so that a mask has to be given.
    """

    def __init__(self, layer, capacity: int) -> None:
        """Take over from `layer`, which is at rest. Its pages stay in its segments; its tail is emptied."""
        segments, tail = layer.sealed.segments, layer.tail
        plan = Plan(
            formats=tuple(tuple(segment.formats.values()) for segment in segments),
            page_size=layer.page_size,
            capacity=capacity,
            residual=layer.format.residual,
            native_pages=layer.format.native_pages,
            retention=layer.retention,
            masked_by_model=layer.masked_by_model,
        )
        self.plan, self.capacity = plan.register(), capacity
        self.padded = layer.retention is None and layer.sealed.has_null
        native, last = [0, *(segment.table.columns for segment in segments)][-2:]
        counts = torch.tensor([layer.seen, layer.seen - tail.length, native, last], device=layer.device)
        own = _reserve(layer, plan, native, last)
        if not step.on_host(layer.device):
            for segment in segments:
                segment.warm_up()
        self.state = StepState(
            counts,
            *(_with_room(tokens, plan.room) for tokens in (tail.keys, tail.values, tail.holes())),
            [segment.table.ids.contiguous() for segment in segments],
            [part for segment in segments for part in segment.parts()],
            [segment.positions for segment in segments if segment.positions is not None],
            own,
            layer.padding.own_first,
            layer.padding.behind(capacity),
        )
        tail.replace(tail.keys[:, :, :0], tail.values[:, :, :0])
        for tensor in self.tensors():
            torch._dynamo.mark_static_address(tensor)
        # How many pages there are depends on the prompt; how many columns, on whether its rows share any.
        for tensor in (*self.state.parts, *self.state.positions):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for tensor in () if own is None else (self.state.tables[-1], own):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer) -> tuple[StandIn, StandIn]:
        """As `PagedLayer.update`. Nothing here asks the host for a count."""
        torch.ops.hf_kvplus.append_(keys, values, *self._arguments())
        return stand_ins(layer, keys, values, self.capacity)

    def attend(self, query, mask, *, scale, softcap, sinks, window, causal) -> torch.Tensor:
        """Attention over all that is stored, `[rows, new, heads, dim]`; arguments as for `step.attend`."""
        given = query, mask, scale, softcap, sinks, window, causal
        return torch.ops.hf_kvplus.attend(*given, *self._arguments())

    def dense(self, name: str) -> torch.Tensor:
        """`"keys"` or `"values"` by position, `[rows, heads, capacity, dim]`; zeros where there are none."""
        return torch.ops.hf_kvplus.dense(name == "values", *self._arguments())

    @property
    def rows(self) -> int:
        return self.state.tail_keys.shape[0]

    @property
    def seen(self) -> torch.Tensor:
        """Tokens seen, int64 `[]`: a tensor, which a graph can read at every step."""
        return self.state.counts[0]

    def hand_back(self, layer) -> None:
        """Make `layer` what it would be had its steps run without a reservation."""
        with layer.sealed.lock:
            self._describe(layer)
            parts = iter(self.state.parts)
            for segment in layer.sealed.segments:
                segment.put_back([next(parts) for _ in segment.parts()])

    def _describe(self, layer) -> None:
        """Give `layer` the block tables, the tail and the counts of now."""
        state, segments = self.state, layer.sealed.segments
        seen, start, *columns = state.counts.tolist()
        # Before that, pages are in the columns of their positions in every row, where `crop` looks for them.
        evicted = layer.retention is not None and seen > layer.retention.capacity(seen)
        for index, segment in enumerate(segments):
            table = state.table(index)
            if evicted and segment is segments[-1]:
                _in_order(segment.table, table, state.positions[index])
            else:
                segment.table.replace(table[:, :, : columns[segment is segments[-1]]])
        newest = slice(None, seen - start)
        layer.tail.replace(
            state.tail_keys[:, :, newest], state.tail_values[:, :, newest], state.padding[:, newest]
        )  # fmt: skip
        layer.seen = seen
        if evicted:
            layer.evicted_at = seen

    def seen_by(self, layer):
        """A copy of `layer` as it stands now, to look at: it shares the pages, and nothing keeps them for it."""
        twin = copy.copy(layer)
        twin.sealed, twin.tail, twin.reservation = copy.copy(layer.sealed), layer.tail.copy(), None
        twin.sealed.segments = [copy.copy(segment) for segment in layer.sealed.segments]
        for segment in twin.sealed.segments:
            segment.table = segment.table.copy()
        self._describe(twin)
        return twin

    def tensors(self) -> list[torch.Tensor]:
        """All that steps read or write."""
        return [tensor for tensor in torch.utils._pytree.tree_leaves(self._arguments()) if torch.is_tensor(tensor)]

    def bytes_beside(self, layer) -> int:
        """Bytes of what is held beside the pages and block tables that `layer` has now."""
        known = [layer.padding.first]
        for segment in layer.sealed.segments:
            known += [*segment.parts(), segment.table.ids, segment.positions]
        known = {tensor.data_ptr() for tensor in known if tensor is not None}
        return sum(tensor.nbytes for tensor in self.tensors() if tensor.data_ptr() not in known)

    def _arguments(self) -> tuple:
        s = self.state
        return (
            *(s.counts, s.tail_keys, s.tail_values, s.padding, s.tables, s.parts, s.positions),
            *(s.own, s.first, s.behind, self.plan),
        )


def _reserve(layer, plan: Plan, native: int, last: int) -> torch.Tensor | None:
    """Give the segments of `layer` the pages of all tokens to come; if it evicts, which pages are a row's own."""
    with layer.sealed.lock:
        before = [segment.table.copy() for segment in layer.sealed.segments]
        try:
            return _extend(layer, plan, native, last)
        except Exception:  # out of memory, most likely
            for segment, table in zip(layer.sealed.segments, before):
                segment.table.replace(table.ids)
            raise


def _extend(layer, plan: Plan, native: int, last: int) -> torch.Tensor | None:
    segments, page = layer.sealed.segments, plan.page_size
    to_come = max(0, plan.capacity - plan.residual) // page - (0 if layer.retention else native + last)
    to_native = min(plan.native_pages - native, to_come) if plan.native_pages and not last else 0
    if to_native:
        segments[0].reserve(to_native)
    segment, own = segments[-1], None
    if layer.retention is None:
        segment.reserve(to_come - to_native)
    else:
        # Sinks and window may begin within a page, and one more is being filled. Padding in between takes slots too.
        gaps = layer.padding.most_gaps()
        needed = min(-(-(layer.retention.capacity(plan.capacity) + gaps) // page) + 3, to_come + 1)
        own = torch.isin(segment.table.ids, segment.pool.unshared().to(layer.device))
        fewest = int(own.sum(-1).min()) if own.numel() else 0
        segment.reserve(max(0, needed - fewest))
        own = torch.nn.functional.pad(own, (0, segment.table.columns - own.shape[-1]), value=True)
    if step.on_host(layer.device):
        return own
    for segment in segments:  # the page that nobody reads comes first
        segment.reserve(1)
        segment.table.replace(segment.table.ids.roll(1, dims=-1))
    return None if own is None else torch.nn.functional.pad(own, (1, 0), value=False)


def _with_room(tokens: torch.Tensor, room: int) -> torch.Tensor:
    """A copy of `tokens [rows, heads, length, dim]`, or of `[rows, length]`, with zeros up to `room` slots."""
    axis = 2 if tokens.ndim == 4 else 1
    shape = list(tokens.shape)
    shape[axis] = room
    grown = tokens.new_zeros(shape)
    grown.narrow(axis, 0, tokens.shape[axis]).copy_(tokens)
    return grown


def _in_order(table, ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Make `ids [rows, heads, columns]` the entries of `table`: oldest tokens first, without pages that hold none."""
    held = positions[ids.clamp(min=0).long()].masked_fill((ids == NULL_PAGE)[..., None], NO_TOKEN)
    oldest = torch.where(held == NO_TOKEN, torch.iinfo(held.dtype).max, held).amin(-1)
    order = oldest.argsort(dim=-1, stable=True)
    ids = ids.masked_fill((held == NO_TOKEN).all(-1), NULL_PAGE).gather(-1, order)
    table.replace(ids)
    table.drop(ids == NULL_PAGE)
