"""Recorded launches: a replayed call gives the results of the first, on other arrays, streams, threads and devices."""

import ctypes
import os
import shutil
import struct
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import build

import core_triton
from benchmarks.launch_recorder import fake_gpu
from benchmarks.torch_launches import CAPABILITY, Steps
from core_triton import launch, replay, token_losses

SIZES = (300, 128, 1000)


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    replay._recordings.clear()
    yield
    replay._recordings.clear()


def arrays_of(seed: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    n, d, v = SIZES
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator).bfloat16().to(device).requires_grad_()
    w = (torch.randn(v, d, generator=generator) / d**0.5).bfloat16().to(device).requires_grad_()
    return x, w, torch.randint(0, v, (n,), generator=generator).to(device)


def results(seed: int, device: str = "cuda", **options: Any) -> list[Tensor]:
    x, w, target = arrays_of(seed, device)
    loss = core_triton.linear_cross_entropy(x, w, target, **options)
    loss.sum().backward()
    with torch.no_grad():
        scored = core_triton.linear_cross_entropy(x, w, target, **options)
    assert x.grad is not None
    assert w.grad is not None
    return [loss.detach(), x.grad, w.grad, scored]


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, want, strict=True))


def fresh(seed: int, device: str = "cuda", **options: Any) -> list[Tensor]:
    """The results of calls that nothing was recorded of."""
    replay._recordings.clear()
    found = results(seed, device, **options)
    replay._recordings.clear()
    return found


def recordings() -> list[replay.Recording]:
    return [recording for recording in replay._recordings.values() if recording is not None]


def launches_of(recording: replay.Recording) -> int:
    return struct.unpack_from("<4q", recording.program)[3]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"memory_budget": 900_000}, {"softcap": 5.0, "z_loss_weight": 0.1}], ids=str)
def test_a_replay_is_bitwise_equal(options: dict[str, Any]) -> None:
    want = [fresh(seed, **options) for seed in range(3)]
    for _ in range(3):
        for seed in range(3):
            assert_same(results(seed, **options), want[seed])
    assert len(recordings()) >= 3  # training, scoring, the backward pass
    assert all(launches_of(recording) for recording in recordings())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bias", "padding", "class weights", "statistics"])
def test_calls_that_only_launch_kernels_are_recorded(kind: str) -> None:
    x, w, target = arrays_of(0)
    bias = torch.randn(len(w), generator=torch.Generator().manual_seed(1)).bfloat16().cuda().requires_grad_()
    options: dict[str, Any] = {
        "bias": {"linear_bias": bias},
        "padding": {"linear_bias": bias, "vocab_size": 990},
        "class weights": {"weight": torch.linspace(0.5, 2, len(w), device="cuda")},
        "statistics": {},
    }[kind]
    target = target % 990

    def made() -> list[Tensor]:
        loss, *rest = core_triton.linear_cross_entropy_with_stats(x, w, target, **options)
        if kind != "statistics":
            loss, rest = core_triton.linear_cross_entropy(x, w, target, **options), []
        leaves = (x, w, bias) if "linear_bias" in options else (x, w)
        return [loss.detach(), *torch.autograd.grad(loss, leaves), *(value for one in rest for value in one)]

    want = made()
    for _ in range(2):
        assert_same(made(), want)
    assert replay._recordings
    assert None not in replay._recordings.values()


