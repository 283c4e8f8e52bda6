"""How tests have JAX compile."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles with few optimisations: the tests' programs run for milliseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
