"""Entry point of `python -m flax_models.train`."""

import sys

from flax_models.train.main import main

sys.exit(main())
