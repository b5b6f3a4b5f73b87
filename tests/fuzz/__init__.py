"""Fuzzer that compares random pipeline jobs with a training loop in one process."""
