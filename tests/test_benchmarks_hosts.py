"""benchmarks.hosts on a CPU: its rows, the check before a row is timed, its processes, and its tables."""

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jax_host_stand_ins
import pytest
import torch
import trl_stand_ins
from flax import nnx
from hub_models import import_transformers

from benchmarks import (
    hosts,
    hosts_jax,
    hosts_process,
    hosts_table,
    hosts_torch,
    hosts_transformers,
    hosts_trl,
    results,
    tables,
)
from benchmarks.hosts_process import answer, answers
from benchmarks.hosts_rows import CONFIGS, HOSTS, KEY, Request, Row, in_turns, plan
from benchmarks.hosts_torch import make_model
from benchmarks.page_tables import NOT_YET
from benchmarks.results import RECORDED
from benchmarks.timing import BATCHES, WARM_UP
from benchmarks.trace import CALLS, Work

transformers = import_transformers()
REQUEST = Request(rows=[], file="", seconds=0.0)
WORK = [Work("gemm", 0, 10, True), Work("small", 14, 6, True)]


@pytest.fixture(scope="module", autouse=True)
def only_the_rows_are_scanned() -> None:
    """Each row collects garbage twice. A scan of what the tests of other files have left takes half a second."""
    gc.freeze()


def check_row(row: Row, most: float = 1e-3) -> dict[str, Any]:
    """Measures a row, and checks what each has. Its loss may differ by `most` from the library's."""
    found = answer(row, REQUEST)
    check_figures(row, found, most)
    return found


def check_figures(row: Row, found: dict[str, Any], most: float = 1e-3) -> None:
    assert found["status"] == "ok", found["note"]
    assert found["tokens_per_s"] == pytest.approx(1000 * row.batch * row.seq / found["step_ms"])
    assert found["loss_error"] <= most
    assert found["peak_bytes"] is None


@pytest.mark.parametrize("variant", ["plain", "ours"])
def test_a_row_of_transformers(variant: str) -> None:
    found = check_row(Row(host="transformers", config="smoke", variant=variant, seq=16, batch=2))
    _, own = hosts_transformers.in_float32("smoke")
    assert 0 < found["gradient_error"] <= hosts_process.MOST_TIMES * own
    assert (found["gradient_error"] == own) == (variant == "plain")


def test_a_row_with_kernels_is_traced_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_torch, "trace_torch", lambda step: step() or WORK)
    row = Row(host="transformers", config="smoke", variant="plain", seq=16, batch=2)
    found = answer(row, replace(REQUEST, kernels=True))
    assert [kernel["name"] for kernel in found["by_kernel"]] == ["gemm", "small"]
    assert [gap["after"] for gap in found["by_gap"]] == ["gemm"]
    assert found["device_ms"] == pytest.approx(0.016 / CALLS)
    assert "by_kernel" not in answer(row, REQUEST)

    def fails(step: Any) -> None:
        raise RuntimeError("the trace holds no kernel")

    monkeypatch.setattr(hosts_torch, "trace_torch", fails)
    found = answer(row, replace(REQUEST, kernels=True))
    assert (found["status"], found["trace_note"]) == ("ok", "RuntimeError: the trace holds no kernel")
    assert found["tokens_per_s"] > 0


def test_a_tuned_model_has_causal_attention_without_a_mask() -> None:
    """In a compiled graph. A model with a sliding window keeps its masks."""
    tokens, losses, attention = torch.arange(32)[None] * 7 % 512, [], []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        attention.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in calls)
        return graph.forward

    for tuned in (False, True):
        model = make_model("smoke")
        if tuned:
            hosts_transformers.tune(model, "smoke")
        losses.append(hosts_transformers.loss_of(torch.compile(model, backend=compiler), tokens).item())
    torch.compiler.reset()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    (mask, causal), tuned_attention = attention
    assert tuned_attention == (None, True)
    assert (mask is None) == causal
    model = make_model("smoke")
    hosts_transformers.tune(model, "gemma3-270m")
    assert model.config._attn_implementation == "sdpa"


def test_tuned_rows_keep_less_for_the_backward_pass() -> None:
    from torch._functorch import config

    assert config.activation_memory_budget == 1.0
    with hosts_transformers.kept_by_the_compiler(hosts_transformers.KEPT):
        assert config.activation_memory_budget == 0.9
    assert config.activation_memory_budget == 1.0


