"""Compares adapters with the peft library: outputs, gradients, merged weights, and files that peft writes."""

import dataclasses
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import WORDS, train, write_texts
from hub_models import SIZES, import_transformers, load_transformers, make, tokens, write_folder, write_tokenizer
from safetensors.numpy import load_file, save_file

from flax_models import export
from flax_models.data.batches import Batch
from flax_models.errors import RunError
from flax_models.hub.adapter_folder import NEUTRAL, READ, load_adapter, read_adapter_config, save_adapter
from flax_models.hub.weights import check_new_folder, load, save
from flax_models.model.decoder import Decoder
from flax_models.model.lora import adapt, adapted_projections, merge
from flax_models.model.lora_config import LoraConfig, Projection
from flax_models.train import main
from flax_models.train.arguments import parse
from flax_models.train.config import TrainConfig
from flax_models.train.metrics import read_rows
from flax_models.train.step import Trainer

# Case of hub_models -> projections with an adapter, and whether DoRA is used. phi3 fuses query, key and value.
CASES: dict[str, tuple[str, tuple[Projection, ...], bool]] = {
    "lora": ("llama2", ("query", "key", "value", "out", "gate", "up", "down"), False),
    "dora": ("qwen2", ("query", "key", "value", "out", "gate", "up", "down"), True),
    "fused-lora": ("phi3", ("key", "value", "out", "gate", "up", "down"), False),
    "fused-dora": ("phi3", ("query", "value", "up"), True),
}


def import_peft() -> Any:
    """Imports peft and ignores its import warnings."""
    import_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    return peft


def with_adapters(folder: Path, lora: LoraConfig) -> Decoder:
    """Returns a folder's model with adapters that differ from their initial values."""
    model = load(folder)
    adapt(model, lora, nnx.Rngs(0))
    generator = np.random.default_rng(0)
    for _, linear in adapted_projections(model):
        layers, rank, width = linear.lora_b.shape
        linear.lora_b[...] = jnp.asarray(0.3 * generator.normal(size=(layers, rank, width)), jnp.float32)
        if lora.dora:
            linear.lora_magnitude[...] *= jnp.asarray(generator.uniform(0.7, 1.4, (layers, width)), jnp.float32)
    return model


def with_peft(folder: Path, adapter: Path) -> Any:
    """Loads a model folder and an adapter folder with peft, with trainable adapters."""
    peft = import_peft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(load_transformers(folder), adapter, is_trainable=True)


def logits_of(model: Decoder, ids: np.ndarray) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, ids: model.logits(model(ids)))(model, jnp.asarray(ids)))


def close(ours: Any, theirs: Any, name: str = "") -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max(), err_msg=name)