TOKEN_LOSSES = {
    "grpo": token_losses.grpo(0.2, 0.28, 0.04),
    "weighted_nll": token_losses.weighted_nll(),
    "cispo": token_losses.cispo(1.0, 2.0),
}
TOKEN_STATS = "log_prob", "entropy", "lse", "argmax"


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_named_token_losses_are_recorded(name: str, reduction: Any) -> None:
    function, generator = TOKEN_LOSSES[name], torch.Generator().manual_seed(1)

    def made(seed: int) -> list[Tensor]:
        x, w, target = arrays_of(seed)
        target[::7] = -100
        generator.manual_seed(seed)
        per_token = [torch.randn(SIZES[0], generator=generator).cuda() for _ in function.per_token]
        per_token[0].requires_grad_()
        loss, stats = core_triton.linear_token_loss_with_stats(
            x, w, target, function, *per_token, reduction=reduction, stats=TOKEN_STATS, memory_budget=900_000
        )
        kept = [one for one in stats if one is not None]
        assert len(kept) == len(TOKEN_STATS)
        return [loss.detach(), *torch.autograd.grad(loss, [x, w, per_token[0]]), *kept]

    want = []
    for seed in range(3):
        replay._recordings.clear()
        want.append(made(seed))
    replay._recordings.clear()
    for _ in range(2):
        for seed in range(3):
            assert_same(made(seed), want[seed])
    assert None not in replay._recordings.values()
    assert len(recordings()) == 2  # with the backward pass


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_named_token_losses_only_launch_kernels(name: str) -> None:
    steps, function = Steps(), TOKEN_LOSSES[name]
    with fake_gpu(CAPABILITY, "NVIDIA H200", steps.launched, steps.multiplied), steps:
        x, w = (torch.empty(n, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (8192, 65536))
        per_token = [
            torch.empty(8192, device="cuda", requires_grad=index == 0) for index in range(len(function.per_token))
        ]
        target = torch.empty(8192, dtype=torch.int64, device="cuda")
        core_triton.linear_token_loss_with_stats(
            x, w, target, function, *per_token, reduction="sum", stats=TOKEN_STATS, memory_budget=2**28
        )
    assert len(steps.found) > 20  # of several chunks
    assert [step for step, launched in steps.found if launched is None] == []


@pytest.mark.gpu
def test_options_and_layouts_are_recorded_apart() -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"logit_scale": 0.5}, {"z_loss_weight": 0.1}, {"ignore_index": 7}, {"reduction": "sum"},
        {"implementation": "triton_sm80"},
    ]  # fmt: skip
    want = [fresh(0, **kind) for kind in kinds]
    for _ in range(2):
        for kind, expected in zip(kinds, want, strict=True):
            assert_same(results(0, **kind), expected)


@pytest.mark.gpu
def test_the_weights_of_tokens_are_those_of_each_call() -> None:
    rising = torch.linspace(0.0, 1.0, SIZES[0], device="cuda")
    kinds: list[dict[str, Any]] = [
        {"token_weight": rising, "normalizer": 7.5}, {"token_weight": 1.0 - rising, "normalizer": 3.0}
    ]  # fmt: skip
    want = [fresh(0, **kind) for kind in kinds]
    for _ in range(2):
        for kind, expected in zip(kinds, want, strict=True):
            assert_same(results(0, **kind), expected)
    assert len(recordings()) == 3  # training, scoring, the backward pass: of both kinds


