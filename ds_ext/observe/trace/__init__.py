"""Traces of a run: format, merge, summary and page. See docs/report.md.

This package does not import torch. ``ds_ext/engine/tracing/recorder.py`` records the events.
"""
