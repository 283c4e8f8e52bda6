"""Entry point of `python -m flax_models.train`."""

import sys

from flax_models.command_line import silent_interrupts

with silent_interrupts():  # the imports take seconds
    from flax_models.train.main import main

sys.exit(main())
