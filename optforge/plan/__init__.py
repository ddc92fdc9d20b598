"""The plan: order, conflicts, downgrades, sizes and predictions, before any weight is loaded."""
