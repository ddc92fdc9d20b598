"""Several processes that work as one: found or started, joined, agreed with, ended together, and resumed from checkpoints."""
