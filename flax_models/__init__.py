"""A Flax decoder and its training loop, with the losses of `jax_pallas`.

Four packages, each of which imports only those before it: `model` (the decoder, adapters, sampling), `hub` (Hugging
Face folders), `data` (corpora, tokens, batches) and `train` (the trainer). Importing this package loads none of them.

It needs JAX, Flax and the libraries of the trainer: `pip install "linear-ce[flax]"`. The commands are
`python -m flax_models.train`, `python -m flax_models.generate` and `python -m flax_models.export`.
"""
