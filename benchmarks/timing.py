"""Time as ratios to the floor: method and floor alternate, and each neighbouring pair gives one ratio.

The clock of a GPU changes with heat and power by more than the differences that matter here. What two neighbours share
cancels in their ratio. Three rules make the figures those of a steady state:

- Floor and method run alternately for `Timing.warmup` seconds before the first pair of a row. A cool GPU runs faster
  for some seconds, so a short burst after a pause shows a time that a training run never sees.
- Every second pair runs in the opposite order. The second run of a pair meets the heat and the cache that the first one
  left. In both orders this cancels; in one order it would count for one of the two.
- The forward pass is timed between the pairs, not after them. So it cannot seem longer than the whole call only
  because the GPU is hotter by then.
"""

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_PAIRS, MAX_PAIRS = 20, 200
MIN_BLOCKS, MAX_BLOCKS = 3, 9
WARM_UP = 3  # training steps before a measurement; adapters need two until all that trains has a gradient
BATCHES = 4  # different ones of a training run, taken in turn
LEAST_ENERGY_SECONDS = 0.2  # NVML's counter changes every 20 to 100 ms: a shorter block holds too few changes


@dataclass(frozen=True)
class Timing:
    """How long the parts of one row's measurement take.

    A row takes about `warmup + max(seconds, min_pairs pairs) + energy_seconds`, after its compilation and its
    correctness check. `min_pairs` wins over `seconds`: 20 pairs of the slowest calls (0.3 s each) take 12 s.

    Args:
        seconds: for all pairs of the row.
        warmup: floor and method alternate for so long before the first pair.
        energy_seconds: the method runs back to back for so long while its energy is measured. Below
            LEAST_ENERGY_SECONDS no energy is measured.
        min_pairs: taken even if they last longer than `seconds`.
    """

    seconds: float = 1.0
    warmup: float = 5.0
    energy_seconds: float = 2.0
    min_pairs: int = MIN_PAIRS


@dataclass(frozen=True)
class Energy:
    """Joules of one call, or None with the reason."""

    joules: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Pairs:
    """Times of neighbouring runs of floor and method, in ms.

    Args:
        floor: of each pair.
        method: of each pair.
        readings: SM clock (MHz) and power (W) meanwhile.
        forward: of the forward pass, one for each pair; empty if there is none.
        energy: of one call of the method.
    """

    floor: Sequence[float]
    method: Sequence[float]
    readings: Sequence[tuple[float, float]]
    forward: Sequence[float] = ()
    energy: Energy = Energy()

    def figures(self) -> dict[str, Any]:
        """Returns the medians and percentiles as keys of a row."""
        floor, method = np.asarray(self.floor), np.asarray(self.method)
        clock, power = _median_readings(self.readings)
        return {
            "ms": float(np.median(method)),
            "ms_p20": float(np.percentile(method, 20)),
            "ms_p80": float(np.percentile(method, 80)),
            "floor_ms": float(np.median(floor)),
            **ratio_figures(method, floor),
            "forward_ms": float(np.median(self.forward)) if len(self.forward) else None,
            "joules": self.energy.joules,
            "joules_note": self.energy.note,
            "sm_mhz": clock,
            "power_w": power,
        }


