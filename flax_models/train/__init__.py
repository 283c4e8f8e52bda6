"""Training: `python -m flax_models.train`."""
