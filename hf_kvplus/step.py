"""A decode step whose state is all tensors at fixed addresses: what `torch.compile` and CUDA graphs can capture.

A layer with a reservation (`reservation.py`) hands its state over once its prompt is stored: tails with room to spare,
block tables with the pages of all tokens to come. From then on a step is two operators, `append_` and `attend`, which a
graph sees as opaque. On the CPU they look at the counts and skip what is not due. Elsewhere they never ask the host: a
page that is being filled is encoded at every step, into its reserved place, and counts once it is full.
"""

from dataclasses import dataclass

import torch

from . import masks
from .formats import PageFormat
from .guards import plain
from .ops.decode_attention import PageView, decode_attention
from .ops.gather_pages import gather_pages
from .ops.seal_pages import seal_pages
from .padding import shifted
from .pages import NULL_PAGE
from .retention import Retention
from .segment import NO_TOKEN, without_holes

#: Up to this many tokens (drafts being verified) are decoded in place; more are a prefill.
MAX_DECODE_TOKENS = 16


def on_host(device: torch.device) -> bool:
    """Whether counts that lie on `device` may be looked at without waiting."""
    return device.type == "cpu"


def within_graph(device: torch.device) -> bool:
    """Whether a graph is being made of what is done on `device`."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@dataclass
class StepState:
    """The tensors that a step reads and writes.

    Attributes:
        counts: int64 `[4]`: tokens seen, position of the tail's first token, pages in the native segment, in the last.
        tail_keys, tail_values: `[rows, heads, room, dim]`, the newest tokens from slot 0 on.
        padding: bool `[rows, room]`, slots of the tail that hold no token.
        tables: per segment int32 `[rows, heads, columns]`, reserved pages included. Except on the CPU, column 0 is a
            page that nobody reads: a step writes there what is not due.
        parts: of all segments, the parts of their keys and values, `[capacity, *shape]`.
        positions: of layers that evict, per segment int32 `[capacity, page_size]`.
        own: of layers that evict, bool like the last table: pages that no other row names, to be written over.
        first: int64 `[rows]`, where a row's own tokens begin, all its padding counted as if it stood before them.
        behind: int32 `[rows, capacity]` or `None`: how much padding of a row comes after a position.
    """

    counts: torch.Tensor
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    padding: torch.Tensor
    tables: list[torch.Tensor]
    parts: list[torch.Tensor]
    positions: list[torch.Tensor]
    own: torch.Tensor | None
    first: torch.Tensor
    behind: torch.Tensor | None

    @property
    def on_host(self) -> bool:
        return on_host(self.counts.device)

    def table(self, index: int) -> torch.Tensor:
        """The pages of a segment that are read."""
        return self.tables[index] if self.on_host else self.tables[index][:, :, 1:]

    def own_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """`positions [rows, heads, n]` as if all padding of a row stood before its first token."""
        return shifted(positions, self.behind)


@dataclass(frozen=True)
class Plan:
    """What is the same at every step of a layer, and for every cache of its kind.

    Attributes:
        formats: of each segment, those of keys and of values. The native segment, if there is one, comes first.
        capacity: tokens that there is room for.
    """

    formats: tuple[tuple[PageFormat, PageFormat], ...]
    page_size: int
    capacity: int
    residual: int
    native_pages: int
    retention: Retention | None
    masked_by_model: bool

    @property
    def room(self) -> int:
        """Slots of the tail: a page and the residual may wait when up to `MAX_DECODE_TOKENS` are added."""
        return self.residual + self.page_size + MAX_DECODE_TOKENS - 1

    def register(self) -> str:
        """The name under which the operators find this plan: equal plans have equal names, in every process."""
        described = [
            (type(format).__module__, type(format).__qualname__, sorted(vars(format).items()))
            for pair in self.formats
            for format in pair
        ]
        kept = self.retention and (type(self.retention).__module__, type(self.retention).__qualname__)
        rest = [self.page_size, self.capacity, self.residual, self.native_pages, self.masked_by_model]
        name = repr((described, kept, self.retention and sorted(vars(self.retention).items()), rest))
        PLANS[name] = self
        return name


PLANS: dict[str, Plan] = {}

_STATE = (
    "Tensor{a} counts, Tensor{b} tail_keys, Tensor{c} tail_values, Tensor{d} padding, Tensor[] tables, "
    "Tensor{e}[] parts, Tensor{f}[] positions, Tensor? own, Tensor first, Tensor? behind, str plan"
)
_WRITTEN = _STATE.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)", e="(e!)", f="(f!)")
_READ = _STATE.format(a="", b="", c="", d="", e="", f="")

_library = torch.library.Library("hf_kvplus", "FRAGMENT")
_library.define(f"append_(Tensor keys, Tensor values, {_WRITTEN}) -> ()")
_library.define(
    "attend(Tensor query, Tensor? mask, float scale, float? softcap, Tensor? sinks, int? window, bool causal, "
    f"{_READ}) -> Tensor"
)
_library.define(f"dense(bool values, {_READ}) -> Tensor")


def _operator(name: str, fake):
    """Make the decorated function the operator `name` on every device."""

    def register(function):
        _library.impl(name, plain(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"hf_kvplus::{name}", fake, lib=_library)
        return function

    return register


@_operator("append_", lambda *_: None)
def append_(keys, values, *state) -> None:
    """Seal what is due, then put new tokens `[rows, heads, new, dim]` behind the tail."""
    *tensors, plan = state
    state, plan, new = StepState(*tensors), PLANS[plan], keys.shape[2]
    for _ in range(-(-(MAX_DECODE_TOKENS - 1) // plan.page_size)):
        _seal(state, plan)
    if state.on_host:
        seen, start, *_ = state.counts.tolist()
        if seen + new > plan.capacity:
            raise ValueError(
                f"`reserve`: this cache has room for {plan.capacity:,} tokens, {seen:,} are stored and {new} more are "
                "given. Reserve as many as the whole generation needs."
            )
        where = slice(seen - start, seen - start + new)
        state.tail_keys[:, :, where] = keys
        state.tail_values[:, :, where] = values
        state.padding[:, where] = False
        state.counts[0] += new
        return
    _check(state.counts[0] + new <= plan.capacity, "`reserve`: more tokens than there is room for")
    where = state.counts[0] - state.counts[1] + torch.arange(new, device=keys.device)
    state.tail_keys.index_copy_(2, where, keys.to(state.tail_keys.dtype))
    state.tail_values.index_copy_(2, where, values.to(state.tail_values.dtype))
    state.padding.index_fill_(1, where, False)
    state.counts[0] += new


def _seal(state: StepState, plan: Plan) -> None:
    """Make the tail's oldest page a sealed one, if it is full."""
    page, on_host = plan.page_size, state.on_host
    seen, start, *columns = state.counts.tolist() if on_host else state.counts.unbind()
    due = seen - start >= page + plan.residual
    if on_host and not due:
        return
    to_native = (columns[0] < plan.native_pages) & (columns[1] == 0)
    to_last = to_native ^ True
    filled = ~state.padding[:, None, :page].expand(-1, state.tail_keys.shape[1], -1).flatten(0, 1)
    positions = start + torch.arange(page, dtype=torch.int32, device=state.counts.device)
    parts = iter(state.parts)
    for index, formats in enumerate(plan.formats):
        last = index == len(plan.formats) - 1
        mine = [[next(parts) for _ in format.parts] for format in formats]
        turn = due & (to_last if last else to_native)
        if on_host and not turn:
            continue
        ids = _next_page(state, plan, index, columns[last], turn)
        for format, tail, into in zip(formats, (state.tail_keys, state.tail_values), mine):
            tokens = without_holes(format, tail[:, :, :page].flatten(0, 1), filled)
            seal_pages(format, dict(zip(format.parts, into)), tokens, ids)
        if state.positions:
            kept = filled & torch.as_tensor(turn, device=filled.device)
            state.positions[index].index_copy_(0, ids, torch.where(kept, positions, NO_TOKEN).int())

    if on_host:
        rest = seen - start - page
        for tail in (state.tail_keys, state.tail_values):
            tail[:, :, :rest] = tail[:, :, page : page + rest].clone()
        state.padding[:, :rest] = state.padding[:, page : page + rest].clone()
        state.counts += torch.tensor([0, page, to_native, to_last], device=state.counts.device)
        return
    moved = torch.arange(plan.room, device=state.counts.device) + page * due
    moved = moved.clamp(max=plan.room - 1)
    for tail in (state.tail_keys, state.tail_values):
        tail.copy_(tail.index_select(2, moved))
    state.padding.copy_(state.padding.index_select(1, moved))
    state.counts += torch.stack([torch.zeros_like(seen), page * due, due & to_native, due & to_last])


