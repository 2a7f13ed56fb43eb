"""h3store: torch tensors larger than memory, and a long-context decoder on top.

    import h3store
    h3store.save(model.state_dict(), "weights.h3")
    weights = h3store.load("weights.h3", ddr_bytes="256MiB")     # lazy, read-only torch tensors
"""

from __future__ import annotations

from typing import Any

from h3store.errors import H3Error
from h3store.store import Store, load, open, pin, prefetch, save
from h3store.tensor import TieredTensor

__all__ = ["Decoder", "H3Error", "Store", "TieredTensor", "load", "open", "pin", "prefetch", "save"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Decoder comes with its own imports, which a user of tensors alone does not pay for."""
    if name == "Decoder":
        from h3store.models.decode import Decoder

        return Decoder
    raise AttributeError(f"module 'h3store' has no attribute {name!r}")
