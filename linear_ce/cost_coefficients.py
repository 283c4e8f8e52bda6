"""The coefficients of the estimate of `chunk_cost.py` for each GPU and framework, fitted to measured times by
`benchmarks.fit_chunk_cost`."""

from typing import NamedTuple


class CostCoefficients(NamedTuple):
    """The coefficients of the kernels of one framework on one GPU."""

    multiply: float  # ns to add one element of the inner dimension to the 128 x 256 sums of a tile
    logits_tile: float  # ns of a tile of 128 x 256 logits that its matmul does not hide: exponentials, sums, the store
    d_weight_tile: float  # ns of a tile of 128 x 256 of d_weight that its matmul does not hide
    narrow: float  # rows: a step of a tile of d_input takes as long as if the tile had this many rows more
    tail: float  # share by which iterations of tails take longer: their programs read other classes
    exposed: float  # share of the time of loading and storing d_weight that the matmul does not hide
    missed: float  # the same share of bytes that are read again because they do not stay in L2
    chunk: float  # us of a chunk's small kernels, and of the gaps between kernels
    call: float  # us of a call's small kernels
    idle: float = 0.0  # at the power limit, the share of the time of idle programs that costs nothing
    padded: float = 0.0  # the same of the time of padded rows
    unlimited: float = 0.0  # ms: of a call of T ms, the share 1 - unlimited / T is at the power limit


# `python -m benchmarks.fit_chunk_cost` fitted those of core_triton on H100 and H200 to results/*/torch-sweep.json, 47
# rows of 7 shapes at 709152b and 52 rows of 5 shapes at 8086098. The chosen rows were at most 0.1% slower than the best
# rows measured, and the estimate within 2.4% (H100) and 1.5% (H200) of the times, root mean square, and within 1.3% and
# 0.7% of those of one shape and budget. On an H100 tiles of 128 rows of d_input are much slower than tiles of 256 rows:
# `narrow` was fitted alone (`--only narrow`) to 336 rows of 162 calls at 8d5edd3 and 09763ba. Of these the chosen rows
# are at most 1.8% slower than the best ones. The estimate is within 6.6% of all of their times, and within 2.2% of
# those of one shape and budget.
# Those of jax_pallas on an H100 were fitted to results/h100/jax-sweep.json, 37 rows of 5 shapes at 12d7150. The
# chosen rows are the best ones measured, or at most 0.7% slower, except for Qwen2.5-0.5B in 512 MiB (3.4%, one run:
# the 20th to 80th percentiles of both rows are 4% to 6% wide). The estimate is within 4.8% of the measured times,
# root mean square, and within 2.4% of those of one shape and budget. Before the fit the plan chose 1,024 rows for
# Gemma 2 2B in 512 MiB, which took 1.103 times the matmuls; 768 rows took 1.022.
# On an H200 those of jax_pallas were fitted to the 15 training rows of results/h200 at 8,192 tokens, of calls with the
# fewest chunks (`--fewest`), whose kernels loaded the whole old d_weight. The estimate is within 2.2% of them, root
# mean square. Later 200 calls were swept (results/h200/jax-sweep.json, e115f66, d086137, 7ec1d18, 00a4107 and dbf6260).
# With `idle`, `padded` and `unlimited` no choice is more than 2% slower than the best row, and the estimate is within
# 1.9% of the times of one shape and budget, root mean square; without them three are, and it is within 2.3%. A fit of
# the other coefficients to the first 191 calls was no better than the present ones.
# `padded` and `unlimited` of core_triton on an H200 change one of the 264 choices of its sweep: Llama's head with
# 65,536 tokens in 256 MiB has 992 rows, not 896, which took 1.025 times as long as 768.
# Of the other GPUs nothing was measured. They have `multiply` by the peak rate of a multiprocessor, at 0.9 of it, and
# the times of a tile in proportion to those that core_triton had on an H200 before the fit (12.5, 2,300 and 200 ns).
H200_JAX = CostCoefficients(12.5, 440.0, 200.0, 16.0, 0.1, 0.3, 0.0, 40.0, 130.0, 0.65, 0.5, 32.0)
A100_ANY = CostCoefficients(25.0, 4600.0, 400.0, 16.0, 0.1, 0.26, 0.0, 60.0, 100.0)
L40S_ANY = CostCoefficients(28.0, 5200.0, 450.0, 16.0, 0.1, 0.26, 0.0, 60.0, 100.0)
RTX4090_ANY = CostCoefficients(56.0, 10300.0, 900.0, 16.0, 0.1, 0.26, 0.0, 60.0, 100.0)
RTX5090_ANY = CostCoefficients(59.0, 10900.0, 940.0, 16.0, 0.1, 0.26, 0.0, 60.0, 100.0)
B200_ANY = CostCoefficients(4.8, 880.0, 77.0, 16.0, 0.1, 0.26, 0.0, 60.0, 100.0)

COEFFICIENTS = {
    ("a100", "torch"): A100_ANY,
    ("a100", "jax"): A100_ANY,
    ("b200", "torch"): B200_ANY,
    ("b200", "jax"): B200_ANY,
    ("h100", "torch"): CostCoefficients(11.8, 1270.0, 417.0, 100.0, 0.054, 0.34, 0.0, 117.0, 0.0),
    ("h100", "jax"): CostCoefficients(11.0, 3540.0, 202.0, 60.4, 0.353, 0.726, 0.0, 76.0, 375.0),
    ("h200", "torch"): CostCoefficients(12.0, 2720.0, 440.0, 16.1, 0.046, 0.74, 0.0, 68.0, 29.0, 0.0, 0.2, 100.0),
    ("h200", "jax"): H200_JAX,
    ("l40s", "torch"): L40S_ANY,
    ("l40s", "jax"): L40S_ANY,
    ("rtx4090", "torch"): RTX4090_ANY,
    ("rtx4090", "jax"): RTX4090_ANY,
    ("rtx5090", "torch"): RTX5090_ANY,
    ("rtx5090", "jax"): RTX5090_ANY,
}
