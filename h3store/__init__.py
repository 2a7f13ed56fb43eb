"""h3store: torch tensors larger than memory, and a long-context decoder on top.

    import h3store
    h3store.save(model.state_dict(), "weights.h3")
    weights = h3store.load("weights.h3", ddr_bytes="256MiB")     # lazy, read-only torch tensors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from h3store.errors import H3Error
from h3store.version import __version__ as __version__

if TYPE_CHECKING:
    from h3store import batch
    from h3store.models.decode import Decoder
    from h3store.modules import attach
    from h3store.store import Store, load, open, pin, prefetch, save
    from h3store.tensor import TieredTensor

__all__ = ["Decoder", "H3Error", "Store", "TieredTensor", "attach", "batch", "load", "open", "pin", "prefetch", "save"]

# Names that come with torch, or with the decoder's own imports: loaded when first asked for, so that the command line
# answers at once.
_HOMES = {"Decoder": "models.decode", "TieredTensor": "tensor", "attach": "modules"} | dict.fromkeys(
    ("Store", "load", "open", "pin", "prefetch", "save"), "store")


def __getattr__(name: str) -> Any:
    """Returns a public name, importing its module on first use."""
    if name == "batch":
        return importlib.import_module("h3store.batch")
    if name not in _HOMES:
        raise AttributeError(f"module 'h3store' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"h3store.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
