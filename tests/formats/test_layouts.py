"""The examples of docs/layouts.md, run."""

import doctest
from pathlib import Path


def test_the_worked_example():
    page = Path(__file__).parents[2] / "docs" / "layouts.md"
    result = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert result.attempted > 10
    assert result.failed == 0
