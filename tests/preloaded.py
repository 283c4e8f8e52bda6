"""Imports what training processes need, in the process from which tests fork them. It is named "tests.preloaded" there.

tensorboardX imports torch if it is installed, which takes each of them two seconds. Here it does not find torch, as in
an environment for JAX only. matplotlib lists the fonts when it is imported, which takes as long without its cache.
"""

import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))  # the path of the tests is set in forked processes only
sys.modules["torch"] = cast(Any, None)
import tensorboardX  # noqa: E402, F401

del sys.modules["torch"]
import flax_runs  # noqa: E402, F401
import matplotlib.font_manager  # noqa: E402, F401
import orbax.checkpoint  # noqa: E402, F401
import tyro  # noqa: E402, F401
