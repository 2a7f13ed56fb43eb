"""Rows that begin alike run side by side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h3store.batch.order import SHARED_PREFIX_CHARS, by_shared_prefix

DOC_A = "a" * SHARED_PREFIX_CHARS
DOC_B = "b" * SHARED_PREFIX_CHARS


def test_documents_are_brought_together_in_order_of_first_appearance() -> None:
    texts = [DOC_B + "1", "short", DOC_A + "1", DOC_B + "0", DOC_A + "2"]
    assert by_shared_prefix(texts) == [3, 0, 1, 2, 4]


def test_rows_that_share_nothing_keep_their_order() -> None:
    assert by_shared_prefix(["z", "y", "x"]) == [0, 1, 2]


@given(st.lists(st.sampled_from([DOC_A, DOC_B, DOC_A + "x", "q", ""]), max_size=12))
def test_every_row_runs_once(texts: list[str]) -> None:
    assert sorted(by_shared_prefix(texts)) == list(range(len(texts)))
