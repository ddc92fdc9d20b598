"""Backends: one adapter per family of devices."""
