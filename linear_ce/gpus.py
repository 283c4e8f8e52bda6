"""GPUs by name: what a plan depends on, so that it can be made without the GPU."""

import itertools
import re
from typing import NamedTuple

from linear_ce.spec import check_choice


class GPU(NamedTuple):
    """The properties of a GPU that a plan depends on."""

    capability: int  # compute capability: 80 is 8.0
    multiprocessors: int
    bandwidth: float  # of device memory, bytes per second
    l2_bytes: int


MIB = 2**20

GPUS = {
    "a100": GPU(80, 108, 2.04e12, 40 * MIB),  # 80 GB, SXM
    "h100": GPU(90, 132, 3.35e12, 50 * MIB),  # SXM
    "h200": GPU(90, 132, 4.8e12, 60 * MIB),
    "l40s": GPU(89, 142, 0.864e12, 96 * MIB),
    "rtx4090": GPU(89, 128, 1.01e12, 72 * MIB),
}


def gpu_named(name: str) -> GPU:
    """Returns the properties of a GPU.

    Raises:
        ValueError: no such name. The message names those that are known.
    """
    return GPUS[check_choice("device", name, tuple(GPUS))]


def known_gpu(reported: str, capability: int) -> str:
    """Returns the name in `GPUS` whose bandwidth, L2 and `cost_coefficients.COEFFICIENTS` stand for a device.

    The device is one of `GPUS` if the name that its driver reports contains that name as a word: "NVIDIA H100 80GB
    HBM3" is an "h100", and "NVIDIA GeForce RTX 4090" an "rtx4090". Any other device counts as an "a100" with compute
    capability 8.0 or an unknown one (0), as an "l40s" with 8.6 to 8.9, and as an "h100" with 9.0 or later. This only
    affects how fast a call runs.

    Args:
        reported: `torch.cuda.get_device_name` or JAX's `device_kind`; "" if unknown.
        capability: compute capability, 80 is 8.0.

    Example:
        >>> known_gpu("NVIDIA H200", 90), known_gpu("NVIDIA H20", 90), known_gpu("NVIDIA RTX A1000", 86)
        ('h200', 'h100', 'l40s')
    """
    words = re.split(r"[^a-z0-9]+", reported.lower())
    names = {*words, *(first + second for first, second in itertools.pairwise(words))}  # "rtx 4090" is "rtx4090"
    found = next((name for name, gpu in GPUS.items() if name in names and capability in (0, gpu.capability)), None)
    return found or ("h100" if capability >= 90 else "l40s" if capability > 80 else "a100")
