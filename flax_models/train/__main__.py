"""Entry point of `python -m flax_models.train`."""

import sys

try:
    from flax_models.train.main import main
except KeyboardInterrupt:  # the imports take seconds
    sys.exit(130)

sys.exit(main())
