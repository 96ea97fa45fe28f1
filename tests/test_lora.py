"""A merged adapter is what peft's own merge gives, tensor by tensor and in the bundle; the rest is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Run, user_error
from conftest import export
from safetensors.numpy import load_file, save_file

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError
from rollkv.models.hf_files import open_safetensors
from rollkv.models.lora import open_lora
from rollkv.runtime.session import Session

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], Any]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
A, B = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "lora_B.weight"
Q = "model.layers.0.self_attn.q_proj"


def load(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """An adapter that peft makes and saves, with random factors, so that each tensor changes by about its own size."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), str(folder)).merge_and_unload()


def assert_merges_as_peft(base: Path, folder: Path) -> list[str]:
    """Every tensor of the checkpoint against peft's; also the names of those that changed."""
    stored = open_safetensors(base / "model.safetensors")
    ours = open_lora(folder).apply(stored)
    theirs = merged_by_peft(base, folder).state_dict()
    assert ours.keys() == stored.keys()
    changed = []
    for name, tensor in ours.items():
        wanted, got = theirs[name].numpy(), tensor.read(0, tensor.shape[0])
        assert got.shape == tensor.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max(), err_msg=name)
        if not np.allclose(wanted, stored[name].read(0, stored[name].shape[0]), atol=1e-3):
            changed.append(name.removesuffix(".weight"))
    return changed


