"""The process of one row of `benchmarks.hosts`.

    python -m benchmarks.hosts_process ROW ANSWER

ROW is the JSON of a `Row`, ANSWER the file that gets what was measured.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import UnavailableError, describe, load, out_of_memory
from benchmarks.timing import BATCHES, WARM_UP, Sensor, host_blocks

# Relative to the library, which rounds logits to bfloat16
MOST_ERRORS = 1e-2, 3e-2  # of the loss, and of the gradient of the head

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
    },
    "smoke": {  # for the tests of the benchmark, on a CPU
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip
VARIANTS = ("plain", "compiled", "liger", "ours", "ours+liger", "ours+compiled")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        host: the library.
        config: a key of `CONFIGS`.
        variant: "plain" is the library as it is, "compiled" in torch.compile, "liger" with all kernels of liger-kernel,
            "ours" with `patch(model)`, "ours+liger" with `patch(model, liger=True)`, and "ours+compiled" the patched
            model in torch.compile.
        seq: tokens of a sequence.
        batch: sequences of a step.
        seconds: of the timed steps.
    """

    host: str
    config: str
    variant: str
    seq: int
    batch: int
    seconds: float


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (times are no results)"


def measure(row: Row) -> dict[str, Any]:
    """Returns the figures of a row.

    Raises:
        UnavailableError: a library is not installed.
        ValueError: as `changed`.
    """
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    model = make_model(row.config, device)
    tokens = torch.randint(model.config.vocab_size, (BATCHES, row.batch, row.seq), device=device)
    errors = changed(model, row.variant, tokens[0, :1])
    run = torch.compile(model, dynamic=False) if row.variant.endswith("compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps = 0

    def step() -> None:
        nonlocal steps
        loss_of(run, tokens[steps % BATCHES]).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1

    wait = torch.cuda.synchronize if on_gpu else _no_wait
    for _ in range(WARM_UP):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures = host_blocks(step, wait, row.seconds, Sensor(gpu=on_gpu)).figures()
    return {
        "tokens_per_s": 1000 * row.batch * row.seq / figures["step_ms"],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        **errors,
        **figures,
    }


def make_model(config: str, device: str) -> Any:
    """Returns a model of transformers with random bfloat16 weights, in training mode."""
    transformers = load("transformers")
    values = dict(CONFIGS[config])
    shape = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.bfloat16)
    return made.train()


def changed(model: Any, variant: str, tokens: Tensor) -> dict[str, float]:
    """Patches a model for a variant and returns by how much its loss and the gradient of its head differ from before.

    Args:
        model: of the library, without a patch.
        variant: a name in `VARIANTS`.
        tokens: (1, seq).

    Raises:
        ValueError: they differ by more than rounding.
    """
    expected = loss_and_gradient(model, tokens)
    if variant == "liger":
        patching = load("liger_kernel.transformers.monkey_patch")
        patching.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model)
    elif variant.startswith("ours"):
        if variant == "ours+liger":
            load("liger_kernel.transformers")
        load("core_triton.hosts.transformers").patch(model, liger=variant == "ours+liger")
    found = loss_and_gradient(model, tokens)
    errors = [((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)]
    for name, error, most in zip(("loss", "gradient of the head"), errors, MOST_ERRORS, strict=True):
        if not error <= most:
            raise ValueError(f"the {name} of {variant} differs by {error:.1e} from the library's, at most {most:g}")
    return {"loss_error": errors[0], "gradient_error": errors[1]}


def loss_and_gradient(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a model's loss and the gradient of its head, in float32."""
    loss = loss_of(model, tokens)
    loss.backward()
    gradient = model.get_output_embeddings().weight.grad.float()
    model.zero_grad()
    return loss.detach().float(), gradient


def loss_of(run: Any, tokens: Tensor) -> Tensor:
    """Returns the loss of a model on tokens (batch, seq)."""
    return run(input_ids=tokens, labels=tokens, use_cache=False).loss


def _no_wait() -> None:
    """Waits for the CPU: a call has finished when it returns."""


def answer(row: Row) -> dict[str, Any]:
    """Returns what this process measures, with its "status" and "note". Errors are answers."""
    try:
        return {"status": "ok", "note": None, **measure(row)}
    except UnavailableError as error:
        return {"status": "skipped", "note": str(error)}
    except Exception as error:  # the message of any failure is the result
        traceback.print_exc()
        return {"status": "oom" if out_of_memory(error) else "failed", "note": describe(error)}


def main(arguments: Sequence[str] | None = None) -> None:
    row, path = sys.argv[1:] if arguments is None else arguments
    Path(path).write_text(json.dumps(answer(Row(**json.loads(row))), default=float))


if __name__ == "__main__":
    main()
