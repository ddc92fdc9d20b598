"""Workloads: what is run and timed, one per file."""
