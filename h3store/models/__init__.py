"""The compact decoder: checkpoints in, tokens out. Owns model code; leaves storage to kv, store and archive."""