@pytest.fixture
def base(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on q and v."""
    return adapter(checkpoint("llama"), tmp_path_factory.mktemp("lora") / "plain", target_modules=["q_proj", "v_proj"])


@pytest.fixture
def damaged(plain: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(plain, tmp_path / "adapter"))


# Merging


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 4),
        ({"target_modules": LINEARS}, 14),
        ({"target_modules": r".*layers\.1.*\.(gate|up)_proj", "use_rslora": True}, 2),
        ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "bias": "all"}, 2),
        (
            {
                "target_modules": LINEARS,
                "use_rslora": True,
                "rank_pattern": {"k_proj": 2, "layers.1.*": 3, r"layers\.\d+\.mlp\.up_proj": 1},
                "alpha_pattern": {"0.self_attn.v_proj": 11, "o_proj": 0.5},
            },
            14,
        ),
        ({"target_modules": ["embed_tokens", "lm_head", "v_proj"]}, 4),
        ({"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "norm", "embed_tokens"]}, 2 + 2 + 5),
        ({"target_modules": "all-linear", "init_lora_weights": "gaussian", "lora_dropout": 0.1}, 14),
    ],
)
def test_every_tensor_is_what_peft_merges(base: Path, tmp_path: Path, settings: dict[str, Any], changed: int) -> None:
    assert len(assert_merges_as_peft(base, adapter(base, tmp_path, **settings))) == changed


def test_biases_that_were_trained_take_the_place_of_the_checkpoints(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = checkpoint("llama-bias")
    for kind, changed in (("lora_only", f"{Q}.bias"), ("all", "model.layers.1.mlp.up_proj.bias")):
        folder = adapter(base, tmp_path / kind, target_modules=["q_proj"], bias=kind)
        assert changed in assert_merges_as_peft(base, folder)


def test_an_adapter_in_half_precision_is_merged_in_float32(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path, torch.bfloat16, target_modules=LINEARS)
    assert len(assert_merges_as_peft(base, folder)) == 14


def test_weights_that_are_stored_transposed_get_the_update_transposed(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=50, n_positions=32)).save_pretrained(tmp_path)
    folder = adapter(
        tmp_path, tmp_path / "lora", target_modules=["c_attn", "c_proj", "c_fc", "wpe"], fan_in_fan_out=True
    )
    changed = assert_merges_as_peft(tmp_path, folder)
    assert {"transformer.h.1.attn.c_attn", "transformer.h.0.attn.c_proj", "transformer.wpe"} <= set(changed)
    assert len(changed) == 2 * 4 + 1


def test_a_tensor_is_merged_block_by_block(base: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = merged_by_peft(base, plain).state_dict()[f"{Q}.weight"].numpy()
    tensor = open_lora(plain).apply(open_safetensors(base / "model.safetensors"))[f"{Q}.weight"]
    blocks = [tensor.read(i, min(i + 5, tensor.shape[0])) for i in range(0, tensor.shape[0], 5)]
    np.testing.assert_allclose(np.concatenate(blocks), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_the_hash_tells_adapters_apart(base: Path, plain: Path, damaged: Path) -> None:
    alone, merged = open_checkpoint(str(base)), open_checkpoint(str(base), lora=plain)
    assert merged.files == (*alone.files, plain / "adapter_config.json", plain / "adapter_model.safetensors")
    change(damaged, lambda t: t[A].__setitem__(0, 1.0))
    assert len({c.sha256() for c in (alone, merged, open_checkpoint(str(base), lora=damaged))}) == 3


def test_a_bundle_gives_the_logits_of_the_model_that_peft_merged(
    base: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(base, tmp_path / "lora", target_modules=LINEARS)
    bundle = export(base, tmp_path / "bundle", lora=folder)
    ids = list(range(3, 24))
    with torch.no_grad():
        wanted = merged_by_peft(base, folder)(torch.tensor([ids])).logits[0, -1].numpy()
        before = load(base)(torch.tensor([ids])).logits[0, -1].numpy()
    got = Session(bundle).prefill(ids)
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert np.abs(got - before).max() > 0.1 * np.abs(wanted).max()

    code, out, err = run("verify", bundle.path, "--reference", base, "--lora", folder)
    assert (code, "BROKEN" in out) == (0, False), err
    code, out, err = run("verify", bundle.path, "--reference", base)
    assert (code, out) == (2, "")
    assert "not the checkpoint of this bundle" in err
    assert err.endswith("pass that one with --reference, or the --lora folder that belongs to it\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = user_error(run("verify", bundle.path, "--reference", base, "--lora", folder))
    assert said == f"--lora {folder}: the reference merges it with peft, which is missing: pip install peft"


# Refusals


def change(folder: Path, edit: Change) -> None:
    tensors = dict(load_file(folder / "adapter_model.safetensors"))
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def configure(folder: Path, **settings: Any) -> None:
    raw = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**raw, **settings}))


def refused(base: Path, folder: Path) -> str:
    """What is said of an adapter, without the folder."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(base), lora=folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; allowed: 'LORA'"),
        ({"peft_type": None}, "peft_type is None; allowed: 'LORA'"),
        ({"use_dora": True}, "use_dora is true; DoRA is not supported, merge it with peft first"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; allowed: 'CAUSAL_LM' or null"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights 'pissa_niter_4' changes the base's weights; allowed:",
        ),
        ({"init_lora_weights": 1}, "init_lora_weights 1 changes the base's weights; allowed: true, false, 'gaussian'"),
        (
            {"trainable_token_indices": [1], "alora_invocation_tokens": [5], "kasa_config": {}, "lora_bias": True},
            "not understood, and may change the numbers: alora_invocation_tokens, lora_bias, trainable_token_indices",
        ),
        ({"some_new_key": "x"}, "not understood, and may change the numbers: some_new_key"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', must be a list of names or null"),
        ({"target_modules": None}, "target_modules is None, must be a list of names or a pattern"),
        ({"rank_pattern": [1]}, "rank_pattern is [1], must be an object of patterns"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', must be true or false"),
        ({"r": 0}, f"r of {Q} is 0, must be a positive integer"),
        ({"r": 4.0}, f"r of {Q} is 4.0, must be a positive integer"),
        ({"lora_alpha": float("nan")}, f"lora_alpha of {Q} is nan, must be a positive number"),
        ({"rank_pattern": {"q_proj": True}}, f"r of {Q} is True, must be a positive integer"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern '(.*\\\\.)?(()' is no pattern: "),
        ({"target_modules": "*"}, "target_modules '*' is no pattern: nothing to repeat"),
    ],
)
def test_a_setting_that_is_not_understood_is_named(base: Path, damaged: Path, settings: Any, said: str) -> None:
    configure(damaged, **settings)
    assert refused(base, damaged).startswith(f"adapter_config.json: {said}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exclude_modules": ["q_proj"]}, f"{Q} is in the file, and among exclude_modules of adapter_config.json"),
        ({"exclude_modules": ".*q_proj"}, f"{Q} is in the file, and among exclude_modules of adapter_config.json"),
        ({"layers_to_transform": [1]}, f"{Q} is in the file, but not in layers_to_transform of adapter_config.json"),
        ({"layers_to_transform": 0, "layers_pattern": "h"}, f"{Q} is in the file, but not in layers_to_transform of"),
        ({"layers_to_transform": 0, "layers_pattern": "("}, "layers_pattern '.*?"),
    ],
)
def test_a_module_that_peft_would_leave_alone_is_refused(base: Path, damaged: Path, settings: Any, said: str) -> None:
    configure(damaged, **settings)
    assert said in refused(base, damaged)


