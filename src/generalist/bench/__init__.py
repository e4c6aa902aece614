"""Benchmarks: how fast training and evaluation run here, compared with the machine's own limits."""
