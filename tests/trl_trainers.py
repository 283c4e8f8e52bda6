"""Trainers of trl with a small random model, a vocabulary of words and a few examples."""

import warnings
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 61


def make_model(**fields: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    name = fields.pop("name", "Llama")
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes, **heads, **ids, **fields)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]


def examples(name: str) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]

    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return " ".join(f"w{word}" for word in torch.randint(VOCABULARY - 3, (length,), generator=generator).tolist())

    rows: list[dict[str, Any]] = []
    for number in range(16):
        row: dict[str, Any] = {"prompt": text(2 + number % 3)}
        if name in ("SFT", "KTO"):
            row["completion"] = text(3 + number % 5)
        if name == "KTO":
            row["label"] = number % 2 == 0
        if name == "DPO":
            row |= {"chosen": text(3 + number % 5), "rejected": text(4 + number % 3)}
        rows.append(row)
    return datasets.Dataset.from_list(rows)


GENERATION = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2}
MORE: dict[str, dict[str, Any]] = {"GRPO": GENERATION, "RLOO": GENERATION}


def make(name: str, folder: Path, model: Any = None, cls: Any = None, steps: int = 20, **more: Any) -> Any:
    """Returns a trainer: SFT, GRPO, DPO, KTO or RLOO."""
    import trl  # pyright: ignore[reportMissingImports]

    kwargs = {key: more.pop(key) for key in ("eval_dataset", "peft_config", "ref_model") if key in more}
    options = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
        **MORE.get(name, {}),
        **more,
    }
    if name in ("GRPO", "RLOO"):
        kwargs["reward_funcs"] = reward
    if name in ("DPO", "KTO") and "peft_config" not in kwargs:
        kwargs.setdefault("ref_model", make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(trl, f"{name}Config")(**options)
        model = make_model() if model is None else model
        if config.beta if name in ("GRPO", "RLOO") else False:  # the reference model is loaded again
            model.save_pretrained(folder / "model")
            model = type(model).from_pretrained(folder / "model")
        return (cls or getattr(trl, f"{name}Trainer"))(
            model,
            args=config,
            train_dataset=examples(name),
            processing_class=tokenizer(),
            **kwargs,
        )


def train(trainer: Any) -> list[dict[str, float]]:
    """Returns what a trainer logged in each step, without times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return [
        {
            key: float("nan") if value is None else float(value)
            for key, value in step.items()
            if "time" not in key and "second" not in key
        }
        for step in trainer.state.log_history
    ]