@pytest.mark.gpu
def test_a_recording_holds_no_tensor() -> None:
    results(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        results(0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_calls_that_do_more_than_launch_are_not_recorded() -> None:
    want = fresh(0, label_smoothing=0.1)  # a path with GEMMs of the library
    for _ in range(2):
        assert_same(results(0, label_smoothing=0.1), want)
    assert None in replay._recordings.values()


@pytest.mark.gpu
def test_threads_and_streams() -> None:
    want = [fresh(seed) for seed in range(4)]
    failures: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = results(seed)
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(found, want[seed], strict=True)):
                    failures.append(f"thread {seed} differs")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_a_graph_captures_replays() -> None:
    x, w, target = arrays_of(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(core_triton.linear_cross_entropy(x, w, target), (x, w))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = core_triton.linear_cross_entropy(x, w, target)
        gradients = torch.autograd.grad(loss, (x, w))
    for seed in (1, 2):
        for array, values in zip((x, w, target), arrays_of(seed), strict=True):
            array.data.copy_(values.detach())
        graph.replay()
        torch.cuda.synchronize()
        assert_same([loss.detach(), *gradients], fresh(seed)[:3])


@pytest.mark.gpu
def test_arrays_that_share_memory_are_not_recorded() -> None:
    """An address then does not tell which array it belongs to."""
    w = torch.randn(512, 128, device="cuda").bfloat16()
    target = torch.arange(512, device="cuda") % 512
    with torch.no_grad():
        want = core_triton.linear_cross_entropy(w.clone(), w, target)
        for _ in range(2):
            assert torch.equal(core_triton.linear_cross_entropy(w, w, target), want)


@pytest.mark.gpu
def test_profilers_of_launches_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    want = fresh(0)
    results(0)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    launch._knobs.launch_enter_hook.add(hook)
    try:
        assert_same(results(0), want)
    finally:
        launch._knobs.launch_enter_hook.remove(hook)
    assert "d_weight_kernel" in seen


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device() -> None:
    want = fresh(0)
    for _ in range(2):
        assert_same(results(0, "cuda:1"), want)
        assert_same(results(0, "cuda:0"), want)


def test_overlapping_extents_are_found() -> None:
    assert not replay._overlap([(0, 8), (8, 16), (32, 40)])
    assert replay._overlap([(0, 9), (8, 16)])
    assert not replay._overlap([(8, 8), (0, 16)])
    x = torch.zeros(4, 6)
    assert replay._extent(x[1:3, ::2]) == (x.data_ptr() + 24, x.data_ptr() + 24 + 4 * 11)


# What a recording launches, without a GPU: a driver that writes it down.


class Launched(NamedTuple):
    """A launch as the driver saw it."""

    grid: tuple[int, ...]
    threads: int
    shared: int
    stream: int
    parameters: list[Any]  # a list each for TMA descriptors


class Driver:
    """The fake driver of fake_cuda_driver.c, and replay.c's module that uses it."""

    def __init__(self, folder: Path) -> None:
        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        path = folder / "fake_cuda_driver.so"
        source = Path(__file__).with_name("fake_cuda_driver.c")
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(path)], check=True)
        self._library = ctypes.CDLL(str(path))
        self.module = replay._native.__wrapped__(str(path))

    def run(self, recording: replay.Recording | None, bases: list[int], *, stream: int = 7) -> list[Launched]:
        """Returns the launches of a recording with its arrays at these addresses."""
        assert recording is not None
        self._words().value = 0
        self.module.run(recording.program, bases, 0, stream)
        log = (ctypes.c_int64 * 4096).in_dll(self._library, "fake_log")
        words, found = iter(log[: self._words().value]), []
        for handle in words:
            x, y, z, threads, shared, on = (next(words) for _ in range(6))
            described = [handle >> (8 + index) & 1 for index in range(handle & 255)]
            parameters = [[next(words) for _ in range(10)] if one else next(words) for one in described]
            found.append(Launched((x, y, z), threads, shared, on, parameters))
        return found

    def fail(self, error: int) -> None:
        """Makes every launch return an error, 0 for none."""
        ctypes.c_int.in_dll(self._library, "fake_error").value = error

    def _words(self) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, "fake_words")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("replay.c needs the headers of Python, as Triton's launchers do")
    yield Driver(tmp_path_factory.mktemp("driver"))
    replay._native.cache_clear()  # the module is one: the next call loads the real driver into it


def kernel(*kinds: str, descriptors: tuple[launch.DescriptorKind | None, ...] = ()) -> launch.Direct:
    """A compiled kernel that takes arguments of these types, and Triton's two scratch pointers."""
    taken: list[bool] = []
    left = list(descriptors)
    for kind in kinds:
        if kind == "constexpr":
            continue
        if not launch.is_descriptor(kind):
            taken.append(False)
        elif left.pop(0) is None:
            taken += [False] * 10
        else:
            taken += [True, *[False] * 4]
    handle = len(taken) + 2 + sum(256 << index for index, one in enumerate(taken) if one)
    return launch.Direct(print, handle, (4, 1, 96), (), kinds, descriptors)


