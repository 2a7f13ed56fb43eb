"""A whole batch, read and checked. Owns what holds between rows: blank lines, and custom_ids that are unique."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from h3store.batch.render import error_row
from h3store.batch.request import Request, custom_id_of, decode_row, parse
from h3store.errors import RequestError, UsageError


@dataclass
class Rows:
    """A batch, read and checked.

    Attributes:
        requests: rows that can be served, in file order.
        errors: result rows of those that can't.
    """

    requests: list[Request] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)


def read_rows(source: Iterable[tuple[int, str | bytes | Mapping[str, Any]]]) -> Rows:
    """Checks every row of a batch.

    Args:
        source: (line number, row) pairs; a row is a line of JSON or its object. Blank lines are skipped.

    Raises:
        UsageError: two rows have the same custom_id; the message names both lines.
    """
    rows = Rows()
    seen: dict[str, int] = {}
    for line, item in source:
        if isinstance(item, str | bytes) and not item.strip():
            continue
        custom_id = None
        try:
            row = item if isinstance(item, Mapping) else decode_row(item)
            custom_id = custom_id_of(row)
            if custom_id in seen:
                raise UsageError(f"custom_id {custom_id!r} is on line {seen[custom_id]} and on line {line}; "
                                 "each row needs one of its own")
            seen[custom_id] = line
            rows.requests.append(parse(row, line))
        except RequestError as error:
            rows.errors.append(error_row(error, custom_id, line))
    return rows
