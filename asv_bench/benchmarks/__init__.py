"""Benchmarks by public area. A name says what is warm: time_warm_* has its blocks resident, time_cold_* has none."""
