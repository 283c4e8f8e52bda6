"""Which tiles of a matmul its last programs leave to the others, because a collective beside it holds their
multiprocessors.

A persistent matmul has a program on each multiprocessor, and each program has the same number of tiles. A collective
that begins first holds some multiprocessors until it ends. The last programs, as many as these multiprocessors, begin
only then, and would end last. So they have no tile of the first rounds.

The numbers below were measured on two GPUs, and count for all Hopper GPUs, groups and networks. Where they are wrong,
programs are idle for some rounds. Results are the same.
"""

from typing import NamedTuple

from linear_ce.chunk_cost import WIDEST
from linear_ce.cost_coefficients import CostCoefficients

# Of NCCL 2.28 on two H200s connected by NVLink, beside a matmul: the sum of 2,048 rows of 4,096 float32 takes 0.21 ms.
BLOCKS = 24  # multiprocessors
LATENCY_NS = 20e3
BYTES_PER_NS = 170.0  # that a GPU sends

ROUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # a kernel is compiled for each of them


class LateStart(NamedTuple):
    """How programs that begin late share the tiles of a matmul with the others.

    In a round each program has a tile. In the first `rounds` rounds the last `programs` programs have none.
    """

    programs: int
    rounds: int


AT_ONCE = LateStart(0, 0)


def late_start(
    sent: float, rows: int, tiles: int, *, classes: int, programs: int, coefficients: CostCoefficients
) -> LateStart:
    """Returns how the programs of d_weight begin beside a collective.

    Args:
        sent: bytes that each GPU sends. 0: there is no collective.
        rows: that the matmul adds up.
        tiles: of 128 columns of D by `classes` classes.
        programs: of the matmul, one for each multiprocessor.
        coefficients: of the framework's kernels on the GPU.
    """
    late = min(BLOCKS, programs // 2)
    if not sent or not late:
        return AT_ONCE
    tile_ns = (coefficients.multiply * rows + coefficients.d_weight_tile) * classes / WIDEST
    lasts, most = (LATENCY_NS + sent / BYTES_PER_NS) / tile_ns, tiles // (programs - late)
    rounds = min((rounds for rounds in ROUNDS if rounds <= most), key=lambda rounds: abs(rounds - lasts))
    return LateStart(late, rounds) if rounds else AT_ONCE
