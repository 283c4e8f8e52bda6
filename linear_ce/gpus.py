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
    "b200": GPU(100, 148, 8.0e12, 126 * MIB),  # SXM
    "h100": GPU(90, 132, 3.35e12, 50 * MIB),  # SXM
    "h200": GPU(90, 132, 4.8e12, 60 * MIB),
    "l40s": GPU(89, 142, 0.864e12, 96 * MIB),
    "rtx4090": GPU(89, 128, 1.01e12, 72 * MIB),
    "rtx5090": GPU(120, 170, 1.79e12, 96 * MIB),
}


ALIKE = ((120, "rtx5090"), (100, "b200"), (90, "h100"), (81, "l40s"), (0, "a100"))  # by the least capability


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
    capability 8.0 or an unknown one (0), as an "l40s" with 8.6 to 8.9, as an "h100" with 9.0, as a "b200" with 10.0 to
    11.0, and as an "rtx5090" with 12.0 or later. This only affects how fast a call runs and how often its sums are
    rounded.

    Args:
        reported: `torch.cuda.get_device_name` or JAX's `device_kind`; "" if unknown.
        capability: compute capability, 80 is 8.0.

    Example:
        >>> known_gpu("NVIDIA H200", 90), known_gpu("NVIDIA H20", 90), known_gpu("NVIDIA GB10", 121)
        ('h200', 'h100', 'rtx5090')
    """
    words = re.split(r"[^a-z0-9]+", reported.lower())
    names = {*words, *(first + second for first, second in itertools.pairwise(words))}  # "rtx 4090" is "rtx4090"
    found = next((name for name, gpu in GPUS.items() if name in names and capability in (0, gpu.capability)), None)
    return found or next(name for least, name in ALIKE if capability >= least)


# For `share_added_in_l2`: shares, each with the fewest rows of a chunk that it is used for.
SHARES_IN_L2 = {"h100": ((768, 1.0),), "h200": ((1, 0.5), (512, 1.0), (1025, 0.0))}


def share_added_in_l2(rows: int, gpu: str) -> float:
    """Returns the share of a tile of d_weight that a Hopper kernel adds to the old tile in L2, by TMA's reductions.

    The rest of the old tile is loaded through shared memory and added in registers. Compared with loading all of it
    (benchmarks/experiments.md):

    - On an H200 the kernel of core_triton is 4 to 11% faster with 384 to 1,024 rows, that of jax_pallas 3 to 9%, and
      both at most 2.5% with more. L2 adds at most 1.2 TB/s. Adding whole tiles of fewer than 512 rows would need more
      than that, so half of each tile is loaded. Fewer than 384 rows were not measured.
    - On an H100 the kernel of core_triton is 4 to 10% faster with 768 to 2,048 rows (Qwen with 768 rows is 2% slower),
      that of jax_pallas 0 to 3%. Whole tiles of fewer rows are slower. More than 2,048 rows were not measured.

    An addition in L2 also rounds the sums of the chunk. In plan A this increases the error of the classes that are no
    row's target, by 9% with 8 equal chunks and by up to 16% with fewer. The terms of the targets are added at the end.
    In plan C d_weight includes them, so there it increases the error of all classes. An H200 loads the old tile of
    large chunks, because the gain is small there. Both frameworks use the same shares.

    Args:
        rows: of the chunk.
        gpu: name in `GPUS`.
    """
    return next((share for fewest, share in reversed(SHARES_IN_L2.get(gpu, ())) if rows >= fewest), 0.0)


def most_added_in_l2(rows: int, gpu: str) -> float:
    """Returns the largest share of `share_added_in_l2` for chunks of at most `rows` rows."""
    return max((share for fewest, share in SHARES_IN_L2.get(gpu, ()) if fewest <= rows), default=0.0)