def test_a_row_begins_without_the_model_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []

    def make(config: str) -> Any:
        gc.disable()  # only an explicit collection counts
        left.append(sum(one() is not None for one in alive))
        model = make_model(config)
        model.itself = [model]  # as a bound method that replaces another
        alive.append(weakref.ref(model))
        return model

    left: list[int] = []
    hosts_transformers.in_float32("smoke")
    monkeypatch.setattr(hosts_transformers, "make_model", make)
    row = Row(host="transformers", config="smoke", variant="plain", seq=16, batch=1)
    try:
        for _ in range(2):
            hosts_transformers.measure(row, 0.01)
    finally:
        gc.enable()
    assert left == [0, 0]


def test_a_library_that_is_not_installed_skips_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix", None)
    found = answer(Row(host="tunix", config="smoke", variant="plain", seq=8, batch=2, part="loss"), REQUEST)
    assert found["status"] == "skipped"
    assert "tunix" in found["note"]


class Model(trl_stand_ins.Model):
    """With what the benchmark reads of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config.vocab_size = trl_stand_ins.VOCABULARY

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Stand-ins for trl, and the trainers that the benchmark makes."""
    made: list[Any] = []

    def make(row: Row, folder: str) -> Any:
        import trl  # pyright: ignore[reportMissingImports]

        options = {"args": trl.GRPOConfig()} if row.trainer == "GRPO" else {}
        reference = Model() if row.trainer == "DPO" else None
        made.append(getattr(trl, f"{row.trainer}Trainer")(Model(), ref_model=reference, **options))
        return made[-1]

    monkeypatch.setattr(hosts_trl, "make_trainer", make)
    monkeypatch.setattr(hosts_torch, "_forget", lambda: None)  # a scan for garbage takes longer than a row
    with trl_stand_ins.installed(*trl_stand_ins.trl()):
        yield made


def pair_of_trl(trainer: str = "GRPO", part: str = "loss") -> list[Row]:
    row = Row(host="trl", config="smoke", variant="plain", seq=16, batch=4, trainer=trainer, part=part)
    return [row, replace(row, variant="ours")]


@pytest.mark.parametrize(("trainer", "part"), HOSTS["trl"].parts)
def test_rows_of_trl_are_timed_in_turns(
    monkeypatch: pytest.MonkeyPatch, trainers: list[Any], trainer: str, part: str
) -> None:
    called: list[int] = []
    loss_of = hosts_trl.loss_of

    def noting(row: Row, trainer: Any, batch: Any) -> torch.Tensor:
        called.append(trainers.index(trainer))
        return loss_of(row, trainer, batch)

    monkeypatch.setattr(hosts_trl, "loss_of", noting)
    monkeypatch.setattr(hosts_trl, "LOGGING_STEPS", 1)
    rows = pair_of_trl(trainer, part)
    plain, ours = found = [*answers(rows, REQUEST)]
    for row, figures in zip(rows, found, strict=True):
        check_figures(row, figures)
        assert figures["ratio"] == pytest.approx(plain["step_ms"] / ours["step_ms"])
        assert figures["pairs"] == 1
    assert plain["gradient_error"] == 0 < ours["gradient_error"]
    assert [hasattr(one, "_core_triton") for one in trainers] == [False, True]
    first = 2 + WARM_UP  # the loss before and after the patch, then steps
    assert called == [0] * first + [1] * first + [0, 1]
    if trainer == "GRPO":
        assert all("entropy" in one.metrics and not one._metrics["train"] for one in trainers)
    printed = hosts.line(asdict(rows[1]) | ours | {"ratio": 1.5, "ratio_p20": 1.4, "ratio_p80": 1.625})
    assert " tokens/s, ours 1.500 x (1.400 to 1.625), the loss differs by " in printed


def test_the_memory_of_a_variant_is_without_that_of_the_other(
    monkeypatch: pytest.MonkeyPatch, trainers: list[Any]
) -> None:
    held = iter([5, 5, 105])  # in all, before the first trainer, and before the second
    peak, calls = hosts_torch.peak, list[str]()
    monkeypatch.setattr(hosts_trl, "allocated", lambda: next(held))
    monkeypatch.setattr(hosts_torch, "peak", lambda step, others: 1000 - others)
    assert [found["peak_bytes"] for found in answers(pair_of_trl(), REQUEST)] == [1000, 900]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    assert peak(lambda: calls.append("step"), 100) == 900
    assert calls == ["reset"] + ["step"] * BATCHES


