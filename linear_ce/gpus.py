"""GPUs by name, so that a plan can be made without the GPU."""

from typing import NamedTuple

from linear_ce.spec import check_choice


class GPU(NamedTuple):
    """The properties of a GPU that a plan depends on."""

    capability: int  # compute capability: 80 is 8.0
    multiprocessors: int


GPUS = {
    "a100": GPU(80, 108),
    "h100": GPU(90, 132),  # SXM
    "h200": GPU(90, 132),
    "l40s": GPU(89, 142),
    "rtx4090": GPU(89, 128),
}


def gpu_named(name: str) -> GPU:
    """Returns the properties of a GPU.

    Raises:
        ValueError: no such name. The message names those that are known.
    """
    return GPUS[check_choice("device", name, tuple(GPUS))]