def _check(condition: torch.Tensor, message: str) -> None:
    """Raise unless `condition` holds; on a device, when it comes to it."""
    if on_host(condition.device):
        if not condition:
            raise RuntimeError(message)
        return
    torch._assert_async(condition, message)


def _next_page(state: StepState, plan: Plan, index: int, column, turn) -> torch.Tensor:
    """The numbers, int64 `[rows * heads]`, of the pages that a segment writes next."""
    table = state.tables[index]
    if state.positions and index == len(plan.formats) - 1:
        held = state.positions[index][table.clamp(min=0).long()].flatten(-2)
        queries = state.counts[:1].int().expand(table.shape[0], 1, -1)
        shown = plan.retention.visible(
            state.own_positions(queries), state.own_positions(held), state.first
        )[:, :, 0] & (held != NO_TOKEN)  # fmt: skip
        free = state.own & ~shown.unflatten(-1, (-1, plan.page_size)).any(-1)
        _check(free.any(-1).all(), "no reserved page is free, which must not happen: please report it")
        column = free.int().argmax(-1, keepdim=True)
    else:
        column = torch.as_tensor(column + (not state.on_host), device=table.device).expand(*table.shape[:2], 1)
    return table.gather(-1, column * turn).flatten().long()


@_operator(
    "attend",
    lambda query, mask, scale, softcap, sinks, window, causal, counts, keys, values, *rest: query.new_empty(
        (query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    ),
)
def attend(query, mask, scale, softcap, sinks, window, causal, *state) -> torch.Tensor:
    """Attention of `query [rows, heads, new, dim]`, the newest tokens, over pages and tail: `[rows, new, heads, dim]`.

    Args:
        mask: over positions, as for `masks.visible`.
        scale, softcap, sinks: as for `decode_attention`.
        window: if given, a query sees itself and the `window - 1` tokens before it.
        causal: whether a query sees no token behind its own position.
    """
    *tensors, plan = state
    state, plan, new = StepState(*tensors), PLANS[plan], query.shape[2]
    views, tail_keys, tail_values, positions = _read(state, plan)
    seen = state.counts[0]
    plain = state.on_host and not (state.positions or causal or window) and (mask is None or mask.ndim == 4)
    if plain:
        mask = None if mask is None else mask[..., : positions.shape[-1]]  # slots are positions
    else:
        queries, kept = seen - new + torch.arange(new, device=query.device), None
        if plan.retention is not None:
            positions = positions if plan.retention.per_head else positions[:, :1]
            own = queries.expand(query.shape[0], 1, -1)
            own = queries[:1] if plan.masked_by_model else state.own_positions(own)
            kept = plan.retention.visible(own, state.own_positions(positions), state.first)
        mask = masks.visible(positions, queries, mask, causal=causal, window=window, kept=kept)
    return decode_attention(
        query, views, tail_keys, tail_values, mask, scale=scale, softcap=softcap, sinks=sinks
    ).contiguous()


@_operator(
    "dense",
    lambda values, counts, tail_keys, tail_values, padding, tables, parts, positions, own, first, behind, plan: (
        tail_values if values else tail_keys
    ).new_empty((*tail_keys.shape[:2], PLANS[plan].capacity, (tail_values if values else tail_keys).shape[-1])),
)
def dense(values: bool, *state) -> torch.Tensor:
    """Keys (or values) by position, `[rows, heads, capacity, dim]`; zeros where there are none."""
    *tensors, plan = state
    state, plan = StepState(*tensors), PLANS[plan]
    views, *tails, positions = _read(state, plan)
    tail = tails[values]
    runs = [
        gather_pages(*((view.value_format, view.values) if values else (view.key_format, view.keys)), view.block_table)
        for view in views
    ]
    tokens = torch.cat([*runs, tail], dim=2)
    return masks.by_position(tokens, positions, plan.capacity).contiguous()


def _read(state: StepState, plan: Plan):
    """Views of all pages, keys and values of the tail, and the position of every slot, int `[rows, heads, slots]`."""
    on_host, device = state.on_host, state.counts.device
    seen, start, *columns = state.counts.tolist() if on_host else state.counts.unbind()
    parts, views, positions, begin = iter(state.parts), [], [], 0
    for index, formats in enumerate(plan.formats):
        last = index == len(plan.formats) - 1
        table, held = state.table(index), columns[last]
        mine = [{name: next(parts) for name in format.parts} for format in formats]
        if on_host and not (last and state.positions):
            table = table[:, :, :held]
        views.append(PageView(*mine, *formats, table, has_null=True))
        slots = torch.arange(table.shape[-1] * plan.page_size, device=device)
        if state.positions:
            where = state.positions[index][table.clamp(min=0).long()].flatten(-2)
            absent = (table == NULL_PAGE).repeat_interleave(plan.page_size, dim=-1)
            if not last:
                absent = absent | (slots >= held * plan.page_size)
            positions.append(where.masked_fill(absent, NO_TOKEN).long())
        else:
            positions.append(torch.where(slots < held * plan.page_size, slots + begin, NO_TOKEN)[None, None])
        begin = begin + held * plan.page_size

    room = slice(None, seen - start) if on_host else slice(None)
    tail_keys, tail_values = state.tail_keys[:, :, room], state.tail_values[:, :, room]
    newest = start + torch.arange(tail_keys.shape[2], device=device)
    newest = torch.where(newest < seen, newest, NO_TOKEN)[None, None]
    if state.positions:
        newest = newest.masked_fill(state.padding[:, None, room], NO_TOKEN).expand(-1, state.tables[0].shape[1], -1)
    positions = torch.cat([*positions, newest], dim=-1)
    return views, tail_keys, tail_values, positions
