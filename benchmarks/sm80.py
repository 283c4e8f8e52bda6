"""A proxy for GPUs of compute capability 8.x: `python -m benchmarks.sm80`, with the options of `benchmarks.linear_ce`.

Measures core_triton's kernels for compute capability 8.x (`implementation="triton_sm80"`) on a newer GPU. In this
process the matmuls of the floor run with cuBLAS's own kernels for sm_80. So both sides use the instructions that an
A100 has (mma.sync and cp.async), and the ratio shows how our kernels compare with those of cuBLAS. The times say
nothing about an A100.
"""

import ctypes
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import linear_ce, results

CODE = results.ROOT / "benchmarks" / "sm80.py"  # rows depend on it too
FLOOR = "cuBLAS, sm_80"  # in the rows, which therefore replace no row of `benchmarks.linear_ce`
FOR_SM80 = re.compile(r"sm80|ampere|cutlass_80|s16816")  # in the names of cuBLAS's kernels
NEWER = re.compile(r"sm90|sm100|nvjet|hopper|wgmma")
LEAST = 2**24  # elements of the three matrices: smaller matmuls stay with PyTorch
WORKSPACE = 2**25  # bytes, as PyTorch gives cuBLAS on Hopper
FINALISTS = 8  # algorithms of one layout that are tried at other sizes
# Seconds of the search for one matmul. Algorithms with wide tiles are tried first: those with tiles of 16 x 16 take a
# second for one matmul of the size of the floor's.
SEARCH_SECONDS = 2.0
MAX_PARTS = 32  # along the inner dimension
WAVES = (1, 2, 3)  # of tiles on the multiprocessors, in which the parts of a split matmul fit
LIMIT = 1e-2  # of the relative error of a matmul, whose result is rounded to bfloat16

# Numbers of cublasLt.h and library_types.h.
BFLOAT16, FLOAT32, COMPUTE_32F = 14, 0, 68
DESC_TRANSA, DESC_TRANSB = 3, 4
CAP_SPLIT, CAP_TILES, CAP_STAGES = 0, 6, 13
CONFIG_ID, CONFIG_TILE, CONFIG_PARTS, CONFIG_REDUCTION, CONFIG_STAGES = 0, 1, 2, 3, 6
REDUCE_IN_FLOAT32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
# cublasLtMatmulTile_t of the tiles that a large matmul can be fast with. The first number is of cuBLAS's rows.
TILES = {
    24: (256, 128),
    23: (128, 256),
    20: (128, 128),
    21: (256, 64),
    19: (64, 256),
    18: (128, 64),
    17: (64, 128),
    15: (64, 64),
}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Operand(NamedTuple):
    """A matrix as cuBLAS sees it: by columns, and whether it is transposed."""

    rows: int
    columns: int
    stride: int
    transposed: bool


def operand_of(matrix: Tensor) -> Operand:
    """Returns the transpose of a matrix in the form of cuBLAS: rows that are contiguous are columns there.

    Raises:
        ValueError: neither rows nor columns are contiguous.
    """
    if matrix.stride(1) == 1:
        return Operand(matrix.shape[1], matrix.shape[0], matrix.stride(0), transposed=False)
    if matrix.stride(0) == 1:
        return Operand(matrix.shape[0], matrix.shape[1], matrix.stride(1), transposed=True)
    raise ValueError(f"a matrix must have contiguous rows or columns, got strides {matrix.stride()}")