def test_a_variant_that_fails_leaves_the_other(monkeypatch: pytest.MonkeyPatch, trainers: list[Any]) -> None:
    check, time_on_device = hosts_trl.check_differences, hosts_trl.time_on_device

    def differs(variant: str, errors: Any) -> dict[str, float]:
        return check(variant, [1.0, 0.0] if variant == "ours" else errors)

    monkeypatch.setattr(hosts_trl, "check_differences", differs)
    rows = pair_of_trl()
    plain, ours = answers(rows, REQUEST)
    check_figures(rows[0], plain)
    wrong = "ValueError: the loss of ours differs by 1.0e+00 from the library's, at most 1.0e-02"
    assert (ours["status"], ours["note"]) == ("failed", wrong)
    assert plain["note"] == f"timed alone, because in turns there was an error: {wrong}"
    assert hosts.line(asdict(rows[0]) | plain).endswith(f"; {plain['note']}")
    assert "ratio" not in plain

    def fits(rows: list[Any], *options: Any) -> Any:
        if len(rows) > 1:
            raise torch.OutOfMemoryError("two trainers")
        return time_on_device(rows, *options)

    monkeypatch.setattr(hosts_trl, "check_differences", check)
    monkeypatch.setattr(hosts_trl, "time_on_device", fits)
    for row, figures in zip(rows, answers(rows, REQUEST), strict=True):
        check_figures(row, figures)
        assert figures["note"].endswith("there was an error: OutOfMemoryError: two trainers")
        assert "ratio" not in figures


@contextmanager
def jax_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for tunix and MaxText, with a model of each."""

    def embedder(vocab_size: int, embed_dim: int, rngs: nnx.Rngs) -> nnx.Module:
        return jax_host_stand_ins.Embedder(vocab_size, embed_dim, jnp.bfloat16, rngs)

    def model(config: str, seq: int) -> tuple[Any, Any]:
        options = jax_host_stand_ins.MaxTextConfig(logits_via_embedding=True)
        mesh = SimpleNamespace(size=1)
        shape = CONFIGS[config]
        return options, jax_host_stand_ins.MaxTextModel(shape["vocab_size"], shape["hidden_size"], options, mesh)

    monkeypatch.setattr(hosts_jax, "maxtext_model", model)
    hosts_jax.compiled.cache_clear()
    llama = jax_host_stand_ins.module("tunix.models.llama3.model", Embedder=embedder)
    packages = jax_host_stand_ins.packages("tunix.models", "tunix.models.llama3")
    stand_ins = *jax_host_stand_ins.tunix("0.1.7"), *jax_host_stand_ins.maxtext(), *packages, llama
    with jax_host_stand_ins.installed(*stand_ins):
        yield


@pytest.mark.parametrize("host", ["tunix", "maxtext"])
def test_rows_of_jax_hosts(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    (trainer, part), *_ = HOSTS[host].parts
    plain = Row(host=host, config="smoke", variant="plain", seq=16, batch=2, trainer=trainer, part=part)
    rows = [plain, replace(plain, variant="ours")]
    waited: list[Any] = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda result: waited.append(result) or wait(result))
    with jax_hosts(monkeypatch):
        found = [*answers(rows, REQUEST)]
        for row, figures in zip(rows, found, strict=True):
            check_figures(row, figures, most=3e-3)  # tunix rounds log-probabilities to bfloat16
            assert figures["ratio"] == pytest.approx(found[0]["step_ms"] / found[1]["step_ms"])
            assert (figures["gradient_error"] == 0) == (row is plain)
        assert len({id(result) for result in waited}) == len(waited) == 3  # before the blocks, and after each
        monkeypatch.setattr(hosts_jax, "trace_without_graphs", lambda call, given: call(*given) and WORK)
        alone = check_row(rows[1], most=3e-3)
        assert "ratio" not in alone
        assert answer(rows[1], replace(REQUEST, kernels=True))["by_kernel"][0]["name"] == "gemm"


def test_a_loss_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(host="transformers", config="smoke", variant="ours", seq=16, batch=1)
    loss_of = hosts_transformers.loss_of
    factors = iter([1.02])

    def other(*given: Any) -> torch.Tensor:
        return loss_of(*given) * next(factors, 1.0)

    _, own = hosts_transformers.in_float32("smoke")
    monkeypatch.setattr(hosts_transformers, "loss_of", other)
    with pytest.raises(
        ValueError, match=r"^the loss of ours differs by 2\.0e-02 from a float32 model's, at most 1\.0e-02$"
    ):
        hosts_transformers.changed(make_model("smoke"), row)
    factors = iter([1.0 + 3 * own])
    wrong = r"^the gradient of the head of ours differs by \S+ from a float32 model's, at most "
    monkeypatch.setattr(hosts_transformers, "MOST_ERRORS", (1.0, 1.0))
    with pytest.raises(ValueError, match=wrong):
        hosts_transformers.changed(make_model("smoke"), row)
    with pytest.raises(ValueError, match=r"^the gradient of the head of ours differs by 5\.0e-02 from the library's"):
        hosts_process.check_differences("ours", [0.0, 0.05])
    with pytest.raises(ValueError, match="differs by nan"):
        hosts_process.check_differences("ours", [float("nan"), 0.0])


def test_rows_share_a_process_and_kernels_of_liger_come_last() -> None:
    (process,) = plan("transformers", ["smoke"], ["liger", "plain", "ours+compiled", "ours"], [512, 4096], None)
    rows = [(row.variant, row.seq, row.batch) for row in process]
    sizes = [(512, 16), (4096, 4)]
    assert rows == [(name, *size) for size in sizes for name in ("plain", "ours", "ours+compiled")] + [
        ("liger", *size) for size in sizes
    ]
    every = [
        row for host in HOSTS for process in plan(host, ["smoke"], hosts.VARIANTS, [512, 4096], None) for row in process
    ]
    assert len({tuple(getattr(row, key) for key in hosts.KEY) for row in every}) == len(every)
    together = [[row.variant for row in rows] for rows in in_turns(every) if len(rows) > 1]
    parts = [part for name in ("trl", "tunix", "maxtext") for part in HOSTS[name].parts]
    assert together == [["plain", "ours"]] * len(sizes) * len(parts)


Process = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Runs the command, where `process` gives the answers of a process to its rows. It dies after fewer."""

    def run(process: Process, *options: str) -> tuple[int, list[dict[str, Any]]]:
        def answers(module: str, request: str, limit: float, environment: dict[str, str]) -> dict[str, Any]:
            asked = json.loads(request)
            found = process(asked["rows"])
            Path(asked["file"]).write_text("".join(json.dumps(one) + "\n" for one in found))
            died = len(found) < len(asked["rows"])
            return {"status": "failed" if died else "ok", "note": "its process ended" if died else None}

        monkeypatch.setattr(hosts, "answer_of", answers)
        path = tmp_path / "hosts.json"
        status = hosts.main(["--configs", "smoke", "--seq", "512", "--json", str(path), "--commit", "1", *options])
        return status, json.loads(path.read_text())["rows"]

    return run