POINTERS = kernel("*fp32", "*fp32", "*fp32", "i32")


def test_a_recording_launches_the_kernels_with_the_addresses_of_the_call(driver: Driver) -> None:
    x = torch.zeros(64)
    with replay.Recorder((x,)) as recorder:
        result = torch.empty(64)
        for size in (4096, 1024, 4096):  # each is freed before the next is there
            scratch = torch.empty(size)
            addresses = [x.data_ptr() + 4, scratch.data_ptr() + 8, result.data_ptr()]
            recorder.add(POINTERS, (2, 3, 5), [*addresses, -size])
            del scratch
        recorder.add(POINTERS, (2, 0, 5), [*addresses, 1])  # no program: nothing is launched
    recording = recorder.recording((result, None))
    assert recording is not None
    assert recording.workspace == 4 * 4096
    assert recording.outputs[1] is None
    inputs, outputs, workspace = 1 << 40, 1 << 41, 1 << 42
    found = driver.run(recording, [inputs, outputs, 0, workspace], stream=9)
    expected = [[inputs + 4, workspace + 8, outputs, -size, 0, 0] for size in (4096, 1024, 4096)]
    assert [one.parameters for one in found] == expected
    assert {one[:4] for one in found} == {((2, 3, 5), 128, 96, 9)}


def test_numbers_and_descriptors_reach_the_driver(driver: Driver) -> None:
    made = launch.DescriptorKind(swizzle=3, itemsize=2, dtype=9, block=(128, 64))
    takes = kernel(
        "tensordesc<bf16[128, 64]>", "constexpr", "fp32", "i64", "tensordesc<bf16[16, 32]>", descriptors=(made, None)
    )
    x, y = torch.zeros(40, 96).bfloat16(), torch.zeros(24, 32).bfloat16()
    with replay.Recorder((x, y)) as recorder:
        values = [launch.Blocks(x[8:], (128, 64)), None, -1.5, 2**40, launch.Blocks(y, (16, 32))]
        recorder.add(takes, (1, 1, 1), values)
        recorder.add(kernel("fp32", "u64", "i32"), (1, 1, 1), [1e39, 2**63 + 5, -7])  # float32 has no 1e39
    found, extreme = driver.run(recorder.recording(()), [4096, 8192])
    assert extreme.parameters[:3] == [int.from_bytes(struct.pack("<f", float("inf")), "little"), 5 - 2**63, -7]
    descriptor, *rest = found.parameters
    assert descriptor[:9] == [4096 + 8 * 192, 9, 2, 96, 32, 192, 64, 128, 3]
    assert rest[:4] == [32, 96, 96, 1]
    assert rest[4:6] == [int.from_bytes(struct.pack("<f", -1.5), "little"), 2**40]
    assert rest[6:] == [8192, 24, 32, 32, 1, 0, 24, 32, 32, 1, 0, 0]


def test_kernels_that_take_other_numbers_are_refused() -> None:
    with replay.Recorder(()) as recorder, pytest.raises(TypeError, match="a kernel takes fp64"):
        recorder.add(kernel("fp64"), (1, 1, 1), [1.0])


def test_a_thread_without_a_context_gets_the_device_s(driver: Driver) -> None:
    made = launch.DescriptorKind(swizzle=3, itemsize=4, dtype=7, block=(8, 32))
    x, contexts = torch.zeros(8, 32), []
    with replay.Recorder((x,)) as recorder:
        recorder.add(kernel("tensordesc<fp32[8, 32]>", descriptors=(made,)), (1, 1, 1), [launch.Blocks(x, (8, 32))])
    recording = recorder.recording(())

    def work() -> None:
        contexts.append(driver.run(recording, [0])[0].parameters[0][9])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert contexts == [1000]  # the primary context of device 0


