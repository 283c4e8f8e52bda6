"""Compares the computed cost of a step with independent counts: traced matmuls, and XLA's memory analysis."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import before_step, compilation_cache, small_trainer, start, write_texts
from matmul_flops import matmul_flops

import flax_models.train.main as program
from flax_models.errors import RunError
from flax_models.model.decoder import Decoder, ModelConfig, decoder_shapes
from flax_models.model.families import PUBLISHED, published
from flax_models.model.lora import adapted_shapes
from flax_models.model.lora_config import LoraConfig
from flax_models.train import loop
from flax_models.train.accounting import (
    PEAK_BF16,
    DeviceMemory,
    check_parameters,
    describe_bytes,
    describe_flops,
    device_memory,
    device_peak,
    flops_per_token,
    mean_keys,
    step_memory,
)
from flax_models.train.config import TrainConfig
from flax_models.train.profile import Clock, Operation, Tracer, device_table, operation_parts, operations
from flax_models.train.step import StepMetrics, Trainer

CONFIG = ModelConfig(280, 32, 3, 4, 2, 8, 48, 16)


# Parameters


def test_a_model_that_cannot_be_in_memory_raises() -> None:
    config, memory = CONFIG, DeviceMemory(128_000, "of the GPU", True)
    check_parameters(config, LoraConfig(), None)
    check_parameters(config, LoraConfig(), memory._replace(size=4 * config.parameter_count()))
    with pytest.raises(RunError, match=r"its 32,224 parameters need 126 KiB, more than the 125 KiB of the GPU, got"):
        check_parameters(config, LoraConfig(), memory)
    large = dataclasses.replace(config, vocab_size=10**7, hidden_size=10**7)
    with pytest.raises(RunError, match="more than the memory, got --vocab-size 10000000, --hidden-size 10000000, "):
        check_parameters(large, LoraConfig(), None)


@pytest.mark.parametrize("dora", [False, True])
def test_the_count_of_adapters_is_that_of_the_model(dora: bool) -> None:
    config, lora = CONFIG, LoraConfig(lora_rank=3, dora=dora)
    shapes = nnx.state(adapted_shapes(config, lora), nnx.Param)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count == config.parameter_count() + lora.parameter_count(config)


# Floating-point operations


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4, "head_dim": 16}, {"num_layers": 0}])
def test_flops_are_the_matmuls_of_the_traced_model(tie, changes):
    """The traced program also computes masked scores. With these included, both counts must be equal."""
    config = dataclasses.replace(CONFIG, tie_embeddings=tie, **changes)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def logits(params: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return model(tokens) @ model.head_weight().T

    forward = matmul_flops(jax.make_jaxpr(logits)(params, tokens).jaxpr)
    width = config.num_heads * config.head_dim
    masked = 12.0 * config.num_layers * width * (16 - mean_keys(16))
    assert forward * 3 == 2 * 16 * (flops_per_token(config, 16) + masked)


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_do_not_count_vectors_and_the_embedding_lookup(name):
    config = published(name)
    _, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    matrices = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        stacked = "blocks" in jax.tree_util.keystr(path)
        matrices += leaf.size if leaf.ndim - stacked > 1 else 0
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    attention = config.num_layers * config.num_heads * config.head_dim  # of one token, which attends to itself
    assert flops_per_token(config, 1) == 6 * (matrices - looked_up) + 12 * attention


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_mean_keys_by_counting(window):
    counted = [min(position + 1, window or 7) for position in range(7)]
    assert mean_keys(7, window) == pytest.approx(np.mean(counted))


def test_windows_of_some_layers_reduce_flops():
    config = dataclasses.replace(CONFIG, num_layers=2, sliding_window=4, window_pattern=(True, False))
    whole = dataclasses.replace(CONFIG, num_layers=2)
    spared = flops_per_token(whole, 16) - flops_per_token(config, 16)
    assert spared == 12 * 32 * (mean_keys(16) - mean_keys(16, 4))


def test_peaks_are_those_of_the_whole_device():
    assert device_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert device_peak("NVIDIA H100 PCIe") == 756e12
    assert device_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert device_peak("NVIDIA L4") == 121e12
    assert device_peak("NVIDIA L40S") == 362e12
    assert device_peak("NVIDIA GH200 480GB") == 989e12
    assert device_peak("NVIDIA GB200") == 2500e12
    assert device_peak("TPU v5") == device_peak("TPU v5p") == 459e12
    assert device_peak("TPU v5 lite") == 197e12
    assert device_peak("NVIDIA GeForce RTX 4090") == 165e12
    for unknown in ("cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 2080"):
        assert device_peak(unknown) is None, unknown
    for alike in ("A100X", "A10M", "L40G", "H20", "A100-SXM-64GB", "GeForce RTX 4090 D", "GeForce RTX 4090 Laptop GPU"):
        assert device_peak(f"NVIDIA {alike}") is None, alike
    assert device_peak("TPU v4 lite") is None
    for earlier, name in enumerate(PEAK_BF16):
        assert not any(name.startswith(before) for before in list(PEAK_BF16)[:earlier]), (
            f"an earlier prefix hides {name}"
        )


# Memory


def test_memory_of_a_step_is_its_state_and_the_temporaries_that_xla_plans():
    trainer = small_trainer(batch_size=4)
    compiled = trainer.compile(4, 16)
    memory = step_memory(trainer, compiled)
    assert memory is not None
    count = sum(part.size for part in trainer.parts)
    assert memory.parameters == 4 * count
    assert memory.optimizer == 2 * 4 * count + 2 * 4  # AdamW's averages, and the step counts of AdamW and the schedule
    assert memory.batch == 2 * 4 * 4 * 16 + 4  # tokens, targets and the step number
    plan: Any = compiled.memory_analysis()
    assert memory.temporaries >= plan.temp_size_in_bytes > 4 * count  # at least a gradient of every parameter
    assert memory.total == sum(memory) < plan.argument_size_in_bytes + plan.temp_size_in_bytes + 10_000, (
        "the state must be donated"
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"remat": "full"}, {"accumulate": 4}])
def test_memory_analysis_reflects_options_that_reduce_memory(changes):
    config = ModelConfig(280, 32, 6, 4, 2, 8, 96, 64)
    plans = []
    for options in ({}, changes):
        model = decoder_shapes(dataclasses.replace(config, remat=options.get("remat", "none")))
        trainer = Trainer(model, TrainConfig(batch_size=8, accumulate=options.get("accumulate", 1)))
        memory = step_memory(trainer, trainer.compile(8, 64))
        assert memory is not None
        plans.append(memory.temporaries)
    assert plans[1] < plans[0] / 2


def test_a_backend_without_memory_analysis_gives_none():
    class Silent:
        def memory_analysis(self) -> None:
            return None

    assert step_memory(small_trainer(), cast(Any, Silent())) is None


def test_device_memory_where_it_is_reported():
    class Reporting:
        platform, device_kind = "gpu", "NVIDIA H200"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 5}

    assert device_memory(Reporting()) == (5, "that JAX may use of NVIDIA H200", True)
    found = device_memory(jax.devices()[0])
    assert found is not None
    assert found.size > 2**28
    assert not found.limit


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("limit", [True, False])
def test_a_step_that_does_not_fit_is_reported_before_anything_runs_or_is_written(limit, tmp_path, monkeypatch, capsys):
    def interrupt(state):
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    monkeypatch.setattr(program, "device_memory", lambda device: DeviceMemory(40_000, "of a small device", limit))
    before_step(monkeypatch, 1, interrupt)
    assert start(tmp_path, "a") == (1 if limit else 130)
    out, err = capsys.readouterr()
    assert re.search(r"^memory +\d+ KiB per step: parameters \d+ KiB, optimizer .*, batch .*, temporaries ", out, re.M)
    assert "MORE THAN the 39 KiB of a small device" in out
    if limit:
        assert re.fullmatch(r"error: a step needs \d+ KiB of memory, more than the 39 KiB of a small device; .*\n", err)
        assert not (tmp_path / "runs").exists()


def test_step_that_xla_cannot_allocate_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    monkeypatch.setattr(Trainer, "compile", refuse)
    assert start(tmp_path, "a") == 1
    assert re.match(
        "error: a step does not fit into the memory of cpu; to reduce it, use a larger --accumulate",
        capsys.readouterr().err,
    )


def test_a_run_compiles_its_step_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    with jax.log_compiles():
        assert start(tmp_path, "a", "--profile") == 0
    compiled = [record for record in caplog.messages if record.startswith("Finished XLA compilation of jit(_step)")]
    assert len(compiled) == 1


def test_words_for_sizes_and_rates():
    assert [describe_bytes(size) for size in (12, 2048, 3 * 2**20, 5.5 * 2**30)] == [
        "12 bytes",
        "2 KiB",
        "3 MiB",
        "5.5 GiB",
    ]
    assert [describe_flops(rate) for rate in (5e8, 1.5e10, 2.25e15)] == [
        "500.0 MFLOP/s",
        "15.0 GFLOP/s",
        "2250.0 TFLOP/s",
    ]


# Profile


def test_clock_table_sums_to_the_total_time():
    clock = Clock()
    clock.seconds.update({"data": 1.0, "dispatch": 2.0})
    lines = clock.table(steps=100, total=4.0)
    assert lines[0] == "host time of 100 steps: 4.00 s"
    shares = [re.sub(r" +", " ", line.strip()) for line in lines[1:]]
    assert shares == [
        "data 1.00 s 25.0% 10.000 ms/step",
        "dispatch 2.00 s 50.0% 20.000 ms/step",
        "other 1.00 s 25.0% 10.000 ms/step",
    ]


def test_operations_belong_to_the_part_of_their_named_scope():
    program = """
  %fusion.1 = f32[2]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(_step)/transpose(jvp(loss))/dot_general"}
  ROOT %add.2 = f32[2]{0} add(%a, %b), metadata={op_name="jit(_step)/optimizer/add" source_file="x.py"}
  dot.3 = f32[2]{0} dot(a, b), metadata={op_name="jit(_step)/jvp(model)/while/body/dot_general"}
  %copy.4 = f32[2]{0} copy(%a), metadata={op_name="jit(_step)/copy"}
