"""Language models, and the interface that any model of a user's own meets."""

from mfopt.training.models.model import Model, PyTree, next_token_loss, num_targets

__all__ = ["Model", "PyTree", "next_token_loss", "num_targets"]
