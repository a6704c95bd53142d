"""Block tables and their pool, driven in any order against plain lists."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_kvplus.pages import NULL_PAGE, BlockTable, PagePool


class Pages(RuleBasedStateMachine):
    """Every page that is handed out gets a content of its own; every table must go on naming the contents it was given.

    `tables` pairs each table with what it must hold: `model[row][head]` is a list of contents, `None` where no page is.
    """

    def __init__(self):
        super().__init__()
        self.pool = PagePool()
        self.tables: list[tuple[BlockTable, list]] = []
        self.content_of: dict[int, int] = {}  # what was last written to a page
        self.written = 0
        self.peak = 0

    def pick(self, data):
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    def named(self) -> list[int]:
        """Every table entry that names a page, found by reading the entries one by one."""
        entries = [entry for table, _ in self.tables for entry in table.ids.flatten().tolist()]
        return [entry for entry in entries if entry != NULL_PAGE]

    def write(self, table, columns, data) -> tuple[torch.Tensor, list]:
        """New pages for `columns` columns, with gaps, and the contents that they were given."""
        rows, heads = table.ids.shape[:2]
        gap = st.sampled_from([False, False, False, True])
        gaps = data.draw(st.lists(gap, min_size=rows * columns, max_size=rows * columns))
        held = ~torch.tensor(gaps, dtype=torch.bool).view(rows, 1, columns).expand(-1, heads, -1)
        in_use, before = set(self.named()), self.pool.capacity
        count = int(held.sum())
        numbers = self.pool.allocate(count).tolist()

        assert len(set(numbers)) == count
        assert in_use.isdisjoint(numbers), "a page that a table names was handed out"
        assert all(0 <= number < self.pool.capacity for number in numbers)
        self.peak = max(self.peak, len(in_use) + count)
        assert self.pool.capacity == before or len(in_use) + count > before, "grew although enough pages were free"
        assert self.pool.capacity <= self.peak * 17 / 16

        contents = list(range(self.written, self.written + count))
        self.written += count
        self.content_of.update(zip(numbers, contents))
        ids = torch.full(held.shape, NULL_PAGE, dtype=torch.int32)
        ids[held] = torch.tensor(numbers, dtype=torch.int32)
        names = [[[self.content_of.get(i) for i in head] for head in row] for row in ids.tolist()]
        return ids, names

    @rule(rows=st.integers(1, 3), heads=st.integers(1, 3))
    def new_table(self, rows, heads):
        if len(self.tables) < 5:
            self.tables.append((self.pool.new_table(rows, heads), [[[] for _ in range(heads)] for _ in range(rows)]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), columns=st.integers(1, 5))
    def append(self, data, columns):
        table, model = self.pick(data)
        ids, contents = self.write(table, columns, data)
        table.append(ids)
        for row, added in zip(model, contents):
            for head, more in zip(row, added):
                head.extend(more)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), columns=st.integers(0, 4))
    def replace(self, data, columns):
        table, model = self.pick(data)
        table.truncate(0)  # as repacking does it: what is replaced may be written over
        ids, contents = self.write(table, columns, data)
        table.replace(ids)
        model[:] = contents

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data):
        table, model = self.pick(data)
        columns = data.draw(st.integers(0, table.columns + 1))
        table.truncate(columns)
        model[:] = [[head[:columns] for head in row] for row in model]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop(self, data):
        table, model = self.pick(data)
        flags = data.draw(st.lists(st.booleans(), min_size=table.ids.numel(), max_size=table.ids.numel()))
        doomed = torch.tensor(flags, dtype=torch.bool).view_as(table.ids)
        table.drop(doomed)
        for row, row_doomed in zip(model, doomed.tolist()):
            for head, gone in zip(row, row_doomed):
                head[:] = [content for content, is_gone in zip(head, gone) if not is_gone and content is not None]
        longest = max(len(head) for row in model for head in row)
        for row in model:
            for head in row:
                head.extend([None] * (longest - len(head)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def select_rows(self, data):
        table, model = self.pick(data)
        index = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=4))
        table.select_rows(torch.tensor(index))
        model[:] = [[list(head) for head in model[i]] for i in index]

    @precondition(lambda self: self.tables and len(self.tables) < 5)
    @rule(data=st.data())
    def copy(self, data):
        table, model = self.pick(data)
        self.tables.append((self.pool.adopt(table.copy()), [[list(head) for head in row] for row in model]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget_a_table(self, data):
        del self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @rule()
    def sweep(self):
        self.pool.sweep()

    @invariant()
    def tables_name_their_own_contents(self):
        for table, model in self.tables:
            assert table.ids.shape == (len(model), len(model[0]), len(model[0][0]))
            found = [
                [[None if i == NULL_PAGE else self.content_of[i] for i in head] for head in row]
                for row in table.ids.tolist()
            ]
            assert found == model
            assert table.has_null == any(content is None for row in model for head in row for content in head)
            assert sorted(table.named().tolist()) == sorted(i for i in table.ids.flatten().tolist() if i != NULL_PAGE)

    @invariant()
    def pool_counts_what_is_named(self):
        named = Counter(self.named())
        assert self.pool.live().tolist() == sorted(named)
        for table, _ in self.tables:
            own = set(table.ids.flatten().tolist()) - {NULL_PAGE}
            assert self.pool.shared(table) == sum(named[page] > 1 for page in own)


Pages.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
TestPages = Pages.TestCase


def test_freed_pages_are_reused_before_the_pool_grows():
    pool = PagePool()
    table = pool.new_table(1, 1)
    for _ in range(100):
        table.truncate(0)
        table.append(pool.allocate(8).int().view(1, 1, 8))
    assert pool.capacity == 8


@pytest.mark.parametrize("heads", [1, 8])
def test_capacity_grows_by_a_sixteenth_at_most(heads):
    pool = PagePool()
    table = pool.new_table(1, heads)
    growths = 0
    for column in range(1, 513):
        before = pool.capacity
        table.append(pool.allocate(heads).int().view(1, heads, 1))
        growths += pool.capacity > before
        assert heads * column <= pool.capacity <= heads * column * 17 / 16
    assert growths < 16 + 16 * 5.1  # a factor of 17/16 each once there are sixteen columns: 512 / 16 takes 57
