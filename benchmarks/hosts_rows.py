"""What `benchmarks.hosts` measures: hosts, shapes of models, and rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

KEY = ("host", "config", "trainer", "part", "variant", "seq", "batch")  # which rows are the same measurement
# Tokens of a sequence, and sequences of a step that fit with the library's own loss.
SIZES = {512: 16, 4096: 4}

# The shapes of published models, as transformers names them.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "pad_token_id": None,  # the gradient of a random model by a row of zeros is infinite
    },
    "smoke": {  # for the tests of the benchmark, on a CPU
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
PERMANENT = ("liger", "ours+liger")  # cannot be undone in a process, so they come last
VARIANTS = ("plain", "compiled", "liger", "ours", "ours+liger", "ours+compiled", "tuned", "ours+tuned")
COMPILED = ("compiled", "tuned")  # the ends of the names of variants in torch.compile


class Host(NamedTuple):
    """What is measured of a library.

    Args:
        module: measures its rows, with `measure` or, if in_turns, `measure_in_turns`.
        variants: in the order in which a process takes them, except those in `PERMANENT`.
        parts: (trainer, part) of the rows.
        in_turns: the variants of a row are timed in turns.
    """

    module: str
    variants: tuple[str, ...]
    parts: tuple[tuple[str | None, str], ...]
    in_turns: bool = False


HOSTS = {
    "transformers": Host(
        module="benchmarks.hosts_transformers",
        variants=("plain", "ours", "compiled", "ours+compiled", "tuned", "ours+tuned", "liger", "ours+liger"),
        parts=((None, "step"),),
    ),
    "trl": Host(
        module="benchmarks.hosts_trl",
        variants=("plain", "ours"),
        parts=(("GRPO", "loss"), ("GRPO", "step"), ("SFT", "step"), ("DPO", "step")),
        in_turns=True,
    ),
    "tunix": Host(
        module="benchmarks.hosts_jax",
        variants=("plain", "ours"),
        parts=(("SFT", "loss"),),
        in_turns=True,
    ),
    "maxtext": Host(
        module="benchmarks.hosts_jax",
        variants=("plain", "ours"),
        parts=((None, "loss"),),
        in_turns=True,
    ),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        host: a key of `HOSTS`.
        config: a key of `CONFIGS`.
        variant: "plain" is the library as it is, "compiled" in torch.compile, "liger" with all kernels of liger-kernel,
            "ours" with the adapter of the host, "ours+liger" with `patch(model, liger=True)`, and "ours+compiled" the
            patched model in torch.compile. "tuned" and "ours+tuned" are compiled too, with `KEPT` and `tune` of
            `hosts_transformers`.
        seq: tokens of a sequence.
        batch: sequences of a step.
        trainer: of the library, if it has several.
        part: "step" is a training step; "loss" is the head and the loss, forward and backward, on fixed hidden states.
    """

    host: str
    config: str
    variant: str
    seq: int
    batch: int
    trainer: str | None = None
    part: str = "step"

    @property
    def name(self) -> str:
        """What is printed of it."""
        names = (self.host, self.trainer, None if self.part == "step" else self.part, self.config, self.variant)
        return f"{', '.join(name for name in names if name)}, {self.batch} x {self.seq}"


@dataclass(frozen=True)
class Request:
    """What a process is to do.

    Args:
        rows: the fields of `Row`s of one host and one config.
        file: gets a line of JSON for each row that was taken, in order.
        seconds: of the timed steps of a row.
        until: no row begins later than so many seconds after the process began; None: all begin.
        ahead: compile what a row compiles, for the caches of the other processes, and measure nothing.
        kernels: trace a row after its timed steps.
    """

    rows: Sequence[dict[str, Any]]
    file: str
    seconds: float
    until: float | None = None
    ahead: bool = False
    kernels: bool = False


def plan(
    host: str, configs: Sequence[str], variants: Sequence[str], sizes: Sequence[int], batch: int | None
) -> list[list[Row]]:
    """Returns the rows of a host, those of a process together, in the order in which it takes them.

    Args:
        host: a key of `HOSTS`.
        configs: keys of `CONFIGS`.
        variants: names in `VARIANTS`. Those that the host does not have are left out.
        sizes: tokens of a sequence.
        batch: sequences of a step; None: that of SIZES.
    """
    of = HOSTS[host]
    processes = []
    for config in configs:
        process = [
            Row(
                host=host,
                config=config,
                variant=variant,
                seq=seq,
                batch=batch or SIZES[seq],
                trainer=trainer,
                part=part,
            )
            for seq in SIZES
            for trainer, part in of.parts
            for variant in of.variants
            if seq in sizes and variant in variants
        ]
        processes.append(sorted(process, key=lambda row: row.variant in PERMANENT))
    return [process for process in processes if process]


def in_turns(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows of a process, in order, those together that are timed in turns."""

    def group(row: Row) -> Row:
        return replace(row, variant="") if HOSTS[row.host].in_turns else row

    return [list(found) for _, found in groupby(rows, group)]
