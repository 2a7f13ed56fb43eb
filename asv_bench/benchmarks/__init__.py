"""Benchmarks by public area, each with its peers. time_warm_* has its blocks resident, time_cold_* has none; reads,
writes, paging and offload run every contender in a process of its own, and peers prints all of them as one table."""
