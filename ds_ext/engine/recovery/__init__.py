"""Snapshots in host memory: written for every step, and loaded when the launcher restarts the ranks."""
