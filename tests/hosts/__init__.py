"""Hosts on one machine, for tests that need several: `python -m tests.hosts 3` opens a shell on the first of three."""
