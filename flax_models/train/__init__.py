"""The trainer: `python -m flax_models.train`."""
