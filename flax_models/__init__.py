"""A Flax decoder and its training loop, with the losses of `jax_pallas`.

There are four subpackages: `model` (the decoder, adapters, sampling), `hub` (Hugging Face folders), `data` (corpora,
tokens, batches) and `train` (the trainer). Each imports only the ones before it. Importing `flax_models` imports none
of them.

The package needs JAX, Flax and the trainer's dependencies: `pip install "linear-ce[flax]"`. The commands are
`python -m flax_models.train`, `python -m flax_models.generate` and `python -m flax_models.export`.
"""

import importlib.util
import sys

from linear_ce import __version__ as __version__

NEEDED = (
    *("jax", "flax", "grain", "jinja2", "matplotlib", "optax", "orbax", "rich"),
    *("safetensors", "tensorboardX", "tokenizers", "tyro"),
)

if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    message = f'flax_models needs {", ".join(missing)}: pip install "linear-ce[flax]"'
    if sys.argv[:1] == ["-m"]:  # Python is locating the module of `python -m flax_models.COMMAND`
        sys.exit(f"error: {message}")
    raise ImportError(message)
