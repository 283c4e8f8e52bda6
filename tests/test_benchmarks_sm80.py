"""Tests what `benchmarks.sm80` does without a GPU: matrices as cuBLAS takes them, and the names of its kernels."""

import json
from pathlib import Path

import pytest
import torch
from sass import innermost_loop, opcodes

from benchmarks import linear_ce, results, sm80, sm80_pallas
from benchmarks.launch_recorder import dump, resources
from benchmarks.shapes import Shape
from benchmarks.sm80 import Operand, install, is_for_sm80, operand_of, parts_of
from benchmarks.sm80_pallas import compile_for, lower_exponentials

MATRIX = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (MATRIX, Operand(rows=16, columns=4, stride=16, transposed=False)),
        (MATRIX[:, :10], Operand(rows=10, columns=4, stride=16, transposed=False)),
        (MATRIX[:, :10].T, Operand(rows=10, columns=4, stride=16, transposed=True)),
        (MATRIX[::2], Operand(rows=16, columns=2, stride=32, transposed=False)),
    ],
)
def test_a_matrix_by_rows_is_its_transpose_by_columns(matrix: torch.Tensor, expected: Operand) -> None:
    assert operand_of(matrix) == expected


def test_a_matrix_without_contiguous_rows_or_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"contiguous rows or columns, got strides \(32, 2\)"):
        operand_of(MATRIX[::2, ::2])


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (["sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4"], True),
        (["ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "splitKreduce_kernel"], True),
        (["cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8"], True),
        (["nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"], False),
        (["sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"], False),
        ([], False),
    ],
)
def test_kernels_for_sm80_are_known_by_their_names(kernels: list[str], expected: bool) -> None:
    assert is_for_sm80(kernels) is expected


@pytest.mark.parametrize(("tiles", "expected"), [(28, [1, 4, 9, 14]), (128, [1, 2, 3]), (1, [1, 32]), (4096, [1])])
def test_matmuls_of_few_tiles_are_split(tiles: int, expected: list[int]) -> None:
    assert parts_of(tiles, 132) == expected


def test_matmuls_on_a_cpu_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", torch.mm)  # put back after the test
    install()
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    torch.testing.assert_close(torch.mm(a, b, out=torch.ones(3, 5)), a @ b)


def test_the_kernel_of_pallas_for_an_a100_compiles_to_its_instructions_on_hopper() -> None:
    lowered = lower_exponentials(Shape("small", 256, 128, 1024))
    assert lowered.rows == 256
    assert lowered.grid == (2 * 8,)  # tiles of 128 rows x 128 classes
    ptx = compile_for(lowered, 90).asm["ptx"]
    assert "mma.sync" in ptx
    assert "cp.async" in ptx
    assert "wgmma" not in ptx
    with pytest.raises(ValueError, match="V of gpt must be a multiple of 64, got 50257"):
        lower_exponentials(Shape("gpt", 256, 128, 50257))


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_of_pallas_for_an_a100_accumulates_in_its_matmul(capability: int) -> None:
    cubin = compile_for(lower_exponentials(Shape("short", 256, 896, 1024)), capability).asm["cubin"]
    loop = opcodes(innermost_loop(dump(cubin, "-sass"), "HMMA"))
    assert loop["HMMA"] == 128
    assert loop["FADD"] == 0
    _, stack = resources(cubin)
    assert stack == 0, f"{stack} bytes of registers spill"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--framework", "jax"], "--framework must be torch, got jax"),
        (["--device", "cpu"], "--device must be cuda, got cpu"),
        (["--dtype", "float16"], "--dtype must be bfloat16, got float16"),
    ],
)
def test_what_the_proxy_cannot_measure_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm80, "install", lambda: pytest.fail("the command must end first"))
    with pytest.raises(SystemExit, match=message):
        sm80.main(arguments)


def test_the_help_is_that_of_the_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sm80.main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m benchmarks.sm80 " in printed
    assert "A proxy for GPUs of compute capability 8.x" in printed


def test_rows_of_a_proxy_replace_no_ordinary_rows(tmp_path: Path) -> None:
    file = tmp_path / "torch.json"
    common = ["--framework", "torch", "--device", "cpu", "--shapes", "smoke", "--seconds", "0", "--pairs", "2"]
    options = linear_ce.parse([*common, "--methods", "floor", "chunked", "--json", str(file)])
    for floor, code in ((None, ""), (sm80.FLOOR, "code"), (sm80.FLOOR, "other code")):
        assert linear_ce.run(options, floor=floor, floor_code=code) == 0
        rows = json.loads(file.read_text())["rows"]
        of_floor = [row for row in rows if row.get("floor") == floor]
        assert [row["method"] for row in of_floor] == ["floor", "chunked"]
        usual = results.source_hash("torch")
        assert of_floor[1]["code_hash"] == (usual if floor is None else results.short_hash(usual, code))
    assert len(rows) == 4


def test_all_shapes_of_the_pallas_proxy_are_lowered_before_one_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sm80_pallas, "TorchBench", lambda device: pytest.fail("the command must end first"))
    with pytest.raises(SystemExit):
        sm80_pallas.main(["--shapes", "256-128-1024", "256-128-50257"])
    assert "V of 256-128-50257 must be a multiple of 64, got 50257" in capsys.readouterr().err
