"""Compares the Triton kernels, in Triton's interpreter, with the float64 reference. No GPU is needed.

One process runs the programs of all quick tests, because starting a process takes as long as ten cases.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from programs_at_once import KERNELS
from quick_cases import quick_names

from linear_ce.spec import FLOAT_DTYPES
from parity.cases import cases

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
QUICK = quick_names("torch-triton")
PAIRWISE = {name for name in QUICK if not name.startswith("edge")}
SHARES = 2  # the slow cases of a dtype are split, so that several workers can run them

Program = tuple[Any, ...]  # a program of interpret_loss.py: its name and arguments
Results = list[dict[str, Any]]  # one per call


def printed_by(*command: str, **more: str) -> str:
    """Runs a file of tests/, which interprets kernels, and returns what it prints. more: its variables."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", **more}
    # In OpenBLAS's matmuls for Haswell and Zen the bits of a row depend on its place, which is not so on a GPU.
    environment["OPENBLAS_CORETYPE"] = "Sandybridge"
    file, *arguments = command
    command = (sys.executable, "-W", "error", str(HERE / file), *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-5000:]
    return done.stdout


def interpret(programs: list[Program], **more: str) -> list[Results]:
    """Runs programs of interpret_loss.py in one process and returns the results of each. more: its variables."""
    results: list[Results] = [[] for _ in programs]
    for result in map(json.loads, printed_by("interpret_loss.py", json.dumps(programs), **more).splitlines()):
        results[result["program"]].append(result)
    return results


@pytest.fixture(scope="module")
def quick_results(request: pytest.FixtureRequest) -> dict[Program, Results]:
    """The output of the programs of this module's selected quick tests."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    items = [item for item in items if "program" in item.fixturenames]
    programs = [item.callspec.params["program"] for item in items if not item.get_closest_marker("slow")]
    return dict(zip(programs, interpret(programs), strict=True))


@pytest.fixture
def results(request: pytest.FixtureRequest, program: Program) -> Results:
    """Returns the output of the test's program. A slow program runs in a separate process."""
    if request.node.get_closest_marker("slow"):
        results = interpret([program])[0]
    else:
        results = request.getfixturevalue("quick_results")[program]
    failures = [result["failure"] for result in results if "failure" in result]
    assert not failures, failures[0]
    assert results
    return results


def quick(*program: Any) -> Any:
    """Returns a program as a test parameter."""
    return pytest.param(program, id="-".join(map(str, program[: 2 + (program[0] == "sm80")])))


def slow(*program: Any, id: str = "") -> Any:
    """Returns a program as the parameter of a test that only `make test-slow` runs."""
    return pytest.param(program, id=id or "-".join(map(str, program)), marks=pytest.mark.slow)


def assert_within_budget(results: Results) -> None:
    """Fails if a call exceeded a budget, with the percentage of its budget that each output used."""
    over = []
    for result in results:
        used = ", ".join(f"{name} {share:.0f}%" for name, share in result["used"].items())
        if not all(share <= 100 for share in result["used"].values()):
            over.append(f"{result['name']} used of its budget: {used}")
    assert not over, "\n".join([f"{len(over)} of {len(results)} calls exceed a budget", *over])


TABLES = {
    "pairwise": PAIRWISE,
    "edges-bfloat16": [name for name in QUICK if name.startswith("edge") and name.endswith("-bf16")],
    "edges": [name for name in QUICK if name.startswith("edge") and not name.endswith("-bf16")],
}


def more_cases(dtype: str, share: int) -> tuple[str, ...]:
    return tuple(case.name for case in cases() if case.dtype == dtype)[share::SHARES]


# For compute capability 8.x only loads and stores of matrices differ. The interpreter cannot run `ampere_logits`, so
# `kernels.exponentials` computes the scaled exponentials of 16 bits here: `ExecutionPlan.ampere_tile`. A quarter of the
# pairwise cases of 16 bits is quick and one of float32, except token losses, which have the same matmuls, and so are
# the edges whose matrices have special values, layouts or chunks. All others run with the slow cases.
OF_MATRICES = (
    *("edge-grad_into-options", "edge-head_split-options", "edge-head_split-few", "edge-hidden", "edge-inf_input"),
    *("edge-masked_vocabulary", "edge-nan_input", "edge-nan_masked-mean", "edge-nan_padding"),
    *("edge-log_probs-log_prob-axis1", "edge-saved-part"),
)
_WITHOUT_TOKEN_LOSS = sorted(name for name in PAIRWISE if not name.startswith("token_loss"))
SM80 = {
    "pairwise": [name for name in _WITHOUT_TOKEN_LOSS if "fp32" not in name][::4]
    + [name for name in _WITHOUT_TOKEN_LOSS if "fp32" in name][:1],
    "edges-bfloat16": [name for name in TABLES["edges-bfloat16"] if name.startswith(OF_MATRICES)],
}


