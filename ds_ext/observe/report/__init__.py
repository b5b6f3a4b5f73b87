"""Report of a run: one page from its metrics, its record and its traces. Imports no torch."""
