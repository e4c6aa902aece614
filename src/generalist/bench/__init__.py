"""Measuring instruments: how fast training and evaluation run here, beside the machine's own limits."""
