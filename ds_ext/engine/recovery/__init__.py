"""Snapshots in host memory: written after every step, and loaded when the launcher restarts the ranks."""
