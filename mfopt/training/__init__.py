"""The bundled trainer: user-level differentially private training with correlated noise."""