def test_an_error_of_the_driver_is_raised(driver: Driver) -> None:
    x = torch.zeros(8)
    with replay.Recorder((x,)) as recorder:
        recorder.add(kernel("*fp32"), (1, 1, 1), [x.data_ptr()])
    recording = recorder.recording(())
    driver.fail(700)
    try:
        with pytest.raises(RuntimeError, match="CUDA error 700 in a recorded call: an error of the fake driver"):
            driver.run(recording, [0])
    finally:
        driver.fail(0)
    assert driver.run(recording, [64])[0].parameters == [64, 0, 0]
    with pytest.raises(OSError, match=r"the CUDA driver cannot be loaded: nowhere.so.*"):
        driver.module.load("nowhere.so")


def test_a_kernel_with_too_many_parameters_is_not_recorded() -> None:
    x = torch.zeros(8)
    with replay.Recorder((x,)) as recorder:
        recorder.add(kernel(*["*fp32"] * 127), (1, 1, 1), [x.data_ptr()] * 127)
    assert recorder.recording(()) is None


def test_without_a_compiler_a_call_warns_once_and_launches_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "compile_module_from_src", broken)
    monkeypatch.setattr(launch, "is_direct", lambda: True)
    monkeypatch.setattr(launch, "on_device", lambda device: nullcontext())
    replay._can_replay.cache_clear()
    replay._native.cache_clear()
    made: list[int] = []
    run = lambda: (made.append(1),)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="could not be compiled.*Failed to find C compiler"):
        replay.call("key", torch.device("cpu"), (), run)
    replay.call("key", torch.device("cpu"), (), run)
    assert len(made) == 2
    assert not replay._recordings
    replay._can_replay.cache_clear()


def test_a_call_whose_arrays_share_memory_leaves_recording_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_direct", lambda: True)
    monkeypatch.setattr(launch, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(replay, "_can_replay", lambda: True)
    columns = torch.zeros(8, 2)
    for inputs, count in (((columns[0], columns[0]), 0), (tuple(columns.unbind(1)), 0), ((columns[0], columns[1]), 1)):
        replay.call("key", torch.device("cpu"), inputs, lambda: (torch.empty(3),))
        assert len(recordings()) == len(replay._recordings) == count


def test_arrays_that_live_together_lie_side_by_side(driver: Driver) -> None:
    with replay.Recorder(()) as recorder:
        long = torch.empty(1024)
        short = torch.empty(1024)
        recorder.add(kernel("*fp32", "*fp32"), (1, 1, 1), [long.data_ptr(), short.data_ptr()])
        del short
        later = torch.empty(512)
        recorder.add(kernel("*fp32", "*fp32"), (1, 1, 1), [long.data_ptr(), later.data_ptr()])
    recording = recorder.recording(())
    assert recording is not None
    assert recording.workspace == 8 * 1024
    assert [one.parameters[:2] for one in driver.run(recording, [0])] == [[0, 4096], [0, 4096]]


def test_the_recorder_keeps_nothing_alive() -> None:
    """Not even of a call that turns out to do more than launch."""
    with replay.Recorder(()) as recorder:
        matrix = torch.empty(32, 32)
        blocks = launch.Blocks(matrix, (16, 16))
        recorder.add(kernel("tensordesc<fp32[16, 16]>", descriptors=(None,)), (1, 1, 1), [blocks])
        storage = replay.StorageWeakRef(matrix.untyped_storage())
        del matrix, blocks
        assert storage.expired()
        torch.ones(2).add_(1)
        recorder.add(kernel("*fp32"), (1, 1, 1), [0])
    assert recorder.recording(()) is None


def test_an_address_of_neither_an_input_nor_an_allocation_is_not_recorded() -> None:
    hidden = torch.zeros(8)
    with replay.Recorder((torch.zeros(8),)) as recorder:
        recorder.add(kernel("*fp32"), (1, 1, 1), [hidden.data_ptr()])
    assert recorder.recording(()) is None
