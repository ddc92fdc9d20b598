"""Models: one source per file, each a frozen dataclass whose fields are its YAML keys."""
