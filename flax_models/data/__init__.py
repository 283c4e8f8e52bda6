"""Corpora, tokens and chat templates, and the batches that are made of them."""
