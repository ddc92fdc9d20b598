"""Reports: strict JSON, Markdown, one HTML page, and what the terminal shows."""
