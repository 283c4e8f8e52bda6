"""Imports have one direction: flax_models -> jax_pallas -> linear_ce <- core_triton, below parity and benchmarks."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = {"torch", "triton"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
PACKAGES = {"core_triton", "jax_pallas", "flax_models", "linear_ce", "parity", "benchmarks", "tests"}

FORBIDDEN = {
    "core_triton": JAX | PACKAGES - {"core_triton", "linear_ce"},
    "jax_pallas": TORCH | {"flax", "optax", "orbax"} | PACKAGES - {"jax_pallas", "linear_ce"},
    "flax_models": TORCH | PACKAGES - {"flax_models", "jax_pallas", "linear_ce"},
}
# Adapters of jax_pallas import their host, which needs Flax. No other file imports it.
HOSTS = {"levanter": set(), "maxtext": {"flax"}, "tunix": {"flax"}}
LAZY = {  # only inside functions
    "linear_ce/doctor.py": TORCH | JAX | {"core_triton", "jax_pallas"},
    "parity/backends.py": TORCH | JAX | {"core_triton", "jax_pallas"},
    "parity/train/torch_run.py": TORCH | {"core_triton"},
    "parity/train/jax_run.py": JAX | {"flax_models", "jax_pallas"},
    "parity/train/picture.py": {"matplotlib"},
}
AT_THE_TOP = {
    "linear_ce": set(sys.stdlib_module_names) | {"numpy", "linear_ce"},
    "parity": set(sys.stdlib_module_names) | {"numpy", "linear_ce", "parity"},
}


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no files"
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Yields the top-level name of every module that the code imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            assert isinstance(node.args[0], ast.Constant), f"import of a computed name: {ast.unparse(node)}"
            yield str(node.args[0].value).split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_what_is_not_below_it(package: str) -> None:
    for path in files(package):
        adapted = path.stem if path.parent == ROOT / "jax_pallas" / "hosts" else ""
        forbidden = (FORBIDDEN[package] | {*HOSTS}) - {adapted} - HOSTS.get(adapted, set())
        forbidden &= set(imports(ast.parse(path.read_text())))
        assert not forbidden, f"{path.relative_to(ROOT)} imports {', '.join(sorted(forbidden))}"


@pytest.mark.parametrize("package", AT_THE_TOP)
def test_the_contract_and_parity_import_only_numpy(package: str) -> None:
    for path in files(package):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        inside = {module for function in functions for module in imports(function)}
        everywhere = set(imports(tree))
        for function in functions:
            function.body = [ast.Pass()] if not isinstance(function, ast.Lambda) else ast.Constant(None)  # pyright: ignore[reportAttributeAccessIssue]
        top = set(imports(tree))
        allowed = AT_THE_TOP[package]
        assert top <= allowed, f"{name} imports {', '.join(sorted(top - allowed))} at its top"
        others = (everywhere | inside) - allowed - LAZY.get(name, set())
        assert not others, f"{name} imports {', '.join(sorted(others))}"


def test_packages_of_flax_models_import_one_way() -> None:
    """Each part of flax_models imports only the parts before it."""
    parts = ["errors", "command_line", "display", "model", "hub", "data", "train", "generate", "export"]
    for path in sorted((ROOT / "flax_models").rglob("*.py")):
        part = path.relative_to(ROOT / "flax_models").parts[0].removesuffix(".py")
        if part != "__init__":
            later = set(parts[parts.index(part) + 1 :])
            imported = set(re.findall(r"^\s*(?:from|import) flax_models\.(\w+)", path.read_text(), re.MULTILINE))
            assert not imported & later, f"{path.relative_to(ROOT)} imports {', '.join(sorted(imported & later))}"


# Modules that a program imports in order, and modules that must not be loaded afterwards.
IMPORTED = {
    # Loading torch._dynamo takes two seconds, and only torch.compile needs it.
    "core_triton": [
        (
            # The adapters of torchtitan and Megatron-core import their host when they are used.
            "core_triton, core_triton.hosts, core_triton.hosts.megatron, core_triton.hosts.torchtitan",
            JAX
            | {"jax_pallas", "flax_models", "torch._dynamo", "transformers", "trl", "verl"}
            | {"torchtitan", "megatron", "spmd_types"},
        )
    ],
    "jax": [
        (
            "linear_ce.spec, linear_ce.reference, linear_ce.chunking, "
            "parity.cases, parity.arrays, parity.expected, parity.backends, parity.__main__",
            TORCH | JAX | {"core_triton", "jax_pallas"},
        ),
        (
            "parity.train.command, parity.train.process, parity.train.torch_run, parity.train.jax_run",
            TORCH | JAX | {"core_triton", "jax_pallas", "flax_models", "matplotlib"},
        ),
        (
            "jax_pallas.linear_ce, jax_pallas.hosts, jax_pallas.hosts.heads",
            TORCH | {"core_triton", "flax_models", "flax", "optax", "equinox", *HOSTS},
        ),
        ("flax_models.train.main", TORCH | {"core_triton"}),
    ],
}


@pytest.mark.parametrize("program", IMPORTED)
def test_an_import_loads_no_other_framework(program: str) -> None:
    loaded = "print(json.dumps(sorted({*sys.modules, *(name.split('.')[0] for name in sys.modules)})))"
    statements = [f"import {modules}; {loaded}" for modules, _ in IMPORTED[program]]
    command = [sys.executable, "-c", "\n".join(["import json, sys", *statements])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (modules, absent), line in zip(IMPORTED[program], done.stdout.splitlines(), strict=True):
        found = absent & set(json.loads(line))
        assert not found, f"import {modules} loads {', '.join(sorted(found))}"


@pytest.mark.parametrize("package", ["core_triton", "jax_pallas", "flax_models", "linear_ce", "parity"])
def test_types_are_published(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("package", ["core_triton", "jax_pallas", "flax_models", "linear_ce", "parity"])
def test_files_are_short(package: str) -> None:
    for path in files(package):
        lines = len(path.read_text().splitlines())
        assert path.name != "utils.py"
        assert lines <= 800, f"{path.relative_to(ROOT)} has {lines} lines: split it"


KERNELS = (
    *("hopper_common.py", "hopper_logits.py", "hopper_gradients.py"),
    *("hopper_split_head.py", "hopper_split_logits.py"),
    *("ampere_common.py", "ampere_logits.py", "ampere_gradients.py"),
    *("kernels.py", "row_kernels.py", "input_grad.py", "target_grad.py", "launch.py", "float16.py"),
)

# Public functions and classes that only one framework needs, with the reason.
ONE_FRAMEWORK_ONLY = {
    # PyTorch keeps what it checked; a traced call of JAX is checked once, and its devices are in devices.py. JAX checks
    # arrays of global shape too.
    "arguments.py": {
        *("spec_of", "decide", "Decision", "Groups", "of_vocab_group"),
        *("check_are_tensors", "check_are_arrays"),  # the same, by the names of the types
        *("autocast_dtype", "dtype_of_matmul"),  # JAX has no autocast
        "check_before_gather",  # what dtensors.py checks
        "class_indices",  # JAX compares targets in the dtype that they have
        "signed_target",  # of the arguments of NumPy that sharded.py places on devices
    },
    # In PyTorch, plan A takes the token loss as an argument, and kernels finish stored logits.
    "chunked.py": {"ChunkRows", "token_loss_and_gradients", "finished_logits"},
    "ops.py": {
        *("loss_and_gradients", "losses", "log_probs"),  # variables in JAX, the results of custom_vjp
        "loss",  # in JAX, each operator has its rule
        *("LossAndGradients", "RowLosses", "RowLogProbs"),  # autograd functions
        # The operators' implementations.
        *(
            "run_loss_and_gradients",
            "run_losses",
            "run_log_probs",
            "run_row_gradients",
            "run_gradients",
            "kept_losses",
        ),
        # What token_ops.py takes from it, and what saved_ops.py does.
        *("plan_a", "compute_row_weights", "no_double_backward", "between_graphs"),
        *("plan_c", "log_prob_gradients", "stage_of_plan_b", "losses_there", "recorded"),
        *("is_eager", "below_autograd"),  # for PyTorch's eager mode
        *("dispatched_loss_and_gradients", "dispatched_losses", "dispatched_log_probs"),  # call operators
        *("in_forward", "device_of"),  # what gathered_tokens.py and explain take from it
        # The rules of operators in JAX, their problems and what else saved_ops.py takes from it.
        *("rule_of_arrays", "row_losses_rule", "row_losses_fwd", "row_losses_bwd", "log_probs_rule", "log_probs_fwd"),
        *("log_probs_bwd", "no_rows", "present_statistics", "losses_of_rows", "gradients_of_rows", "forward_problem"),
        *("implementation_of", "as_residual", "dense", "row_statistics_of", "totals_of"),
        "as_results",  # the types of results without tokens
        "planned_problem",  # the problem before its rows are gathered
    },
    "plan.py": {"DeviceInfo", "shards_are_scaled"},  # in JAX, launch.py defines it; shards are chunked
    "problem.py": {
        *("add_matmul", "operand", "ClassSum", "GradientSums"),  # sums in place
        "layout_of_input",  # of tokens that are gathered chunk by chunk
        *("add_d_weight", "HeadSums"),  # sums in a loop's carry
        "rounded",  # XLA would remove a conversion
        "is_one_chunk",  # XLA divides such calls among devices
    },
    # PyTorch writes the parts of a gradient that is sent in its last chunk, to buffers. XLA adds to them in all chunks.
    "d_weight_parts.py": {"can_send", "LastChunk", "send", "PartTargets", "DWeightParts"},
    "head_scatter.py": {"offered", "sum_of_copies", "part_rows"},
    # PyTorch sees the memory of d_weight as rows of a piece of the classes. XLA would copy it, so JAX has columns.
    "first_chunk.py": {"Stores", "StoredExponentials", "FirstChunk", "memory_of", "float32_of"},
    "recompute.py": {"tma_compatible"},  # JAX arrays have no strides
    "row_math.py": {"nll_and_lse", "power_of_two", "first_of_largest"},  # XLA finishes the rows of scaled exponentials
    "saved_kernels.py": {  # XLA fuses what they do
        *("Multiplied", "multiply_rows_kernel", "multiply_rows", "pick_rows_kernel", "pick_rows"),
        *("scale_units_kernel", "scale_units"),
    },
    "saved_ops.py": {
        *("SavedCall", "SavedLosses", "SavedRowLosses"),  # an operator, and its autograd function
        *("run_saved_losses", "run_saved_gradients", "dispatched_saved_losses", "fake_saved_rows"),
        *("losses", "log_probs"),  # variables in JAX, the results of custom_vjp
    },
    "scaling.py": {
        *("Factors", "scale"),  # XLA fuses what they do
        "summed_over_devices",  # in PyTorch, the caller sums over ranks that have different tokens
    },
    "token_ops.py": {
        *("TokenCall", "TokenLossResults", "token_loss", "token_loss_rows", "statistics_of", "token_stats"),
        *("which_need_grad", "TokenLossAndGradients", "run_token_loss", "token_loss_below_autograd"),
        "token_losses",  # the other operators are variables in JAX, the results of custom_vjp
    },
    "scaled_exp.py": {
        *("Carry", "OfTokens", "SavedChunk"),  # the carry of a loop, and what it returns
        "token_loss_and_gradients",  # in PyTorch, plan A takes the token loss as an argument
        "static_args",  # of kernels in Pallas
    },
    "shard_rows.py": {
        *("ReducedRows", "put_rows_kernel", "put_sum", "PartialSums"),  # XLA waits for sums, and writes them
        *("own_target_logits", "place"),  # of tokens that are gathered chunk by chunk
        "clear_padding",  # in PyTorch a process knows its number of classes
        *("OwnNumbers", "merge_shards_kernel"),  # XLA fuses what it does
        "WaitingSum",  # in PyTorch, PartialSums has it
    },
    "token_slices.py": {
        *("counted_rows", "pack_slices_kernel"),  # PyTorch packs the rows that contribute
        *("NextChunk", "in_order_of_chunks", "in_order_of_tokens"),  # JAX changes the order of the rows of the call
    },
    "row_statistics.py": {
        *("LogitStatistics", "finish_statistics_kernel", "keep_rows_kernel", "keep_rows"),
        *("merge_kernel", "merge"),  # in JAX, XLA merges the statistics of vocabulary chunks
        "first_of_largest",  # in JAX, row_math.py defines it
    },
    # A rank knows its place in the group when it calls, a device only when it runs. Ranks may disagree, devices of one
    # program cannot.
    "vocab_shard.py": {
        *("own_sum_of_d_input", "rows_of_all"),  # of tokens that are gathered chunk by chunk
        "own_part_of_sum",  # of a gathered head
        *("let_begin_kernel", "after_begin"),  # in PyTorch, collectives begin first without them
        *(
            "VocabShard",
            *("start_all_sum", "start_gather", "start_own_sum", "group_of"),
            "own_tokens",  # of tokens that are gathered chunk by chunk
            "check_group",
            "shard_of",
            "joint_normalizer",
            *("check_agreement", "check_agreements"),
        ),
        "first_class",
    },
    # Triton's kernels have static values as arguments, and its compiler splits operands.
    "float32_matmuls.py": {"Float32Matmul", "split_matmul"},
    "stored_logits.py": {"read_logits", "statistics_kernel", "d_logits_kernel"},  # XLA fuses the passes
    "smoothing.py": {"smooth_rows_kernel", "add_outer_kernel"},  # XLA fuses what they do
    # PyTorch differentiates the function with autograd, JAX its trace.
    "token_hook.py": {
        *("bytes_of", "log_prob_of", "factors", "call", "call_and_differentiate", "check_elementwise"),
        *("TokenFunction", "TokenNeedsGrad", "TokenRows", "row_token_losses", "row_token_gradients"),
    },
    "tile_config.py": {
        "kernel_capability",  # Pallas' Triton kernels are the same on every GPU
        "padded_hidden",  # JAX makes no padded copies for TMA
        *("choose_ampere_tile", "DInputTiling", "choose_d_input_tiling"),  # Pallas has no such kernels
        *("TritonTile", "triton_tile", "unaligned"),  # a separate backend from the Hopper kernels
        *("schedule_of", "d_input_scratch", "d_input_sizes"),  # the rows of a tile are chosen too
        "cdiv",  # in PyTorch, launch.py defines it
        *("first_chunk_room", "first_chunk_pieces"),  # in PyTorch a row of d_weight has room for as many rows
    },
}
SHARED = sorted(path.name for path in (ROOT / "core_triton").glob("*.py") if (ROOT / "jax_pallas" / path.name).exists())


def public_names(path: Path) -> list[str]:
    """Returns the names of a file's public functions and classes, in order."""
    found = ast.parse(path.read_text()).body
    names = [node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize("name", SHARED)
def test_the_two_frameworks_mirror_each_other(name: str) -> None:
    """Files that exist in both frameworks have the same public functions and classes in the same order.

    For kernel files, only the order is checked.
    """
    torch_names, jax_names = (public_names(ROOT / package / name) for package in ("core_triton", "jax_pallas"))
    both = set(torch_names) & set(jax_names)
    assert [n for n in torch_names if n in both] == [n for n in jax_names if n in both]
    if name not in KERNELS:
        assert {*torch_names} ^ {*jax_names} == ONE_FRAMEWORK_ONLY.get(name, set())


CONSTANTS = ("NO_PROBABILITY", "LEAST_SUMMAND", "LOG2_E", "FLOOR_ROWS", "WARM_UP", "FRAMEWORKS", "PACKAGES")


@pytest.mark.parametrize("packages", [("core_triton",), ("jax_pallas",), ("benchmarks", "parity")])
def test_a_constant_has_its_value_in_one_place(packages: tuple[str, ...]) -> None:
    """A Triton kernel needs a `tl.constexpr`, which is made from the constant."""
    values: dict[tuple[str, str], list[str]] = {}
    for path in (path for package in packages for path in files(package)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, ast.unparse(node.value)
                if name in CONSTANTS and f".{name}" not in value:
                    values.setdefault((name, value), []).append(path.relative_to(ROOT).as_posix())
    copies = {name: places for (name, _), places in values.items() if len(places) > 1}
    assert not copies, copies
