"""Corpora, tokenizers, chat templates and batches."""
