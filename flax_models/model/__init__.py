"""The decoder, its adapters and text generation. Requires jax and flax; the losses are in `jax_pallas`."""