@pytest.mark.parametrize(
    "program",
    [
        *(
            pytest.param((*kernels, "fewer_rows", *sorted(names)), id="-".join([*kernels, name]))
            for kernels, tables in (((), TABLES), (("sm80",), SM80))
            for name, names in tables.items()
        ),
        *(
            slow(*kernels, "table", *more_cases(dtype, share), id="-".join([*kernels, dtype, str(share)]))
            for kernels in ((), ("sm80",))
            for dtype in FLOAT_DTYPES
            for share in range(SHARES)
        ),
    ],
)
def test_every_case_is_within_its_error_budget(program: Program, results: Results) -> None:
    assert [result["name"] for result in results] == [*program[1 + (program[0] == "sm80") :]]
    assert_within_budget(results)


@pytest.mark.parametrize(
    "program",
    [
        quick("repair", "quick"),
        slow("repair", "more"),
        quick("sm80", "repair", "quick"),
        slow("sm80", "repair", "more"),
    ],
)
def test_reference_exponents_that_are_too_low_are_repaired(results: Results) -> None:
    assert_within_budget(results)
    *everywhere, in_one_block = (result["far"] for result in results)
    assert all(len(far) > 10 for far in everywhere)
    assert in_one_block == [140]


@pytest.mark.parametrize("program", [quick("float16")])
def test_exponentials_fit_in_float16(results: Results) -> None:
    assert_within_budget(results)
    shifted, chunks, repaired = (result for result in results if "shifted" in result)
    # Most rows are not shifted, because the sample of the classes has logits near the largest.
    assert all(0 < one["shifted"] < one["rows"] / 2 and not one["repaired"] for one in (shifted, chunks))
    assert repaired["repaired"] == 1


@pytest.mark.parametrize(
    "program",
    [
        quick("writes", "bfloat16", ("mean",), (1, 4, 6)),
        quick("writes", "float16", ("mean",), (0, 2, 8)),
        slow("writes", "bfloat16", ("mean",), (0, 2, 3, 5, 7, 8)),
        slow("writes", "float16", ("mean",)),
        slow("writes", "bfloat16", ("none", "log_probs")),
        quick("sm80", "writes", "bfloat16", ("mean",), (1, 4, 6)),
        slow("sm80", "writes", "float16", ("mean",)),
        slow("sm80", "writes", "bfloat16", ("none", "log_probs")),
    ],
)
def test_nothing_is_written_outside_and_everything_inside(results: Results) -> None:
    assert all(result["buffers"] > 5 for result in results)


@pytest.mark.parametrize(
    "program",
    [
        quick("shards", "float32"),
        quick("shards", "float16"),
        slow("shards", "bfloat16"),
        slow("sm80", "shards", "bfloat16"),
    ],
)
def test_vocabulary_shards_give_the_whole_loss(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize(
    "program",
    [
        quick("layouts", "float32"),
        slow("layouts", "bfloat16"),
        slow("sm80", "layouts", "bfloat16"),
        quick("sm80", "views", "float16"),
        quick("sm80", "weighted_views", "float16"),
        quick("views", "float32"),
        slow("sm80", "views", "bfloat16"),
    ],
)
def test_the_layout_of_arguments_changes_nothing(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize(
    "program",
    [
        quick("chunks"),
        quick("pieces"),
        quick("sm80", "pieces", "repaired"),
        slow("sm80", "pieces", id="sm80-all-pieces"),
    ],
)
def test_the_heads_gradients_of_chunks_add_up(results: Results) -> None:
    assert_within_budget(results)
    for result in results:
        if "shifted" in result:  # of float16
            assert 20 < result["shifted"] < result["rows"] - 20


@pytest.mark.parametrize(
    "program", [quick("gluon", "pieces", "repaired"), slow("gluon", "pieces", id="gluon-all-pieces")]
)
def test_a_first_chunk_in_the_gluon_kernels_for_compute_capability_8(program: Program, results: Results) -> None:
    *calls, last = results
    assert len(calls) == (3 if program[-1] == "repaired" else 5)
    assert_within_budget(calls)
    gradients = {"d_input_kernel", "d_input_of_pieces_kernel", "d_weight_kernel"}
    assert {*last["kernels"]} == {"exponentials_kernel"} | gradients


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            ("token_loss", "bfloat16", "ppo_clip", "custom", "grpo-k3", "custom-entropy"), id="token_loss-bfloat16"
        ),
        pytest.param(("token_loss", "float16", "ppo_clip", "custom-entropy"), id="token_loss-float16"),
        slow("token_loss", "float32", "ppo_clip", "custom", "grpo-k3", "custom-entropy", "grpo-k2-entropy"),
        slow("token_loss", "float16", "custom", "grpo-k3", "grpo-k2-entropy"),
        slow("sm80", "token_loss", "bfloat16", "ppo_clip", "custom", "grpo-k3", "custom-entropy", "grpo-k2-entropy"),
    ],
)
def test_token_losses_in_several_chunks(results: Results) -> None:
    assert_within_budget(results)
    assert all(result["chunks"] >= 3 for result in results)


