"""Writes a reference page for every public module into the current folder."""

from __future__ import annotations

import pkgutil
import pydoc

import h3store

for module in pkgutil.walk_packages(h3store.__path__, "h3store."):
    if not module.name.rsplit(".", 1)[-1].startswith("_"):
        pydoc.writedoc(module.name)
pydoc.writedoc("h3store")
