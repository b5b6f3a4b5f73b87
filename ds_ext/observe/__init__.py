"""Metrics and traces of a run."""
