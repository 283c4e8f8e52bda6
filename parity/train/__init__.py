"""One training run in both frameworks, with and without the logits: four loss curves that must be the same."""
