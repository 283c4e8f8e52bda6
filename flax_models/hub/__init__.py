"""Reads and writes Hugging Face folders: config.json, weights and adapters."""
