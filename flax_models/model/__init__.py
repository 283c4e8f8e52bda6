"""The decoder, its adapters, and text drawn from it. Needs jax and flax; the losses are of `jax_pallas`."""
