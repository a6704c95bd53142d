"""Pages as integers: which are free, which sequence and head names which. Nothing here knows what a page holds.

A page is free when no block table of its pool names it. That is found out by mark and sweep when the pool runs short,
so sharing pages (beams, forks, expanded prompts) is nothing but copying table entries.
"""

from weakref import WeakSet

import torch

NULL_PAGE = -1  # a table entry that holds no page: padding, or a row shorter than the longest


class PagePool:
    """Hands out page numbers `0 .. capacity - 1` and takes back those that no block table names any more."""

    def __init__(self) -> None:
        self.capacity = 0
        self._free = torch.empty(0, dtype=torch.int64, device="cpu")
        self._tables: WeakSet[BlockTable] = WeakSet()

    @property
    def nbytes(self) -> int:
        return self._free.untyped_storage().nbytes()

    def __getstate__(self) -> dict:
        return {**vars(self), "_tables": list(self._tables)}  # weak references cannot be pickled

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _tables=WeakSet(state["_tables"]))

    def new_table(self, rows: int, heads: int, device: torch.device | str = "cpu") -> "BlockTable":
        """An empty block table whose entries keep pages of this pool alive."""
        return self.adopt(BlockTable(rows, heads, device))

    def adopt(self, table: "BlockTable") -> "BlockTable":
        """Count `table` among those that keep pages alive."""
        self._tables.add(table)
        return table

    def allocate(self, count: int) -> torch.Tensor:
        """`count` page numbers (int64, CPU). Sweeps, then grows `capacity`, when too few are free.

        The caller enters them in a table before allocating again, and resizes its storage to `capacity`.
        """
        if count > self._free.numel():
            self.sweep()
        if count > self._free.numel():
            self._grow(count - self._free.numel())
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def sweep(self) -> None:
        """Mark what the tables name; everything else is free, lowest numbers first."""
        free = torch.ones(self.capacity, dtype=torch.bool, device="cpu")
        for table in self._tables:
            free[table.named()] = False
        self._free = free.nonzero().flatten()

    def live(self) -> torch.Tensor:
        """The distinct pages named by any table (int64, CPU)."""
        return self._places()[0]

    def unshared(self) -> torch.Tensor:
        """The pages that stand in one place only of the pool's tables (int64, CPU)."""
        pages, places = self._places()
        return pages[places == 1]

    def shared(self, table: "BlockTable") -> int:
        """How many of the pages that `table` names stand in more than one place of the pool's tables."""
        pages, places = self._places()
        return int(torch.isin(pages[places > 1], table.named()).sum())

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        named = [table.named() for table in self._tables]
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.unique(torch.cat(named) if named else empty, return_counts=True)

    def _grow(self, missing: int) -> None:
        # A sixteenth of slack: few regrowths, and never much more memory than the pages in use.
        added = max(missing, self.capacity // 16)
        fresh = torch.arange(self.capacity, self.capacity + added, device="cpu")
        self._free = torch.cat([self._free, fresh])
        self.capacity += added


class BlockTable:
    """The pages of every sequence and KV head, in order: `ids[row, head, column]`, int32, `NULL_PAGE` where none.

    Columns `0 .. columns - 1` are in use. All rows are appended to together; a row with fewer pages has null entries.
    """

    def __init__(self, rows: int, heads: int, device: torch.device | str = "cpu") -> None:
        self._ids = torch.full((rows, heads, 0), NULL_PAGE, dtype=torch.int32, device=device)
        self._used: torch.Tensor | None = None  # `ids`, asked for at every step, made anew only when it changes
        self.columns = 0
        self.has_null = False

    @property
    def ids(self) -> torch.Tensor:
        """The entries in use, int32 `[rows, heads, columns]`. A view: do not write to it."""
        if self._used is None:
            self._used = self._ids[:, :, : self.columns]
        return self._used

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes

    def named(self) -> torch.Tensor:
        """Every page number entered, duplicates included (int64, CPU, flat)."""
        flat = self.ids.flatten().to("cpu", torch.int64)
        return flat[flat != NULL_PAGE] if self.has_null else flat

    def append(self, ids: torch.Tensor) -> None:
        """Add columns `ids [rows, heads, n]` behind those in use."""
        added = ids.shape[-1]
        if self.columns + added > self._ids.shape[-1]:
            room = self.columns + max(added, self.columns // 2, 4)
            grown = self._ids.new_full((*self._ids.shape[:2], room), NULL_PAGE)
            grown[:, :, : self.columns] = self.ids
            self._ids = grown
        self._ids[:, :, self.columns : self.columns + added] = ids
        self.columns, self._used = self.columns + added, None
        self.has_null = self.has_null or bool((ids == NULL_PAGE).any())

    def truncate(self, columns: int) -> None:
        """Forget all but the first `columns` columns."""
        self._ids[:, :, columns:] = NULL_PAGE
        self.columns, self._used = min(columns, self.columns), None
        self._look_for_null()

    def replace(self, ids: torch.Tensor) -> None:
        """Make `ids [rows, heads, n]` the whole table."""
        ids = ids.clone()  # it may be a view of what is forgotten now
        self.truncate(0)
        self.append(ids)

    def replace_rows(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Make `ids [len(rows), heads, n]` all the entries of these rows; no row has gaps then."""
        columns = max(self.columns, ids.shape[-1])
        whole = self._ids.new_full((*self._ids.shape[:2], columns), NULL_PAGE)
        whole[:, :, : self.columns] = self.ids
        whole[rows] = NULL_PAGE
        whole[rows, :, : ids.shape[-1]] = ids
        self.replace(whole)
        self.drop(whole == NULL_PAGE)

    def drop(self, doomed: torch.Tensor) -> None:
        """Remove the entries where `doomed [rows, heads, columns]` (bool), closing the gaps; order is kept."""
        ids = self.ids.masked_fill(doomed, NULL_PAGE)
        order = torch.argsort((ids == NULL_PAGE).to(torch.int8), dim=-1, stable=True)
        ids = ids.gather(-1, order)
        longest = int((ids != NULL_PAGE).sum(-1).max()) if ids.numel() else 0
        self.replace(ids[:, :, :longest])

    def select_rows(self, index: torch.Tensor) -> None:
        """Row `i` becomes a copy of what row `index[i]` was; the number of rows becomes `len(index)`."""
        self._ids, self._used = self._ids.index_select(0, index.to(self._ids.device)), None
        self._look_for_null()

    def copy(self) -> "BlockTable":
        """An independent table with the same entries (share its pages by `PagePool.adopt`)."""
        twin = BlockTable(*self._ids.shape[:2], device=self._ids.device)
        twin._ids, twin.columns, twin.has_null = self._ids.clone(), self.columns, self.has_null
        return twin

    def _look_for_null(self) -> None:
        self.has_null = self.has_null and bool((self.ids == NULL_PAGE).any())
