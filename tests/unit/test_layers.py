"""Imports point down, and the public surface stays small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import h3store

PACKAGE = Path(h3store.__file__).parent
# Row of each module or folder directly under the package; a row imports only rows below it.
ROWS = {
    "__main__": 11,
    "cli": 10,
    "batch": 9, "report": 9, "doctor": 9, "tune": 9, "integrations": 9, "demo": 9,
    "models": 8,
    "kv": 7, "modules": 7, "packed": 7,
    "hbf": 6, "store": 6,
    "tensor": 5, "residency": 5,
    "tiers": 4,
    "archive": 3,
    "pager": 2, "signals": 2, "codec": 2, "attention": 2,
    "_ffi": 1,
    "units": 0, "metrics": 0, "console": 0, "version": 0,
    "errors": -1,  # the tree stands below all, so that row 0 can raise
}  # fmt: skip
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def unit_of(name: str) -> str:
    """h3store.kv.pool -> kv; h3store -> empty, the facade."""
    return [*name.split("."), ""][1]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of ours that a file imports, those only for type checks included: they couple just as much."""
    here = ["h3store", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "h3store")
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "h3store":
                yield from ((f"h3store.{alias.name}", node.lineno) for alias in node.names)
            elif module.split(".")[0] == "h3store":
                yield module, node.lineno


def test_every_module_has_a_row() -> None:
    units = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert units <= ROWS.keys()
    assert {"cli", "batch", "models", "errors"} <= units


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name, line in imports_of(path):
        theirs = unit_of(name)
        if theirs == mine or theirs == "_native":
            assert theirs != "_native" or mine == "_ffi", f"{path}:{line}: only _ffi imports the compiled module"
            continue
        assert theirs in ROWS, f"{path}:{line} imports {name}: name the module, not the package's facade"
        assert ROWS[theirs] < ROWS[mine], (
            f"{path}:{line}: {mine} (row {ROWS[mine]}) imports {theirs} (row {ROWS[theirs]})")


def test_the_facade_is_small_and_whole() -> None:
    assert 0 < len(h3store.__all__) <= 15
    for name in h3store.__all__:
        assert getattr(h3store, name) is not None
