"""The command line. Owns parsing, printing and exit codes; the work is done below.

Exit codes: 0 done; 1 finished with error rows; 2 usage or bad input before work began; 3 storage or integrity error;
130 or 143 interrupted. Data goes to stdout, progress and errors to stderr. H3STORE_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

from h3store.cli.app import main

__all__ = ["main"]