def parts_of(tiles: int, multiprocessors: int) -> list[int]:
    """Returns into how many parts along the inner dimension it is worth splitting a matmul of so many tiles.

    Without a split, a matmul of few tiles leaves multiprocessors idle.
    """
    return sorted({1, *(min(MAX_PARTS, max(1, waves * multiprocessors // tiles)) for waves in WAVES)})


def is_for_sm80(kernels: Sequence[str]) -> bool:
    """Whether an algorithm launches a matmul kernel for sm_80 and none for a newer GPU."""
    return any(map(FOR_SM80.search, kernels)) and not any(map(NEWER.search, kernels))


class Library(NamedTuple):
    """The library that PyTorch has loaded, with what its calls need."""

    lib: Any
    handle: ctypes.c_void_p
    workspace: Tensor

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function and returns its status."""
        return getattr(self.lib, f"cublasLt{name}")(*arguments)

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Returns what a function creates.

        Raises:
            RuntimeError: the function fails.
        """
        created = ctypes.c_void_p()
        check(name, self.call(name, ctypes.byref(created), *arguments))
        return created


@cache
def library() -> Library:
    torch.cuda.current_blas_handle()
    lib = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    found = Library(lib, ctypes.c_void_p(), torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda"))
    return found._replace(handle=found.make("Create"))


def check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"cublasLt{name} returned cublasStatus_t {status}")


class Layout(NamedTuple):
    """Everything about total = a @ b but sizes: the dtypes of b, a and total, and how they are stored."""

    types: tuple[int, int, int]
    transposed: tuple[bool, bool]  # b and a


class Matmul:
    """total = a @ b for one layout and size. The sums are float32, and rounded once."""

    def __init__(self, layout: Layout, operands: Sequence[Operand]) -> None:
        self.types = (*layout.types, layout.types[-1])
        self.size = operands[-1].rows, operands[-1].columns  # of the result, which is not transposed
        lib = library()
        self.desc = lib.make("MatmulDescCreate", COMPUTE_32F, FLOAT32)
        for attribute, transposed in zip((DESC_TRANSA, DESC_TRANSB), layout.transposed, strict=True):
            value = ctypes.c_int32(int(transposed))
            status = lib.call("MatmulDescSetAttribute", self.desc, attribute, ctypes.byref(value), 4)
            check("MatmulDescSetAttribute", status)
        self.layouts = [
            lib.make(
                "MatrixLayoutCreate",
                kind,
                ctypes.c_uint64(operand.rows),
                ctypes.c_uint64(operand.columns),
                ctypes.c_int64(operand.stride),
            )
            for operand, kind in zip(operands, layout.types, strict=True)
        ]

    def families(self) -> list[int]:
        """Returns the numbers of the families of algorithms for these dtypes."""
        found, count, lib = (ctypes.c_int * 256)(), ctypes.c_int(), library()
        arguments = lib.handle, COMPUTE_32F, FLOAT32, *self.types, 256, found, ctypes.byref(count)
        check("MatmulAlgoGetIds", lib.call("MatmulAlgoGetIds", *arguments))
        return list(found[: count.value])

    def algorithms(self, family: int) -> Iterator[Algorithm]:
        """Yields the algorithms of a family that can compute this matmul, those with wide tiles and many stages
        first."""
        lib, first = library(), Algorithm()
        arguments = lib.handle, COMPUTE_32F, FLOAT32, *self.types, family, ctypes.byref(first)
        if lib.call("MatmulAlgoInit", *arguments):
            return
        splits = _numbers(first, CAP_SPLIT)
        known = _numbers(first, CAP_TILES)
        tiles = [tile for tile in TILES if tile in known] or known or [0]
        for tile, stages in product(tiles, sorted(_numbers(first, CAP_STAGES), reverse=True) or [0]):
            for part in self.parts(tile) if splits and splits[0] else [1]:
                algorithm = Algorithm.from_buffer_copy(first)
                config = {CONFIG_TILE: tile, CONFIG_STAGES: stages, CONFIG_PARTS: part}
                config[CONFIG_REDUCTION] = REDUCE_IN_FLOAT32 if part > 1 else 0
                for attribute, number in config.items():
                    value = ctypes.c_int32(number)
                    lib.call("MatmulAlgoConfigSetAttribute", ctypes.byref(algorithm), attribute, ctypes.byref(value), 4)
                if self.can_run(algorithm):
                    yield algorithm

    def parts(self, tile: int) -> list[int]:
        """Returns the parts along the inner dimension that algorithms with a tile are tried with."""
        rows, columns = TILES.get(tile, (128, 128))
        tiles = -(-self.size[0] // rows) * -(-self.size[1] // columns)
        return parts_of(tiles, torch.cuda.get_device_properties("cuda").multi_processor_count)

    @property
    def splits(self) -> bool:
        """Whether it is worth trying to split this matmul."""
        return any(self.parts(tile) != [1] for tile in TILES)

    def can_run(self, algorithm: Algorithm) -> bool:
        lib, found = library(), Found()
        layouts = *self.layouts, self.layouts[-1]
        arguments = lib.handle, self.desc, *layouts, ctypes.byref(algorithm), ctypes.byref(found)
        return not lib.call("MatmulAlgoCheck", *arguments) and not found.state and found.workspace <= WORKSPACE

    def run(self, algorithm: Algorithm, total: Tensor, a: Tensor, b: Tensor) -> int:
        """Runs the matmul and returns the status. The rows of `total` are columns in cuBLAS, so b comes first."""
        lib, one, zero = library(), ctypes.c_float(1.0), ctypes.c_float(0.0)
        result = ctypes.c_void_p(total.data_ptr())
        return lib.call(
            "Matmul", lib.handle, self.desc, ctypes.byref(one),
            ctypes.c_void_p(b.data_ptr()), self.layouts[0], ctypes.c_void_p(a.data_ptr()), self.layouts[1],
            ctypes.byref(zero), result, self.layouts[2], result, self.layouts[2], ctypes.byref(algorithm),
            ctypes.c_void_p(lib.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def _numbers(algorithm: Algorithm, capability: int) -> list[int]:
    """Returns the numbers of a capability of an algorithm, such as those of its tiles."""
    found, written = (ctypes.c_int32 * 1024)(), ctypes.c_size_t()
    arguments = ctypes.byref(algorithm), capability, ctypes.byref(found), ctypes.sizeof(found), ctypes.byref(written)
    return [] if library().call("MatmulAlgoCapGetAttribute", *arguments) else list(found[: written.value // 4])


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Returns the names of the kernels that a call launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [event.key for event in profiler.key_averages()]


class Chooser:
    """Chooses the fastest of cuBLAS's algorithms for sm_80 for each layout and size."""

    def __init__(self) -> None:
        self.families: dict[tuple[int, ...], list[int]] = {}  # for sm_80, by dtypes
        self.finalists: dict[Layout, list[Algorithm]] = {}
        self.chosen: dict[Any, tuple[Matmul, Algorithm]] = {}  # by layout and sizes

    def matmul(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Writes a @ b to `total`.

        Raises:
            RuntimeError: cuBLAS has no kernel for sm_80 that can, or one fails or is wrong.
        """
        operands = tuple(map(operand_of, (b, a, total)))
        types = DTYPES[b.dtype], DTYPES[a.dtype], DTYPES[total.dtype]
        layout = Layout(types, (operands[0].transposed, operands[1].transposed))
        if (layout, operands) not in self.chosen:
            matmul = Matmul(layout, operands)
            self.chosen[layout, operands] = matmul, self._choose(layout, matmul, total, a, b)
        matmul, algorithm = self.chosen[layout, operands]
        check("Matmul", matmul.run(algorithm, total, a, b))

    def _choose(self, layout: Layout, matmul: Matmul, total: Tensor, a: Tensor, b: Tensor) -> Algorithm:
        scratch = torch.empty_strided(total.shape, total.stride(), dtype=total.dtype, device="cuda").zero_()

        def run(algorithm: Algorithm) -> int:
            return matmul.run(algorithm, scratch, a, b)

        if layout.types not in self.families:
            self.families[layout.types] = _families(matmul, run)

        def all_of() -> Iterator[Algorithm]:
            for family in self.families[layout.types]:
                yield from matmul.algorithms(family)

        def times_of(candidates: Iterable[Algorithm]) -> list[tuple[float, Algorithm]]:
            """Returns the times of the algorithms that run, of as many as SEARCH_SECONDS allow."""
            end, found = time.perf_counter() + SEARCH_SECONDS, []
            for algorithm in candidates:
                if matmul.can_run(algorithm) and not run(algorithm):
                    found.append((_ms(run, algorithm, 1), algorithm))
                if found and time.perf_counter() > end:
                    break
            return found

        # Finalists of another size are not split for this size.
        timed = ([] if matmul.splits else times_of(self.finalists.get(layout, ()))) or times_of(all_of())
        fastest = [algorithm for _, algorithm in sorted(timed, key=lambda one: one[0])[:FINALISTS]]
        times = {number: _ms(run, algorithm, 3) for number, algorithm in enumerate(fastest)}
        if not times:
            raise RuntimeError(f"cuBLAS has no kernel for sm_80 for {tuple(total.shape)} = {tuple(a.shape)} @ b")
        order = sorted(times, key=lambda number: times[number])
        if not matmul.splits:
            self.finalists.setdefault(layout, [fastest[number] for number in order])
        best = fastest[order[0]]
        scratch.zero_()
        launched = kernels_of(lambda: run(best))
        names = ", ".join(launched)
        if not is_for_sm80(launched):
            raise RuntimeError(f"{names} is not for sm_80")
        exact = ORIGINAL_MM(a, b).float()
        error = float(torch.linalg.vector_norm(scratch - exact) / torch.linalg.vector_norm(exact))
        if not error < LIMIT:
            raise RuntimeError(f"{names} has a relative error of {error:.1e}")
        rate = 2e-9 * total.numel() * a.shape[1] / times[order[0]]
        print(f"{tuple(total.shape)}, {a.shape[1]} terms: {times[order[0]]:.3f} ms, {rate:.0f} TFLOP/s, {names}")
        return best


def _families(matmul: Matmul, run: Callable[[Algorithm], int]) -> list[int]:
    """Returns the families of algorithms whose kernels are for sm_80, and prints the kernels of all families."""
    found = []
    for family in matmul.families():
        algorithm = next(matmul.algorithms(family), None)
        if algorithm is None or run(algorithm):
            continue
        names = kernels_of(partial(run, algorithm))
        if is_for_sm80(names):
            found.append(family)
        print(f"algorithms {family}, {'' if is_for_sm80(names) else 'not '}for sm_80: {', '.join(names)}")
    return found


def _ms(run: Callable[[Algorithm], int], algorithm: Algorithm, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run(algorithm)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


ORIGINAL_MM = torch.mm


def install() -> None:
    """Makes bfloat16 matmuls of torch.mm with `out` run with cuBLAS's kernels for sm_80.

    Matmuls of fewer than LEAST elements in total, such as those of short last chunks, stay with PyTorch.
    """
    chooser = Chooser()

    def takes(a: Tensor, b: Tensor, out: Tensor | None) -> bool:
        if out is None or a.device.type != "cuda" or a.dtype != torch.bfloat16:
            return False
        return a.numel() + b.numel() + out.numel() >= LEAST

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, **options: Any) -> Tensor:
        if not takes(a, b, out):
            return ORIGINAL_MM(a, b, out=out, **options)
        assert out is not None
        chooser.matmul(out, a, b)
        return out

    torch.mm = mm


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these matmuls; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = linear_ce.parse(
        ["--methods", "floor", "triton_sm80", *arguments],
        prog="python -m benchmarks.sm80",
        description=__doc__,
        framework="torch",
    )
    for name, only in (("framework", "torch"), ("device", "cuda"), ("dtype", "bfloat16")):
        value = getattr(options, name)
        if value != only:
            raise SystemExit(f"--{name} must be {only}, got {value}")
    install()
    return linear_ce.run(options, floor=FLOOR, floor_code=results.file_hash(CODE))


if __name__ == "__main__":
    sys.exit(main())
