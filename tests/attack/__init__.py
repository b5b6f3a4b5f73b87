"""Attacks on the life of small jobs: ``python -m tests.attack --minutes 60``."""
