"""Timing, memory and quality: how a figure comes about."""
