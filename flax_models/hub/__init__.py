"""Hugging Face folders: config.json, weights and adapters, read and written."""
