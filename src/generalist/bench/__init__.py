"""Measuring instruments: how fast training runs here, beside the published code's loop and the machine's own limit."""
