"""A run of pages in one format: encoded once, named by a block table, stored where the placement says."""

import copy
from collections import Counter

import torch

from .formats import FormatSpec, PageFormat
from .ops.decode_attention import PageView
from .ops.gather_pages import gather_pages
from .pages import NULL_PAGE, PagePool
from .placement import Placement

NO_TOKEN = -1  # the position of a slot that holds none


class Segment:
    """Pages of keys and values `[rows, heads, slots, dim]`; slot `s` is in column `s // page_size` of the table.

    Args:
        keys, values: tensors like the tokens to come, for dtype, device and dimensions.
        format, placement, page_size: as for `PagedLayer`.
        track_positions: whether slots and positions part ways (something evicts); if not, slot `s` is position `s`.
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
        self.page_size, self.device = page_size, keys.device
        self.formats = {
            "keys": format.key(page_size, keys.shape[-1], keys.dtype, channel_major=True),
            "values": format.value(page_size, values.shape[-1], values.dtype, channel_major=False),
        }
        # Keys and values share a storage, in which the parts of both need names of their own.
        self._names = {kind: {part: f"{kind}.{part}" for part in pages.parts} for kind, pages in self.formats.items()}
        layout = {self._names[kind][part]: spec for kind, f in self.formats.items() for part, spec in f.parts.items()}
        self.storage = placement.storage(layout, self.device)
        self.pool = PagePool()
        self.table = self.pool.new_table(keys.shape[0], keys.shape[1], self.device)
        self.positions: torch.Tensor | None = None  # int32 [capacity, page_size]
        if track_positions:
            self.positions = torch.empty((0, page_size), dtype=torch.int32, device=self.device)

    @property
    def slots(self) -> int:
        return self.table.columns * self.page_size

    @property
    def bytes_per_page(self) -> int:
        return sum(format.bytes_per_page() for format in self.formats.values())

    def parts(self) -> list[torch.Tensor]:
        """All parts of all pages: those of the keys, in the order of their format, then those of the values."""
        stored = self.storage.view()
        return [stored[name] for names in self._names.values() for name in names.values()]

    def view(self) -> PageView:
        """All pages as the operations read them."""
        parts = self.storage.view()
        return PageView(
            self._parts_of("keys", parts),
            self._parts_of("values", parts),
            *self.formats.values(),
            self.table.ids,
            self.table.has_null,
        )

    def read(self, kind: str, rows=slice(None), dtype: torch.dtype | None = None) -> torch.Tensor:
        """`"keys"` or `"values"` of every slot (of `rows`), decoded; zeros where there is no page.

        In the model's dtype, unless another is given.
        """
        parts = self._parts_of(kind, self.storage.view())
        return gather_pages(self.formats[kind], parts, self.table.ids[rows], dtype)

    def missing(self) -> torch.Tensor:
        """Bool `[rows, heads, slots]`: slots of pages that are not there."""
        return (self.table.ids == NULL_PAGE).repeat_interleave(self.page_size, dim=-1)

    def slot_positions(self, rows=slice(None)) -> torch.Tensor:
        """Int32 `[rows, heads, slots]`, `NO_TOKEN` where a slot is empty. Only with `track_positions`."""
        ids = self.table.ids[rows].long()
        if self.positions.shape[0] == 0:
            return self.positions.new_full((*ids.shape[:2], self.slots), NO_TOKEN)
        found = self.positions[ids.clamp(min=0)]
        if self.table.has_null:
            found = found.masked_fill((ids == NULL_PAGE)[..., None], NO_TOKEN)
        return found.flatten(2)

    def replace_rows(self, rows: torch.Tensor, keys, values, positions: torch.Tensor) -> None:
        """Make whole pages of tokens, given as to `write`, all that the rows numbered `rows` hold."""
        self.table.replace_rows(rows, self.table.ids[rows, :, :0])  # what they held may be written over
        self.table.replace_rows(rows, self.write(keys, values, positions, copies=1))

    def drop_empty(self, keep: torch.Tensor) -> bool:
        """Drop the pages of which `keep [rows, heads, slots]` holds no slot; whether there were any."""
        doomed = ~keep.unflatten(-1, (-1, self.page_size)).any(-1) & (self.table.ids != NULL_PAGE)
        if not bool(doomed.any()):
            return False
        self.table.drop(doomed)
        return True

    def reserve(self, columns: int) -> None:
        """Add columns of pages that hold nothing yet, zeroed: whatever is read of them before they are written."""
        rows, heads, _ = self.table.ids.shape
        numbers = self.pool.allocate(rows * heads * columns)
        self.storage.resize(self.pool.capacity)
        if self.positions is not None:
            self._resize_positions()
            self.positions[numbers.to(self.device)] = NO_TOKEN
        self.table.append(numbers.int().view(rows, heads, columns).to(self.device))
        for part in self.storage.view().values():
            part[numbers.to(part.device)] = torch.zeros((), dtype=part.dtype, device=part.device)

    def put_back(self, parts: list[torch.Tensor]) -> None:
        """Store this table's pages as they are in `parts`: those of the storage before a fork made it grow."""
        if any(part is not stored for part, stored in zip(parts, self.parts())):
            ids, names = self.table.named().unique(), [name for own in self._names.values() for name in own.values()]
            self.storage.write(ids, {name: part[ids.to(part.device)] for name, part in zip(names, parts)})

    def warm_up(self) -> None:
        """Have whatever the formats build when they first encode, before a graph captures that."""
        for format in self.formats.values():
            format.encode(torch.zeros((1, self.page_size, format.dim), dtype=format.dtype, device=self.device))

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the storage and of the tables, by tier."""
        tiers = Counter(self.storage.bytes_by_tier())
        tiers["cpu"] += self.pool.nbytes
        tiers[str(self.device)] += self.table.nbytes + (0 if self.positions is None else self.positions.nbytes)
        return dict(tiers)

    def fork(self) -> "Segment":
        """The same tokens once more, by the same pages."""
        twin = copy.copy(self)
        twin.table = self.pool.adopt(self.table.copy())
        return twin

    def _parts_of(self, kind: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts of `"keys"` or of `"values"`, under the names that their format knows."""
        return {part: parts[name] for part, name in self._names[kind].items()}

    def write(self, keys, values, positions: torch.Tensor | None, copies: int = 1) -> torch.Tensor:
        """Encode tokens into new pages; their numbers, int32 `[rows, heads, n]`, for the caller to enter in the table.

        Args:
            keys, values: `[rows, heads, n * page_size, dim]`.
            positions: int `[rows, heads, n * page_size]`, `NO_TOKEN` for padding; pages of padding alone are not
                stored. `None` if nothing is padding (and positions are not tracked).
            copies: rows come in groups of so many that hold the same tokens; a group shares the pages of its first.
        """
        rows, split = keys.shape[0], (-1, self.page_size)
        keys, values = (tokens[::copies].unflatten(2, split) for tokens in (keys, values))
        shape, filled = keys.shape[:3], None
        keys, values = (tokens.flatten(0, 2) for tokens in (keys, values))
        if positions is None:
            numbers = self.pool.allocate(shape.numel())
            ids = numbers.int().view(shape)
        else:
            positions = positions[::copies].unflatten(2, split)
            held = (positions != NO_TOKEN).any(-1)
            numbers = self.pool.allocate(int(held.sum()))
            ids = torch.full(shape, NULL_PAGE, dtype=torch.int32, device="cpu")
            ids[held.cpu()] = numbers.int()
            # `index_select` copies whole pages; a bool index goes number by number.
            keys, values = (tokens.index_select(0, held.flatten().nonzero()[:, 0]) for tokens in (keys, values))
            positions = positions[held]
            filled = positions != NO_TOKEN
            filled = None if bool(filled.all()) else filled
        self.storage.resize(self.pool.capacity)
        encoded = {}
        for kind, tokens in (("keys", keys), ("values", values)):
            if filled is not None:
                tokens = without_holes(self.formats[kind], tokens, filled)
            parts = self.formats[kind].encode(tokens)
            encoded |= {self._names[kind][part]: codes for part, codes in parts.items()}
        self.storage.write(numbers, encoded)
        if self.positions is not None:
            self._resize_positions()
            self.positions[numbers.to(self.device)] = positions.to(self.positions.dtype)
        return ids.repeat_interleave(rows // ids.shape[0], dim=0).to(self.device)

    def _resize_positions(self) -> None:
        missing = self.pool.capacity - self.positions.shape[0]
        if missing:
            self.positions = torch.nn.functional.pad(self.positions, (0, 0, 0, missing), value=NO_TOKEN)


def without_holes(format: PageFormat, pages: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """`pages [n, page_size, dim]` with slots that are not `filled [n, page_size]` made copies of the first that is.

    Only for formats in which padding and empty slots would widen the range that the tokens share.
    """
    if not format.mixes_tokens:
        return pages
    slots = torch.arange(format.page_size, device=pages.device)
    slots = torch.where(filled, slots, filled.int().argmax(-1, keepdim=True))
    return pages.gather(1, slots[..., None].expand_as(pages))
