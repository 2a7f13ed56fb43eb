"""h3store: torch tensors larger than memory, and a long-context decoder on top."""