def ratio_figures(times: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns the median and percentiles of times relative to others of the same pair, as keys of a row."""
    ratio = np.asarray(times) / np.asarray(others)
    return {
        "ratio": float(np.median(ratio)),
        "ratio_p20": float(np.percentile(ratio, 20)),
        "ratio_p80": float(np.percentile(ratio, 80)),
        "pairs": len(ratio),
    }


def _median_readings(readings: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    if not readings:
        return None, None
    clock, power = (float(value) for value in np.median(np.asarray(readings), axis=0))
    return clock, power


def pair_count(seconds: float, pair_seconds: float, min_pairs: int = MIN_PAIRS) -> int:
    """Returns how many pairs fill `seconds`, within bounds."""
    return int(np.clip(seconds / max(pair_seconds, 1e-9), min_pairs, max(min_pairs, MAX_PAIRS)))


def keep_busy(
    calls: Sequence[Callable[[], Any]], seconds: float, mark: Callable[[Any], Any], wait: Callable[[Any], None]
) -> int:
    """Runs the calls in turn for `seconds`, one round ahead of the device, and returns the number of rounds.

    Args:
        calls: each enqueues one call and returns its result.
        seconds: for all rounds; 0 runs none.
        mark: from the last result to something that can be waited for.
        wait: blocks until what `mark` returned is done.
    """
    start, rounds, previous = time.perf_counter(), 0, None
    while time.perf_counter() - start < seconds:
        result = None
        for call in calls:
            result = call()
        marked = mark(result)
        if previous is not None:
            wait(previous)
        previous = marked
        rounds += 1
    if previous is not None:
        wait(previous)
    return rounds


class Sensor:
    """Reads SM clock, power and energy of the first visible GPU.

    NVML is the source. Without it, nvidia-smi gives clock and power but no energy.

    Attributes:
        why_not: why there is no clock and power, or None.
        why_no_energy: why there is no energy, or None.
    """

    def __init__(self, *, gpu: bool) -> None:
        self.why_not: str | None = None if gpu else "no GPU is measured"
        self.why_no_energy = self.why_not
        self._read: Callable[[], tuple[float, float]] | None = None
        self._energy: Callable[[], float] | None = None
        if not gpu:
            return
        try:
            nvml = Nvml()
            nvml.read()
            self._read = nvml.read
        except (OSError, AttributeError) as error:  # no library, one without these functions, or a driver that refuses
            self.why_no_energy = f"NVML: {error}"
            self._read_by_smi(self.why_no_energy)
            return
        try:
            nvml.energy()
            self._energy = nvml.energy
        except (OSError, AttributeError) as error:
            self.why_no_energy = f"NVML's energy counter: {error}"

    def _read_by_smi(self, why: str) -> None:
        self._read = _nvidia_smi()
        if self._read is None:
            self.why_not = f"{why}; there is no nvidia-smi"
            return
        try:
            self._read()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._read, self.why_not = None, f"{why}; nvidia-smi: {error}"

    def read(self) -> list[tuple[float, float]]:
        """Returns one reading (MHz, W), or none."""
        return [] if self._read is None else [self._read()]

    def watch(self, done: Callable[[], bool], interval: float = 0.02) -> list[tuple[float, float]]:
        """Reads until `done()`; the device is busy meanwhile, so these are readings under load."""
        readings = []
        while not done():
            readings += self.read()
            time.sleep(interval)
        return readings

    def energy(self) -> float:
        """Returns joules since the driver was loaded; only where `why_no_energy` is None."""
        assert self._energy is not None
        return self._energy()


class Nvml:
    """The three NVML functions that are needed, for the first visible GPU.

    Raises:
        OSError: the library is missing, or a function returns an error.
        AttributeError: the library is too old for a function.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if first.startswith(("GPU-", "MIG-")):
            self._call("nvmlDeviceGetHandleByUUID", first.encode(), ctypes.byref(self._handle))
        else:
            index = int(first) if first.isdigit() else 0
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name}: {self._library.nvmlErrorString(status).decode()}")

    def read(self) -> tuple[float, float]:
        """Returns the SM clock in MHz and the power in W."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        sm = ctypes.c_uint(1)  # NVML_CLOCK_SM
        self._call("nvmlDeviceGetClockInfo", self._handle, sm, ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(power))
        return float(clock.value), power.value / 1000

    def energy(self) -> float:
        """Returns joules since the driver was loaded."""
        total = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(total))
        return total.value / 1000


def _nvidia_smi() -> Callable[[], tuple[float, float]] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command = [
        "nvidia-smi",
        f"--id={first or 0}",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
    ]

    def read() -> tuple[float, float]:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        clock, power = answer.strip().split(",")
        return float(clock), float(power)

    return read


class EnergyLog:
    """Notes, in a thread, when the energy counter changes and to what.

    The counter changes only every 20 to 100 ms. Power from one change to another is exact however coarse the counter
    is, and power over whole seconds does not depend on where in a call the changes lie.
    """

    INTERVAL = 0.004  # seconds between two looks at the counter

    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._changes: list[tuple[float, float]] = []  # (time, joules)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "EnergyLog":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last = self._sensor.energy()
        while not self._stop.wait(self.INTERVAL):
            joules = self._sensor.energy()
            if joules != last:
                self._changes.append((time.perf_counter(), joules))
                last = joules

    def power(self) -> float | None:
        """Returns the mean power in W from the first to the last change; None if they are too close together."""
        if len(self._changes) < 2:
            return None
        (began, first), (ended, last) = self._changes[0], self._changes[-1]
        return (last - first) / (ended - began) if ended - began >= LEAST_ENERGY_SECONDS / 2 else None


def measure_energy(
    run: Callable[[], Any], seconds: float, mark: Callable[[Any], Any], wait: Callable[[Any], None], sensor: Sensor
) -> Energy:
    """Returns the energy of one call, from the energy counter over a block of calls back to back.

    Args:
        run: enqueues one call.
        seconds: of the block; the counter's resolution does not matter from about 2 s on.
        mark: as in `keep_busy`.
        wait: as in `keep_busy`.
        sensor: has the counter.
    """
    if sensor.why_no_energy is not None:
        return Energy(note=sensor.why_no_energy)
    if seconds < LEAST_ENERGY_SECONDS:
        return Energy(note=f"not measured: a block of {seconds:g} s is shorter than {LEAST_ENERGY_SECONDS:g} s")
    with EnergyLog(sensor) as log:
        start = time.perf_counter()
        calls = keep_busy([run], seconds, mark, wait)
        elapsed = time.perf_counter() - start
    power = log.power()
    if power is None:
        return Energy(note=f"the energy counter hardly changed within {elapsed:.2g} s")
    return Energy(power * elapsed / calls)


def host_pairs(
    calls: Sequence[Callable[[], Any]],
    wait: Callable[[Any], None],
    timing: Timing,
    sensor: Sensor,
    block_seconds: float,
) -> Pairs:
    """Times pairs with the host's clock, several calls enqueued at once so that what the host adds vanishes.

    Args:
        calls: floor, method and, where it is to be timed too, the forward pass. Each enqueues one call and returns its
            result.
        wait: blocks until a result is there.
        timing: how long everything takes.
        sensor: read while the device works.
        block_seconds: the least time of the calls that are enqueued together.
    """
    readings: list[tuple[float, float]] = []

    def block(call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(count):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / count

    counts = []
    for call in calls:
        block(call, 1)
        counts.append(max(1, int(np.ceil(block_seconds / block(call, 1)))))
    keep_busy(calls, timing.warmup, same, wait)
    pair_seconds = sum(count * block(call, count) for call, count in zip(calls, counts, strict=True))
    times: list[list[float]] = [[] for _ in calls]
    for pair in range(pair_count(timing.seconds, pair_seconds, timing.min_pairs)):
        for index in pair_order(len(calls), pair):
            times[index].append(1000 * block(calls[index], counts[index]))
    if sensor.why_not is None:  # in a separate block: a reading takes host time
        result = None
        for call, count in zip(calls, counts, strict=True):
            for _ in range(count):
                result = call()
        readings += sensor.read()
        wait(result)
    energy = measure_energy(calls[1], timing.energy_seconds, same, wait, sensor)
    return Pairs(times[0], times[1], readings, times[2] if len(times) > 2 else (), energy)


def same(result: Any) -> Any:
    return result


def pair_order(calls: int, pair: int) -> Sequence[int]:
    """Returns the order of a pair's calls: every second pair is the mirror image of the one before."""
    order = range(calls)
    return order[::-1] if pair % 2 else order