"""
    parts = operation_parts(program)
    assert parts == {"fusion.1": "loss", "add.2": "optimizer", "dot.3": "model", "copy.4": "other"}
    found = [Operation("fusion.1", 3e6), Operation("dot.3", 1e6), Operation("while.1", 9e6), Operation("alien", 9e6)]
    text = "\n".join(device_table(found, {**parts, "while.1": "model"}, steps=2))
    assert "device time of 2 traced steps, over all threads and streams: 4.0 ms" in text
    assert re.search(r"loss +75.0% +1.500 ms/step", text)
    assert re.search(r"model +25.0% +0.500 ms/step", text)
    assert device_table([], parts, steps=2) == ["the trace has no operation of the step"]


@pytest.mark.parametrize(("first", "last", "steps"), [(1, 100, 5), (1, 5, 3), (1, 2, 0), (50, 100, 5), (9, 8, 0)])
def test_tracer_traces_the_available_steps(first, last, steps):
    assert Tracer(None, first, last).steps == steps


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory) -> Iterator[None]:
    with compilation_cache(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.mark.slow
def test_profile_writes_a_trace_and_reports_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    assert start(tmp_path, "a", "--profile") == 0
    out = capsys.readouterr().out
    assert "host time of 8 steps" in out
    for part in ("first step", "checkpoints", "other"):
        assert re.search(rf"^  {part} +[\d.]+ s +[\d.]+% +[\d.]+ ms/step$", out, re.MULTILINE), part
    assert "device time of 5 traced steps" in out
    for part in ("model", "loss", "optimizer"):
        assert re.search(rf"^    {part} +[\d.]+% +[\d.]+ ms/step$", out, re.MULTILINE), part
    assert operations(tmp_path / "runs" / "a" / "profile")
    assert start(tmp_path, "b", "--profile", "--steps", "2") == 0
    assert "no step was traced: the run had 2 steps, and the trace starts after 2" in capsys.readouterr().out


# Speed


def test_first_step_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    metrics = StepMetrics(jnp.array(2.0), jnp.array(1.0), jnp.array(1e-3), jnp.ones(1, bool))
    parts: Any = SimpleNamespace(
        trainer=SimpleNamespace(parts=()),
        sampler=SimpleNamespace(starts=np.zeros(1), tokens=100),
        metrics=SimpleNamespace(write=lambda step, **row: rows.append(row), flush=lambda: None),
        display=SimpleNamespace(progress=lambda step, text: lines.append(text)),
        cost=loop.Cost(flops_per_token=1e9, peak=1e12),
        clock=SimpleNamespace(part=lambda name: contextlib.nullcontext()),
    )
    now = 10.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    fetcher = loop._Fetcher(parts)
    fetcher.add(1, metrics)
    now = 70.0
    fetcher.skip_time()
    for step in (2, 3):
        fetcher.add(step, metrics)
    fetcher.fetch(keep=2)
    now = 72.0
    fetcher.fetch(keep=0)
    assert lines == ["loss 2.000  grad 1.00", "loss 2.000  grad 1.00  100 tokens/s  10.0% MFU"]
    assert "tokens_per_s" not in rows[0]
    assert rows[1] == rows[2] == {**rows[0], "tokens_per_s": 100.0, "flops_per_s": 10**11, "mfu": 0.1, "seconds": 62.0}
