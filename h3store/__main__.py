"""`python -m h3store`."""

from __future__ import annotations

from h3store.cli import main

raise SystemExit(main())
