"""The order in which rows run. Pure: texts in, positions out."""

from __future__ import annotations

from collections.abc import Sequence

# Two prompts that agree this far are taken to share a document.
SHARED_PREFIX_CHARS = 1024


def by_shared_prefix(texts: Sequence[str]) -> list[int]:
    """Returns positions ordered so that prompts with a long common beginning follow one another.

    Sorting puts the longest common beginnings side by side; groups then run in the order in which their first row
    came, and rows that share nothing keep their place among them.

    Args:
        texts: one prompt a row, in file order.
    """
    ranked = sorted(range(len(texts)), key=lambda i: (texts[i], i))
    groups: list[list[int]] = []
    for i in ranked:
        if groups and _share(texts[groups[-1][-1]], texts[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [i for group in sorted(groups, key=min) for i in group]


def _share(a: str, b: str) -> bool:
    return len(a) >= SHARED_PREFIX_CHARS and a[:SHARED_PREFIX_CHARS] == b[:SHARED_PREFIX_CHARS]
