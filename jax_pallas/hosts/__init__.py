"""Adapters of the fused loss to other libraries' models and trainers. Each file is independent of the other hosts, and
importing this package imports none of them."""
