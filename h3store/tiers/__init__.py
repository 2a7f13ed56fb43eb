"""The tiers that hold bytes. Owns how blocks of one tier are opened over another: host memory over archive files."""

from __future__ import annotations

from h3store.tiers.ddr import open_range
from h3store.tiers.nvme import ScratchFile, file_handle

__all__ = ["ScratchFile", "file_handle", "open_range"]