@dataclass(frozen=True)
class Blocks:
    """Times of a step, in ms, each the mean of a block of steps, with SM clock (MHz) and power (W) read meanwhile."""

    times: Sequence[float]
    steps: int  # of a block
    readings: Sequence[tuple[float, float]]

    def figures(self) -> dict[str, Any]:
        """Returns the median and percentiles as keys of a row."""
        clock, power = _median_readings(self.readings)
        return {
            "step_ms": float(np.median(self.times)),
            "step_ms_p20": float(np.percentile(self.times, 20)),
            "step_ms_p80": float(np.percentile(self.times, 80)),
            "blocks": len(self.times),
            "block_steps": self.steps,
            "sm_mhz": clock,
            "power_w": power,
        }


def host_blocks(
    step: Callable[[], Any],
    wait: Callable[[], None],
    seconds: float,
    sensor: Sensor,
    agreed: Callable[[float], float] = same,
) -> Blocks:
    """Returns `blocks_in_turns` of one step."""
    (blocks,) = blocks_in_turns([step], wait, seconds, sensor, agreed)
    return blocks


def blocks_in_turns(
    steps: Sequence[Callable[[], Any]],
    wait: Callable[[], None],
    seconds: float,
    sensor: Sensor,
    agreed: Callable[[float], float] = same,
) -> list[Blocks]:
    """Times steps with the host's clock in blocks; within one the device does not wait for the host.

    The blocks of several steps alternate: one of each is a pair, and there are MIN_PAIRS. One step has MIN_BLOCKS to
    MAX_BLOCKS.

    Args:
        steps: each enqueues one step.
        wait: blocks until the last one is done.
        seconds: time for all blocks of a step; 0: time each step once, and read no sensor.
        sensor: read while the device works on a block that is not timed.
        agreed: from the seconds of a step in this process to those on which all processes that take the steps together
            agree, so that they take as many.
    """

    def block(step: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return 1000 * (time.perf_counter() - start) / count

    wait()
    once = [agreed(block(step, 1) / 1000) for step in steps]
    if not seconds:
        return [Blocks([1000 * one], 1, []) for one in once]
    least, most = (MIN_BLOCKS, MAX_BLOCKS) if len(steps) == 1 else (MIN_PAIRS, MIN_PAIRS)
    counts = [max(1, round(seconds / most / max(one, 1e-9))) for one in once]
    longest = max(count * one for count, one in zip(counts, once, strict=True))
    times: list[list[float]] = [[] for _ in steps]
    for number in range(int(np.clip(seconds / max(longest, 1e-9), least, most))):
        for index in pair_order(len(steps), number):
            times[index].append(block(steps[index], counts[index]))
    readings: list[list[tuple[float, float]]] = [[] for _ in steps]
    if sensor.why_not is None:  # in separate blocks: a reading takes host time
        for step, count, read in zip(steps, counts, readings, strict=True):
            for _ in range(count):
                step()
            read += sensor.read()
            wait()
    return [Blocks(*one) for one in zip(times, counts, readings, strict=True)]