OK = {"status": "ok", "note": None, "tokens_per_s": 1000.0, "peak_bytes": 2**30, "loss_error": 1e-4}


def test_the_command_writes_a_row_for_each_variant(command: Any, capsys: Any) -> None:
    def process(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [OK if row["variant"] == "plain" else {"status": "failed", "note": "an error"} for row in rows]

    status, rows = command(process, "--hosts", "transformers", "trl", "--variants", "plain", "ours")
    assert status == 1  # a row of ours failed
    assert len(rows) == 2 + 2 * len(HOSTS["trl"].parts)
    keys = {"host", "config", "variant", "seq", "batch", "tokens_per_s", "peak_bytes", "part", "trainer"}
    assert all(keys <= set(row) for row in rows)
    assert [row["status"] for row in rows[:2]] == ["ok", "failed"]
    out = capsys.readouterr().out
    assert "transformers, smoke, plain, 16 x 512" in out
    assert "1,000 tokens/s, 1.00 GiB, the loss differs by 1.0e-04" in out
    assert "trl, GRPO, loss, smoke, ours, 16 x 512               failed: an error" in out


def test_the_command_prints_kernels_and_gaps(command: Any, capsys: Any) -> None:
    traced = {"by_kernel": [{"name": "gemm", "launches": 2.0, "ms": 1.0}], "device_ms": 1.0}
    traced |= {"by_gap": [{"after": "gemm", "before": "gemm", "times": 1.0, "ms": 3.0}], "gap_ms": 3.0}
    answers = [OK | traced, OK | {"trace_note": "an error"}]
    _, rows = command(lambda rows: answers, "--hosts", "transformers", "--variants", "plain", "ours")
    assert rows[0]["by_gap"] == traced["by_gap"]
    *printed, _, failed = [line.strip() for line in capsys.readouterr().out.splitlines()[-6:]]
    assert failed == "no trace: an error"
    assert printed == [
        "1.000 ms    2.0 x  gemm",
        "1.000 ms    2.0 x  all",
        "3.000 ms    1.0 x  between gemm and gemm",
        "3.000 ms in all gaps, 1.000 ms of work",
    ]


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(SystemExit, match="--kernels needs a GPU: a trace on a CPU has none of its kernels"):
        hosts.main(["--kernels", "--commit", "1"])


def test_another_process_takes_the_rows_after_one_in_which_a_process_ended(command: Any) -> None:
    calls: list[list[str]] = []

    def process(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        calls.append([row["variant"] for row in rows])
        return [OK] * (1 if len(calls) == 1 else len(rows))

    status, rows = command(process, "--hosts", "transformers", "--variants", "plain", "ours", "liger", "ours+liger")
    assert calls == [["plain", "ours", "liger", "ours+liger"], ["liger", "ours+liger"]]
    assert [(row["status"], row["note"]) for row in rows] == [
        ("ok", None),
        ("failed", "its process ended"),
        *[("ok", None)] * 2,
    ]
    assert status == 1


def test_options_without_a_row_are_an_error() -> None:
    with pytest.raises(SystemExit, match="--hosts, --variants and --parts have no row in common"):
        hosts.main(["--hosts", "tunix", "--variants", "liger", "--commit", "1"])


def test_no_row_begins_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    rows = [{"host": "transformers", "config": "smoke", "variant": "plain", "seq": 16, "batch": 1}] * 2
    request = {"rows": rows, "file": str(tmp_path / "rows"), "seconds": 0.0}
    hosts_process.main([json.dumps(request), str(path)])
    assert [json.loads(line)["status"] for line in (tmp_path / "rows").read_text().splitlines()] == ["ok", "ok"]
    hosts_process.main([json.dumps({**request, "until": -1.0}), str(path)])
    assert (tmp_path / "rows").read_text() == ""
    assert json.loads(path.read_text())["status"] == "ok"


def row(host: str, variant: str, speed: float, gib: float, **more: Any) -> dict[str, Any]:
    named = {
        "host": host,
        "config": "qwen2.5-0.5b",
        "variant": variant,
        "seq": 512,
        "batch": 16,
        "commit": "0123456789",
    }
    measured = {"status": "ok", "note": None, "tokens_per_s": speed, "peak_bytes": int(gib * 2**30)}
    return {**named, "trainer": None, "part": "step", **measured, **more}


def test_tables_have_the_rows_and_say_which_bars_they_miss(tmp_path: Path, capsys: Any) -> None:
    of_grpo = {"trainer": "GRPO", "part": "loss"}
    in_turns = {"ratio": 1.3, "ratio_p20": 1.25, "ratio_p80": 1.35}
    rows = [
        row("transformers", "plain", 1000.0, 9.0),
        row("transformers", "liger", 1500.0, 4.0),
        row("transformers", "ours+compiled", 3000.0, 5.0),
        row("transformers", "ours", 0.0, 0.0, status="failed"),
        row("trl", "plain", 1000.0, 2.0, **of_grpo),
        row("trl", "ours", 1450.0, 1.5, **of_grpo, **in_turns),  # the other one was measured again alone
        row("trl", "plain", 1000.0, 2.0, **of_grpo, seq=4096, batch=4, **in_turns),
        row("trl", "ours", 1500.0, 2.0, **of_grpo, seq=4096, batch=4, **in_turns),
        row("tunix", "plain", 1000.0, 2.0, trainer="SFT", part="loss"),
        row("tunix", "ours", 2100.0, 1.5, trainer="SFT", part="loss"),
        row("tunix", "ours", 1.0, 1.0, config="smoke", part="loss"),
        row("maxtext", "plain", 0.0, 0.0, status="failed", part="loss"),
        row("maxtext", "ours", 3000.0, 1.0, part="loss"),
        row("transformers", "liger", 1500.0, 4.0, seq=4096, batch=4),
        row("transformers", "ours+compiled", 3000.0, 5.0, seq=4096, batch=4) | {"peak_bytes": None},
    ]
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"device": "H200", "versions": {"torch": "1"}, "rows": rows}))
    tables.main(["--hosts", "--json", str(path)])
    out = capsys.readouterr().out
    assert out.startswith(
        "H200, torch 1, at 0123456:\n\n| transformers, sequences x tokens | as it is | Liger | ours |"
    )
    cells = "1,000/s, 9.00 GiB | 1,500/s (1.50 x), 4.00 GiB | failed | 3,000/s (3.00 x), 5.00 GiB |"
    assert f"| qwen2.5-0.5b, 16 x 512 | {cells}\n" in out
    assert "| GRPO, loss, qwen2.5-0.5b, 16 x 512 | 1,000/s, 2.00 GiB | 1,450/s (1.45 x), 1.50 GiB |" in out
    assert "| 1,000/s, 2.00 GiB | 1,500/s (1.30 x, 1.25 to 1.35), 2.00 GiB |" in out  # timed in turns
    assert "smoke" not in out
    bars = " ".join(out[out.index("- ours") :].split())
    assert "no more memory: missed at qwen2.5-0.5b, 16 x 512 (1.25 x the memory); memory not measured at" in bars
    assert "memory not measured at qwen2.5-0.5b, 4 x 4,096." in bars
    assert "tuned, is faster than Liger, at no more memory: not measured." in bars
    missed = "(1.30 x as fast); GRPO, loss, qwen2.5-0.5b, 4 x 4,096 (1.00 x the memory)."
    assert f"peak memory is lower: missed at GRPO, loss, qwen2.5-0.5b, 4 x 4,096 {missed}" in bars
    assert "twice as fast: met at all 1 shapes measured." in bars
    assert all(len(line) <= 120 for line in out.splitlines() if not line.startswith("|"))


