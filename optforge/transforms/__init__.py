"""Transforms: one kind per file, each a frozen dataclass whose fields are its YAML keys."""
