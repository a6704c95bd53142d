"""All sealed tokens of a layer: a segment in the cache's format, behind one of native pages if the format wants it."""

import copy
import threading

import torch
from torch.nn.functional import pad

from .formats import FORMATS, FormatSpec
from .guards import alone
from .ops.decode_attention import PageView
from .placement import Placement
from .segment import NO_TOKEN, Segment


class SealedTokens:
    """Keys and values `[rows, heads, slots, dim]` in segments, oldest first.

    Args:
        keys, values: tensors like the tokens to come, for dtype, device and dimensions.
        format, placement, page_size: as for `PagedLayer`.
        track_positions: whether something evicts, so that slots and positions part ways.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        format: FormatSpec,
        placement: Placement,
        page_size: int,
        track_positions: bool,
    ) -> None:
        formats = [FORMATS["native"], format] if format.native_pages else [format]
        self.segments = [Segment(keys, values, spec, placement, page_size, track_positions) for spec in formats]
        self.page_size = page_size
        self._native_slots = format.native_pages * page_size
        self.lock = threading.RLock()  # shared with forks, as the pages are

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, lock=threading.RLock())

    def __copy__(self) -> "SealedTokens":
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    @property
    def slots(self) -> int:
        return sum(segment.slots for segment in self.segments)

    @property
    def has_null(self) -> bool:
        """Whether some row and head lacks a page that others have."""
        return any(segment.table.has_null for segment in self.segments)

    def missing(self) -> torch.Tensor:
        """Bool `[rows, heads, slots]`: slots of pages that are not there."""
        return self._joined([segment.missing() for segment in self.segments], dim=-1)

    def view(self) -> list[PageView]:
        """All pages as the operations read them, a view for each segment that has any."""
        return [segment.view() for segment in self.segments if segment.slots]

    def read(self, kind: str, rows=slice(None), dtype: torch.dtype | None = None) -> torch.Tensor:
        """`"keys"` or `"values"` of every slot (of `rows`), decoded; zeros where there is no page."""
        return self._joined([segment.read(kind, rows, dtype) for segment in self.segments], dim=-2)

    def slot_positions(self, rows=slice(None)) -> torch.Tensor:
        """Int32 `[rows, heads, slots]`, `NO_TOKEN` where a slot is empty. Only with `track_positions`."""
        return self._joined([segment.slot_positions(rows) for segment in self.segments], dim=-1)

    @alone
    def append(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None, copies: int = 1) -> None:
        """Seal whole pages of tokens behind those there are.

        Args:
            keys, values: `[rows, heads, n * page_size, dim]`.
            positions: int `[rows, heads, n * page_size]`, `NO_TOKEN` for padding; pages of padding alone are not
                stored. `None` if nothing is padding (and positions are not tracked).
            copies: rows come in groups of so many that hold the same tokens; a group shares the pages of its first.
        """
        *native, last = self.segments
        room = self._native_slots - native[0].slots if native and not last.slots else 0
        written = []  # all are encoded before any is entered: tokens that cannot be encoded leave no trace
        for segment, run in ((self.segments[0], slice(None, room)), (last, slice(room, None))):
            if keys[:, :, run].shape[2]:
                kept = None if positions is None else positions[:, :, run]
                written.append((segment, segment.write(keys[:, :, run], values[:, :, run], kept, copies)))
        for segment, ids in written:
            segment.table.append(ids)

    @alone
    def repack(self, keys, values, positions, keep: torch.Tensor, rows: torch.Tensor | None = None, copies: int = 1):
        """Make the kept tokens, in order, the only ones. The last page of a row and head may be part empty.

        Args:
            keys, values, positions: `[rows, heads, n, dim]` (twice) and `[rows, heads, n]`.
            keep: bool `[rows, heads, n]`.
            rows: the numbers of the rows that these are; the others stay as they are. All, if not given.
            copies: as for `append`.
        """
        counts = keep.sum(-1, keepdim=True)
        slots = -(-int(counts.max()) // self.page_size) * self.page_size
        order = torch.argsort((~keep).to(torch.int8), dim=-1, stable=True)
        order = pad(order, (0, max(0, slots - order.shape[-1])))[..., :slots]
        filled = torch.arange(slots, device=keep.device) < counts
        positions = positions.gather(-1, order).masked_fill(~filled, NO_TOKEN)
        keys, values = (
            tokens.gather(2, order[..., None].expand(-1, -1, -1, tokens.shape[-1])).masked_fill(~filled[..., None], 0)
            for tokens in (keys, values)
        )
        if rows is None:
            for segment in self.segments:
                segment.table.truncate(0)  # what was evicted may be written over
            self.append(keys, values, positions, copies)
            return
        start = 0
        for segment, length in zip(self.segments, [self._native_slots, slots][-len(self.segments) :]):
            run = slice(start, start + length)
            segment.replace_rows(rows, keys[:, :, run], values[:, :, run], positions[:, :, run])
            start += length

    @alone
    def drop_empty(self, keep: torch.Tensor) -> bool:
        """Drop the pages of which `keep [rows, heads, slots]` holds no slot; whether there were any."""
        kept = keep.split([segment.slots for segment in self.segments], dim=-1)
        return any([segment.drop_empty(part) for segment, part in zip(self.segments, kept)])

    @alone
    def truncate(self, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keep the first `slots` slots. A page that is cut through is given back: keys, values, which are padding."""
        cut = slice(slots // self.page_size * self.page_size, slots)
        keys, values = self.read("keys")[:, :, cut].clone(), self.read("values")[:, :, cut].clone()
        padding = None
        if self.segments[-1].positions is not None:
            padding = self.slot_positions()[:, 0, cut] == NO_TOKEN
        for segment in self.segments:
            columns = min(segment.table.columns, slots // self.page_size)
            segment.table.truncate(columns)
            slots -= columns * self.page_size
        return keys, values, padding

    @alone
    def select_rows(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was."""
        for segment in self.segments:
            segment.table.select_rows(index)

    @alone
    def fork(self) -> "SealedTokens":
        """The same tokens once more, by the same pages."""
        twin = copy.copy(self)
        twin.segments = [segment.fork() for segment in self.segments]
        return twin

    def _joined(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
