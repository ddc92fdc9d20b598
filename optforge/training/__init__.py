"""One training step and what it needs: data in an order that can be stored, losses, optimizers, settings of a model's training."""
