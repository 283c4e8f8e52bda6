"""Flax models and training loops over `jax_pallas.linear_ce`; `python -m flax_models.train` trains one.

Importing this package loads nothing: take `flax_models.model`, which needs jax and flax alone, or the parts of the
trainer by their own names.
"""