def test_modules_that_settings_leave_in_are_merged(base: Path, damaged: Path) -> None:
    configure(damaged, exclude_modules=["o_proj"], layers_to_transform=[0, 1], layers_pattern=["layers"])
    open_checkpoint(str(base), lora=damaged)


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(A), f"{Q} has lora_B; a module needs an A and its B"),
        (renamed(A, A.replace("lora_A.weight", "lora_embedding_A")), f"{Q} has lora_B, lora_embedding_A; a module"),
        (renamed(A, A[5:]), f"tensor {A[5:]} is not understood; allowed under base_model.model.: "),
        (renamed(A, A.replace("A.weight", "A.default.weight")), "is not understood; allowed under base_model.model.: "),
        (
            lambda t: t.update({A.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(36, np.float32)}),
            "lora_magnitude_vector is not understood; allowed under base_model.model.: MODULE.lora_A.weight",
        ),
        (
            lambda t: t.update({A: t[A][:3].copy()}),
            f"{Q} has an A of shape (3, 36) and a B of shape (36, 4); adapter_config.json asks for rank r = 4: ",
        ),
        (
            lambda t: t.update({A: t[A][:, :35].copy()}),
            f"fits {Q}.weight of shape (36, 35), the checkpoint's is (36, 36)",
        ),
        (
            lambda t: t.update({k.replace("model.layers.0", "model.layers.7"): t.pop(k) for k in list(t)}),
            "is for model.layers.7.self_attn.q_proj.weight, which the checkpoint does not have; is it of another",
        ),
        (
            lambda t: t.update(
                {k.replace("model.layers", "language_model.model.layers"): t.pop(k) for k in list(t)}
            ),
            "is for language_model.model.layers.0.self_attn.q_proj.weight, which the checkpoint does not have",
        ),
        (
            lambda t: t.update({k.replace("v_proj", "k_proj"): t.pop(k) for k in list(t)}),
            "k_proj is in the file, but not among target_modules of adapter_config.json",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.bias": np.ones(307, np.float32)}),
            "is for lm_head.bias, which the checkpoint does not have",
        ),
        (
            lambda t: t.update({f"base_model.model.{Q}{x}.weight": t[A] for x in ("", ".base_layer")}),
            f"holds {Q}.weight twice",
        ),
        (lambda t: (t.clear(), t.update({f"base_model.model.{Q}.weight": np.eye(36)})), "holds no lora_A and lora_B"),
        (lambda t: t.update({A: t[A].astype(np.int32)}), f"tensor {A} is I32; allowed: F32, F16, BF16, F64"),
    ],
)  # fmt: skip
def test_tensors_that_have_no_place_are_named(base: Path, damaged: Path, edit: Change, said: str) -> None:
    change(damaged, edit)
    message = refused(base, damaged)
    assert message.startswith("adapter_model.safetensors: ")
    assert said in message


def test_a_module_that_should_be_saved_and_is_not_is_named(base: Path, damaged: Path) -> None:
    configure(damaged, modules_to_save=["lm_head"])
    said = "adapter_model.safetensors: no tensor of lm_head, which modules_to_save in adapter_config.json names"
    assert refused(base, damaged) == said


def test_files_that_are_missing_or_something_else_are_named(base: Path, damaged: Path) -> None:
    weights = damaged / "adapter_model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n")
    assert "adapter_model.safetensors: a Git LFS pointer" in refused(base, damaged)
    weights.write_bytes(b"\1" * 30)
    assert "adapter_model.safetensors: damaged or cut short: " in refused(base, damaged)
    weights.unlink()
    assert refused(base, damaged) == f"{damaged}: no adapter_model.safetensors"
    (damaged / "adapter_model.bin").write_bytes(b"x")
    said = (
        "no adapter_model.safetensors; found adapter_model.bin: convert it to safetensors (peft's save_pretrained does)"
    )
    assert refused(base, damaged) == f"{damaged}: {said}"
    (damaged / "adapter_config.json").write_text("[]")
    assert refused(base, damaged) == "adapter_config.json: not a JSON object"
    (damaged / "adapter_config.json").unlink()
    assert refused(base, damaged).endswith("no adapter_config.json in this folder, so it is no PEFT adapter")
    assert refused(base, damaged / "no").endswith("no: no such folder; give the folder of a PEFT adapter")


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("way", ["target_modules", "modules_to_save"])
def test_a_tied_embedding_or_head_is_never_changed(
    checkpoint: Callable[[str], Path], tmp_path: Path, part: str, way: str
) -> None:
    base = checkpoint("llama-square")
    settings = {"target_modules": ["q_proj"]} if way == "modules_to_save" else {}
    folder = adapter(base, tmp_path, **settings, **{way: [part]})
    said = refused(base, folder)
    assert said.startswith("adapter_model.safetensors: changes ")
    assert said.endswith("are one tensor (tie_word_embeddings); untie the checkpoint, then merge")


def test_a_tied_checkpoint_takes_an_adapter_on_its_layers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = checkpoint("llama-square")
    folder = adapter(base, tmp_path, target_modules=LINEARS)
    assert open_checkpoint(str(base), lora=folder).config.tied_head
    assert len(assert_merges_as_peft(base, folder)) == 14


def test_a_gguf_file_takes_no_adapter(run: Run, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for model in (tmp_path / "x.gguf", "smollm2-135m"):
        said = user_error(run("export", model, "-o", tmp_path / "b", "--lora", plain))
        assert said == (
            f"--lora {plain}: {model} is a GGUF file; an adapter can be merged into a Hugging Face folder or hub id of "
            "the same model"
        )
    assert not (tmp_path / "b").exists()


def test_text_files_of_the_adapter_that_differ_are_reported(source: Path, tmp_path: Path) -> None:
    folder, lines = adapter(source, tmp_path, target_modules=["q_proj"]), []
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    open_checkpoint(str(source), lines.append, folder)
    said = f"{folder / 'chat_template.jinja'} differs from the checkpoint's; the checkpoint's goes into the bundle"
    assert lines == [said]