def test_rows_of_other_hosts_stay_beside_a_new_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    versions = {"torch": "1", "transformers": "5", "maxtext": "0.2.4"}
    rows = [row("transformers", "plain", 1.0, 1.0), row("maxtext", "plain", 2.0, 1.0), row("trl", "plain", 3.0, 1.0)]
    dated = [{**one, "date": "2026-01-01"} for one in rows]
    old.write_text(json.dumps({"device": "H200", "versions": versions, "date": "2026-01-01", "rows": dated}))
    new.write_text(old.read_text())
    results.ResultFile(new, "H200", {"torch": "1", "maxtext": "0.2.5"}, "c0ffee", KEY).add(
        row("maxtext", "ours", 4.0, 1.0)
    )
    assert "1 rows are left out" in capsys.readouterr().err
    assert results.merge(old, [new], KEY) == json.loads(new.read_text())["rows"]
    assert [one["tokens_per_s"] for one in json.loads(old.read_text())["rows"]] == [1.0, 3.0, 4.0]
    assert json.loads(old.read_text())["versions"] == versions | {"maxtext": "0.2.5"}
    assert "1 rows of {'maxtext': '0.2.4'}" in capsys.readouterr().err
    fresh = results.ResultFile(new, "H200", {"torch": "1", "transformers": "6"}, "c0ffee", KEY)
    assert not fresh.rows  # every host depends on it
    other = tmp_path / "other.json"
    of_trl = [{**row("trl", "ours", 5.0, 1.0), "date": "2099-01-01"}]
    head = {"device": "H200", "commit": "c0ffee", "date": "2099-01-01"}
    other.write_text(json.dumps({**head, "versions": {"torch": "1"}, "rows": of_trl}))
    older = tmp_path / "older.json"
    older.write_text(json.dumps({"device": "H200", "versions": versions, "date": "2026-01-01", "rows": dated}))
    merged = results.merge(tmp_path / "merged.json", [older, new, other], KEY)  # the newest has no MaxText
    assert [one["tokens_per_s"] for one in merged if one["host"] == "maxtext"] == [4.0]
    other.write_text(other.read_text().replace('"torch": "1"', '"torch": "2"'))
    with pytest.raises(ValueError, match=r"older\.json is of H200, {'torch': '1', .*, and another is not"):
        results.merge(tmp_path / "refused.json", [older, other], KEY)


def test_the_page_has_the_tables_of_the_recorded_results() -> None:
    files = sorted(RECORDED.parent.glob("*/hosts.json"))
    lines, place = hosts_table.hosts_tables([json.loads(file.read_text()) for file in files]), hosts_table.PLACE
    text = place.page.read_text()
    assert place.filled(text, lines) == text
    assert hosts_table.hosts_tables([]) == [NOT_YET]
    again = place.filled(text, ["| a |"])
    assert f"{place.begin}\n\n| a |\n\n{place.end}" in again
    assert place.filled(again, lines) == text


def test_configs_are_those_of_the_published_models() -> None:
    from flax_models.model.families import PUBLISHED

    for name in ("llama3.2-1b", "qwen2.5-0.5b"):
        values, ours = CONFIGS[name], PUBLISHED[name]
        found = [values[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")]
        assert found == [ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers]
        heads = values["num_attention_heads"], values["num_key_value_heads"]
        assert heads == (ours.num_heads, ours.num_kv_heads)
