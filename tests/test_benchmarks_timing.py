"""Tests how the benchmark measures time and energy: order and warm-up, with calls that only record that they ran."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import (
    Energy,
    EnergyLog,
    Pairs,
    Sensor,
    Timing,
    blocks_in_turns,
    host_blocks,
    host_pairs,
    keep_busy,
    measure_energy,
)
from benchmarks.torch_bench import TorchBench


class Meter(Sensor):
    """An energy counter of a GPU that draws `watts`. The counter changes every `step` seconds."""

    def __init__(self, watts: float, step: float) -> None:
        super().__init__(gpu=False)
        self.why_no_energy = None
        self._energy = lambda: watts * step * (time.perf_counter() // step)


def noting(log: list[str]) -> list[Callable[[], Any]]:
    return [lambda name=name: log.append(name) for name in ("floor", "method", "forward")]


def test_every_second_pair_runs_in_the_opposite_order() -> None:
    log: list[str] = []
    pairs = host_pairs(noting(log), lambda _: None, Timing(0, 0, 0), Sensor(gpu=False), 0.0)
    timed = log[-3 * timing.MIN_PAIRS :]
    assert timed[:6] == ["floor", "method", "forward", "forward", "method", "floor"]
    assert timed[:6] * (timing.MIN_PAIRS // 2) == timed
    assert len(pairs.floor) == len(pairs.method) == len(pairs.forward) == timing.MIN_PAIRS >= 20
    assert pairs.figures()["forward_ms"] >= 0
    without = host_pairs(noting(log)[:2], lambda _: None, Timing(0, 0, 0, min_pairs=2), Sensor(gpu=False), 0.0)
    assert len(without.floor) == 2
    assert without.figures()["forward_ms"] is None


def test_the_device_is_warm_before_the_first_pair() -> None:
    log: list[str] = []
    start = time.perf_counter()
    host_pairs(noting(log)[:2], lambda _: None, Timing(0, warmup=0.1, energy_seconds=0), Sensor(gpu=False), 0.0)
    assert time.perf_counter() - start > 0.1
    assert keep_busy(noting(log), 0, timing.same, timing.same) == 0


def test_the_host_is_one_round_ahead_of_the_device() -> None:
    log: list[int] = []

    def run() -> int:
        log.append(len(log) + 1)
        time.sleep(0.002)
        return len(log)

    waited: list[int] = []
    rounds = keep_busy([run], 0.02, timing.same, lambda number: waited.append((number, len(log))[0]))
    assert waited == list(range(1, rounds + 1))


@pytest.mark.parametrize("step", [0.02, 0.1])
def test_joules_do_not_depend_on_how_coarse_the_counter_is(step: float) -> None:
    energy = measure_energy(lambda: time.sleep(0.01), 0.6, timing.same, timing.same, Meter(700, step))
    assert energy.note is None
    assert energy.joules is not None
    assert 0.95 * 7 < energy.joules < 2 * 7  # 10 ms at 700 W; a busy machine sleeps longer


def test_energy_that_cannot_be_measured_says_why() -> None:
    def measured(seconds: float, sensor: Sensor) -> Energy:
        return measure_energy(lambda: time.sleep(0.01), seconds, timing.same, timing.same, sensor)

    assert measured(1, Sensor(gpu=False)) == Energy(None, "no GPU is measured")
    assert "shorter than 0.2 s" in str(measured(0, Meter(700, 0.02)).note)
    assert "hardly changed" in str(measured(0.25, Meter(700, 10.0)).note)
    figures = Pairs([1.0], [1.0], [], energy=Energy(2.5)).figures()
    assert (figures["joules"], figures["joules_note"]) == (2.5, None)
    with EnergyLog(Meter(700, 10.0)) as log:
        pass
    assert log.power() is None


def test_without_a_driver_the_sensor_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(timing.ctypes, "CDLL", missing)
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)
    sensor = Sensor(gpu=True)
    assert sensor.read() == []
    assert "libnvidia-ml.so.1: no such file; there is no nvidia-smi" in str(sensor.why_not)
    assert "libnvidia-ml" in str(sensor.why_no_energy)


class FakeEvent:
    """A CUDA event with a clock that only the calls advance."""

    now = 0.0  # ms

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_events_lie_between_the_calls_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = TorchBench("cpu")
    bench.gpu = True
    log: list[str] = []

    def call(name: str) -> None:
        log.append(name)
        FakeEvent.now += {"floor": 0.25, "method": 1.5, "forward": 0.5}[name]
        time.sleep(0.001)

    calls = [lambda name=name: call(name) for name in ("floor", "method", "forward")]
    pairs = bench.time_pairs(calls, Timing(0, 0.02, 0.3, min_pairs=4), Meter(500, 0.02))
    figures = pairs.figures()
    assert len(pairs.forward) == figures["pairs"] == 4
    assert (figures["floor_ms"], figures["ms"], figures["forward_ms"]) == pytest.approx((0.25, 1.5, 0.5))
    assert figures["joules"] > 0
    assert log[:3] == ["floor", "method", "forward"]  # once each, to find how often to repeat short calls
    pair = ["floor"] * 4 + ["method"] + ["forward"] * 2  # repeated to fill 1 ms
    timed = pair + pair[::-1] + pair + pair[::-1]
    assert timed in [log[at : at + len(timed)] for at in range(len(log))]
    assert log[-1] == "method"  # the energy block
    assert bench.time_block(calls[1], 3) == pytest.approx(1.5)


def test_processes_take_as_many_steps_as_they_agree_on() -> None:
    log: list[str] = []
    blocks = host_blocks(lambda: log.append("step"), lambda: None, 18.0, Sensor(gpu=False), lambda seconds: 1.0)
    assert (len(blocks.times), blocks.steps) == (9, 2)
    assert len(log) == 1 + 18
    log.clear()
    alone = host_blocks(lambda: log.append("step"), lambda: None, 0.0, Sensor(gpu=False), lambda seconds: 2.0)
    assert (alone.times, alone.steps, len(log)) == ([2000.0], 1, 1)


def test_blocks_of_two_steps_alternate() -> None:
    log: list[str] = []
    seconds = iter([1.0, 2.0])  # of a step
    found = blocks_in_turns(noting(log)[:2], lambda: None, 40.0, Sensor(gpu=False), lambda _: next(seconds))
    assert [(len(blocks.times), blocks.steps) for blocks in found] == [(timing.MIN_PAIRS, 2), (timing.MIN_PAIRS, 1)]
    pair = ["floor", "floor", "method"]
    assert log == ["floor", "method"] + (pair + pair[::-1]) * (timing.MIN_PAIRS // 2)
    log.clear()
    once = blocks_in_turns(noting(log)[:2], lambda: None, 0.0, Sensor(gpu=False), lambda _: 2.0)
    assert ([blocks.times for blocks in once], log) == ([[2000.0], [2000.0]], ["floor", "method"])
    ratio = {"ratio": 3.0, "ratio_p20": 2.4, "ratio_p80": 3.6, "pairs": 3}
    assert timing.ratio_figures([2.0, 6.0, 4.0], [1.0, 2.0, 1.0]) == pytest.approx(ratio)
