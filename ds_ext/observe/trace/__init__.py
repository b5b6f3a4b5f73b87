"""Timelines of the ranks: written while they train, joined, summed up and drawn afterwards. See docs/traces.md.

Nothing here imports torch; what hooks into an engine is ``ds_ext/engine/tracing/recorder.py``.
"""