@pytest.mark.parametrize(
    "program",
    [
        quick("log_probs", "bfloat16", 40.0),
        quick("log_probs", "float16", 20.0),
        slow("log_probs", "bfloat16", 1.0),
        slow("sm80", "log_probs", "bfloat16", 40.0),
    ],
)
def test_a_token_loss_gets_the_log_probabilities_bit_for_bit(program: Program, results: Results) -> None:
    assert_within_budget(results)
    assert program[-1] != 40.0 or all(result["repaired"] > 5 for result in results)


@pytest.mark.parametrize("program", [quick("kept_rows")])
def test_a_token_loss_repairs_no_rows_but_those_that_need_it(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("repair_blocks")])
def test_repairs_of_tiles_with_several_class_blocks(results: Results) -> None:
    assert_within_budget(results)
    assert len(results) == 12


@pytest.mark.parametrize("program", [quick("batch_invariant"), slow("sm80", "batch_invariant")])
def test_batch_invariant_results_of_a_row_are_the_same_bits_among_any_rows(results: Results) -> None:
    assert_within_budget(results)
    assert len(results) == 4


@pytest.mark.parametrize("program", [quick("token_kernel")])
def test_named_token_losses_in_one_kernel(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("head_copy")])
def test_copies_of_a_head(results: Results) -> None:
    assert_within_budget(results)
    assert len(results) == 16


@pytest.mark.parametrize("program", [quick("rows")])
def test_rows_of_several_programs(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("stored")])
def test_passes_over_stored_logits_of_several_blocks(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("float32_matmuls")])
def test_matmuls_of_float32(results: Results) -> None:
    assert len(results) == (2 * 27 + 3) * 2
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("float32_chunks")])
def test_chunks_of_float32_that_the_kernel_multiplies(results: Results) -> None:
    assert len(results) == 5
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("saved", "bfloat16"), quick("saved", "float16")])
def test_saved_rows_that_do_not_count(results: Results) -> None:
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("saved_float16")])
def test_saved_rows_of_float16_under_any_upstream_gradients(results: Results) -> None:
    assert [result["chunks"] for result in results] == [3, 0, 1]
    assert_within_budget(results)


@pytest.mark.parametrize("program", [quick("scale")])
def test_scale_kernel(results: Results) -> None:
    assert len(results) == 12  # three dtypes times four factors


def test_kernels_whose_programs_run_at_once_exist() -> None:
    """A kernel with another name would run, but slowly."""
    for name in KERNELS:
        module, kernel = name.split(".")
        assert hasattr(import_module(f"core_triton.{module}"), kernel), name


@pytest.mark.slow
def test_the_quick_operators_of_the_interpreter_compute_the_same_bits() -> None:
    """`quick_interpreter` and `programs_at_once` against Triton's own operators, which run one program after another:
    the errors of all results, in percent of their budgets."""
    programs: list[Program] = [("fewer_rows", *sorted(TABLES["edges-bfloat16"])), ("batch_invariant",)]
    programs += [("repair", "quick"), ("sm80", "repair", "quick"), ("float16",), ("saved_float16",), ("stored",)]
    programs += [("pieces",)]
    assert interpret(programs) == interpret(programs, PLAIN_INTERPRETER="1")


@pytest.mark.slow
def test_the_quick_operators_of_the_interpreter_compute_the_same_bits_on_two_ranks() -> None:
    """The kernels that only shards have."""
    requests = [
        "vocabulary:log_probs-bf16-softcap-scale-padded-bias-skewed-ignored-axis1-tight-head32-strided-n123",
        "vocabulary:mean-fp16-zloss-scale-bias-weight-mask-skewed-ignored-axis1-head32-strided-n123",
        "vocabulary:edge-token_loss-stats-logits80-bf16",
    ]
    command = ("torch_ranks.py", "2", "triton", *requests)
    printed = printed_by(*command, TRITON_INTERPRET="1")
    assert len(printed.splitlines()) == len(requests)
    assert printed == printed_by(*command, TRITON_INTERPRET="1", PLAIN_INTERPRETER="1")