SLOW = ("lora", "dora", "fused-lora")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_peft_gives_the_same_outputs_gradients_and_merged_weights(case, tmp_path):
    import torch

    name, targets, dora = CASES[case]
    write_folder(make(name), tmp_path / "base")
    lora = LoraConfig(lora_rank=3, lora_alpha=4.0, lora_targets=targets, dora=dora)
    model = with_adapters(tmp_path / "base", lora)
    save_adapter(model, tmp_path / "adapter", base=tmp_path / "base")
    theirs = with_peft(tmp_path / "base", tmp_path / "adapter")
    ids = tokens(rows=2, length=12)
    output = theirs(torch.from_numpy(ids), labels=torch.from_numpy(ids))
    close(logits_of(model, ids), output.logits.detach(), "logits")

    # Gradients. Ours are in the layout of the adapter files.
    trainer = Trainer(model, TrainConfig(batch_size=2), lora)
    batch = Batch(ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32))
    loss, gradients = jax.jit(trainer._gradients)(trainer.initial.params, batch)
    assert float(loss) == pytest.approx(float(output.loss.detach()), rel=1e-5)
    output.loss.backward()
    as_model = with_adapters(tmp_path / "base", lora)
    nnx.update(as_model, gradients)
    save_adapter(as_model, tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    found = 0
    for parameter_name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            assert "lora" not in parameter_name
            continue
        key = parameter_name.replace(".default", "")
        gradient, mine = parameter.grad.numpy(), ours[key.replace("magnitude_vector.weight", "magnitude_vector")]
        if (
            name == "phi3"
        ):  # peft also trains the zeros outside the diagonal, and magnitudes of projections without adapter
            written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
            fused = "qkv_proj" in key or "gate_up_proj" in key
            if fused and "lora_B" in key:
                gradient = gradient * (written[key] != 0)
            if fused and "magnitude" in key:
                continue
        close(mine, gradient, key)
        found += 1
    assert found >= 3 * len(set(targets) & {"out", "down", "up"}), "every layer must have a gradient"

    merged = theirs.merge_and_unload()
    save(merge(model), tmp_path / "merged", like=tmp_path / "base")
    again = load_transformers(tmp_path / "merged")
    expected = dict(merged.named_parameters())
    for parameter_name, parameter in again.named_parameters():
        close(parameter.detach(), expected[parameter_name].detach(), parameter_name)


@pytest.mark.parametrize("dora", [False, True])
def test_the_files_are_those_that_peft_writes(dora, tmp_path):
    peft = import_peft()
    write_folder(make("llama2"), tmp_path / "base")
    lora = LoraConfig(lora_rank=2, lora_alpha=5.0, lora_targets=("query", "down"), dora=dora)
    save_adapter(with_adapters(tmp_path / "base", lora), tmp_path / "ours", base=tmp_path / "base")
    config = peft.LoraConfig(
        r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"], use_dora=dora, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(load_transformers(tmp_path / "base"), config).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in files.items()} for files in (ours, theirs)]
    assert shapes[0] == shapes[1]
    ours, theirs = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    assert ours | {"target_modules": 0} == {name: theirs[name] for name in ours} | {"target_modules": 0}
    assert set(ours["target_modules"]) == set(theirs["target_modules"])


def test_a_run_starts_from_what_peft_has_written(tmp_path):
    import torch

    peft = import_peft()
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_folder(make("qwen2"), base)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["v_proj", "q_proj", "down_proj"], use_dora=True, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(load_transformers(base), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(adapter)
    config, _ = parse(["--weights", str(base), "--adapter", str(adapter), "--unfreeze", "norms", "--dtype=float32"])
    assert config.lora == LoraConfig(3, 5.0, ("query", "value", "down"), 1.0, True, ("norms",), adapter)
    model = load(base)
    adapt(model, config.lora, nnx.Rngs(0))
    load_adapter(model, adapter)
    ids = tokens(rows=1, length=12)
    with torch.no_grad():
        close(logits_of(model, ids), theirs(torch.from_numpy(ids)).logits)
    save_adapter(model, tmp_path / "again", base=base)
    files = [load_file(where / "adapter_model.safetensors") for where in (adapter, tmp_path / "again")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(files[1][name], tensor, err_msg=name)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


@pytest.mark.parametrize("dora", [False, True])
def test_merged_weights_match_the_written_files_by_pefts_formula(dora, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    write_folder(make("llama2"), base)
    lora = LoraConfig(lora_rank=3, lora_alpha=4.0, lora_targets=("query", "down"), dora=dora)
    model = with_adapters(base, lora)
    save_adapter(model, adapter, base=base)
    again = load(base)
    adapt(again, lora, nnx.Rngs(1))
    load_adapter(again, adapter)
    save_adapter(again, tmp_path / "again", base=base)
    written = weights_of(adapter)
    for name, array in weights_of(tmp_path / "again").items():
        np.testing.assert_array_equal(array, written[name], err_msg=name)

    save(merge(model), merged, like=base)
    before, after = weights_of(base), weights_of(merged)
    assert before.keys() == after.keys()
    for layer, module in itertools.product(range(SIZES["num_hidden_layers"]), ("self_attn.q_proj", "mlp.down_proj")):
        name = f"model.layers.{layer}.{module}"
        a, b = (written.pop(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
        weight = before[f"{name}.weight"] + 4.0 / 3 * b @ a
        if dora:
            magnitude = written.pop(f"base_model.model.{name}.lora_magnitude_vector")
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        before[f"{name}.weight"] = weight
    assert not written
    for name, array in before.items():
        close(after[name], array, name)


def test_invalid_adapter_folder_is_one_line(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_folder(make("llama2"), base)
    lora = LoraConfig(lora_rank=2, lora_targets=("up", "query"))
    save_adapter(with_adapters(base, lora), adapter)
    values, file = json.loads((adapter / "adapter_config.json").read_text()), adapter / "adapter_config.json"
    for changes, message in [
        ({"peft_type": "LOHA"}, "adapter_config.json: peft_type must be one of .'LORA'., got 'LOHA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of .*, got 'pissa'"),
        ({"use_rslora": True}, "use_rslora must not be set, got True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern must not be set, got {'q_proj': 4}"),
        ({"r": "4"}, "adapter_config.json: r must be an integer, got '4'"),
        ({"lora_alpha": float("inf")}, "adapter_config.json: lora_alpha must be a finite number, got inf"),
        ({"lora_alpha": 10**400}, "adapter_config.json: lora_alpha must be a finite number, got 1000"),
        ({"use_dora": "yes"}, "adapter_config.json: use_dora must be true or false, got 'yes'"),
        ({"target_modules": [["q_proj"]]}, "target_modules must be a list of q_proj, .*, got ..'q_proj'.."),
        ({"target_modules": ["qkv_proj"]}, "target_modules must be a list of q_proj, .*, got .'qkv_proj'."),
        ({"r": 0}, "--lora-alpha requires --lora-rank of at least 1, got --lora-alpha 4.0"),
    ]:
        file.write_text(json.dumps({**values, **changes}))
        with pytest.raises(RunError, match=message):
            read_adapter_config(adapter)
    file.write_text(json.dumps({name: value for name, value in values.items() if name != "r"}))
    with pytest.raises(RunError, match=r"adapter_config\.json: r is missing"):
        read_adapter_config(adapter)
    file.write_text(json.dumps({**values, "lora_dropout": 0.05}))
    assert read_adapter_config(adapter) == LoraConfig(2, 4.0, ("query", "up"), adapter=adapter)
    with pytest.raises(
        RunError, match=r"^--adapter: .*config\.json: lora_dropout must be 0, because .* no dropout, got 0\.05; set it"
    ):
        parse(["--weights", str(base), "--adapter", str(adapter)])
    with pytest.raises(RunError, match=r"^--adapter: cannot read .*base/adapter_config\.json"):
        parse(["--weights", str(base), "--adapter", str(base)])
    file.write_text(json.dumps(values))
    with pytest.raises(RunError, match="--lora-rank must be 2, as in the folder of --adapter, got 3"):
        parse(["--weights", str(base), "--adapter", str(adapter), "--lora-rank=3"])
    with pytest.raises(SystemExit):
        parse(["--adapter", str(adapter), "--lora-rank=2"])

    def loaded(lora: LoraConfig, where: Path = adapter) -> None:
        model = load(base)
        adapt(model, lora, nnx.Rngs(0))
        load_adapter(model, where)

    for options, message in [
        ({"lora_rank": 3}, r"layers.0.self_attn.q_proj.lora_A.weight must have shape \(3, 32\), got \(2, 32\)"),
        ({"lora_targets": ("up",)}, "unexpected tensor .*layers.0.self_attn.q_proj.lora_A.weight"),
        ({"lora_targets": ("up", "query", "key")}, "layers.0.self_attn.k_proj.lora_A.weight is missing"),
        ({"dora": True}, "layers.0.self_attn.q_proj.lora_magnitude_vector is missing"),
    ]:
        with pytest.raises(RunError, match=message):
            loaded(dataclasses.replace(lora, **options))
    with pytest.raises(RunError, match=r"cannot read .*absent/adapter_model\.safetensors"):
        loaded(lora, tmp_path / "absent")


def test_every_field_of_peft_is_read_or_has_no_effect_or_is_refused(tmp_path):
    peft, file = import_peft(), tmp_path / "adapter_config.json"
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    refused = {field.name for field in dataclasses.fields(peft.LoraConfig)} - READ - NEUTRAL
    assert {"use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save"} < refused
    for name, value in itertools.product(sorted(refused), (True, 0, [0], {"q_proj": 0}, "all")):
        file.write_text(json.dumps({**values, name: value}))
        with pytest.raises(RunError, match=rf"adapter_config\.json: {name} must not be set, got"):
            read_adapter_config(tmp_path)
    file.write_text(json.dumps({**values, **dict.fromkeys(refused)}))
    assert read_adapter_config(tmp_path) == LoraConfig(2, 4.0, ("query",), adapter=tmp_path)


def test_damaged_adapters_are_refused_before_the_data_is_encoded(tmp_path, monkeypatch, capsys):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_folder(make("llama2"), base)
    save_adapter(with_adapters(base, LoraConfig(lora_rank=2, lora_targets=("up",))), adapter)
    monkeypatch.setattr(main, "read_text", lambda *_: pytest.fail("read the data first"))
    monkeypatch.chdir(tmp_path)
    options = ["--weights", str(base), "--adapter", str(adapter)]
    file = adapter / "adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name][0, 1] = np.nan
    save_file(tensors, file)
    assert main.main(options) == 1
    assert capsys.readouterr().err.strip().endswith(f"{file}: {name} holds NaN or inf")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert main.main(options) == 1
    assert f"cannot read {file}: the file is truncated in" in capsys.readouterr().err


def test_a_folder_is_written_once_and_needs_adapters(tmp_path):
    write_folder(make("llama2"), tmp_path / "base")
    lora = LoraConfig(lora_rank=2, lora_targets=("up",))
    model = with_adapters(tmp_path / "base", lora)
    with pytest.raises(ValueError, match="model must have adapters"):
        save_adapter(load(tmp_path / "base"), tmp_path / "a")
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16 or None, got 'int8'"):
        save_adapter(model, tmp_path / "a", dtype="int8")
    save_adapter(model, tmp_path / "a", dtype="bfloat16")
    written = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in written.values()} == {"bfloat16"}
    with pytest.raises(RunError, match="a already exists and is not an empty folder; choose another"):
        save_adapter(model, tmp_path / "a")


def test_adapters_need_the_weights_that_they_were_trained_on(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--adapter", str(tmp_path)])
    message = f"--adapter requires the --weights that it was trained on, got only {tmp_path}"
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_folder_that_cannot_be_written_raises_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    check_new_folder(tmp_path / "new" / "one")
    with pytest.raises(RunError, match=r"cannot write .*/file/a: .*/file is not a folder to which you may write"):
        check_new_folder(tmp_path / "file" / "a")
    monkeypatch.setattr(os, "access", lambda *_: False)  # also for root
    with pytest.raises(RunError, match=f"cannot write .*/new: {tmp_path} is not a folder to which you may write"):
        check_new_folder(tmp_path / "new")


def test_adapters_too_large_for_a_dtype_raise(tmp_path):
    base, adapter, name = tmp_path / "base", tmp_path / "adapter", r"layers\.1\.mlp\.up_proj\.lora_B\.weight"
    write_folder(make("llama2"), base)
    lora = LoraConfig(lora_rank=2, lora_targets=("up",))
    model = with_adapters(base, lora)
    b = dict(adapted_projections(model))["up"].lora_b
    b.set_value(b[...].at[1, 0, 3].set(65519.0))
    save_adapter(model, tmp_path / "largest", dtype="float16")
    b.set_value(b[...].at[1, 0, 3].set(-7e4))
    with pytest.raises(RunError, match=rf"float16 cannot hold the values of .*{name}, up to 7e\+04; use another dtype"):
        save_adapter(model, adapter, dtype="float16")
    assert not adapter.exists()
    save_adapter(model, adapter)
    half = load(base, param_dtype="float16")
    adapt(half, lora, nnx.Rngs(0))
    with pytest.raises(RunError, match=rf"float16 cannot hold the values of .*{name} of .*safetensors, up to 7e\+04"):
        load_adapter(half, adapter)


@pytest.mark.slow
def test_a_runs_adapter_in_peft_is_its_merged_export(tmp_path, monkeypatch, capsys):
    """Runs the commands end to end: a folder, a run with bfloat16 computation, and both exports."""
    import torch

    write_texts(tmp_path / "data")
    write_folder(make("llama2"), tmp_path / "base")
    write_tokenizer(tmp_path / "base", [*WORDS, *(f"word{i}" for i in range(SIZES["vocab_size"] - 4 - len(WORDS)))])
    options = "--steps=3 --batch-size=2 --max-seq-len=16 --warmup-steps=1 --learning-rate=3e-2 --sample-tokens=0"
    options += " --held-out-windows=2 --lora-rank=4 --dora --lora-targets query up --remat=none"
    weights, data = str(tmp_path / "base"), str(tmp_path / "data")
    assert train(tmp_path, "--name", "a", "--weights", weights, "--data", data, *options.split()) == 0
    run = str(tmp_path / "runs" / "a")
    assert export.main(["--run", run, "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert export.main(["--run", run, "--out", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == weights
    ids = torch.from_numpy(tokens(rows=2, length=12))
    adapted, merged = with_peft(tmp_path / "base", tmp_path / "adapter"), load_transformers(tmp_path / "merged")
    base = load_transformers(tmp_path / "base")
    with torch.no_grad():
        results = [model(ids).logits.numpy() for model in (adapted, merged, base)]
    # The run rounds the base weights to bfloat16, the dtype of its computation. Here they are in float32.
    np.testing.assert_allclose(results[0], results[1], atol=0.02 * np.abs(results[0]).max())
    assert np.abs(results[0] - results[2]).max() > 0.05 * np.abs(results[0]).max()

    again = ["--weights", weights, "--data", data, "--adapter", str(tmp_path / "adapter"), *options.split()[:6]]
    again += ["--held-out-windows=2", "--remat=none"]
    assert train(tmp_path, "--name", "b", *again) == 0
    losses = [[row["loss"] for row in read_rows(tmp_path / "runs" / name) if "loss" in row] for name in "ab"]
    assert losses[1][0] < losses[0][0] - 0.05, "adapters that have learned from a batch must have a lower loss on it"
