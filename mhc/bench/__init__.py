"""Timing, peers, hardware limits and the records that every figure is redrawn from."""
