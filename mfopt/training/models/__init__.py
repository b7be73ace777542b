"""Language models, and the interface that any model of a user's own meets."""

from mfopt.training.models.model import Model, next_token_loss, num_targets

__all__ = ["Model", "next_token_loss", "num_targets"]
