"""What MODEL may be: a preset, a folder, a .gguf file, a hub id; anything else is refused with what may be given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollkv.models.checkpoint import open_checkpoint
from rollkv.models.config import CheckpointError


def refused(model: str | Path) -> str:
    """The message with which a checkpoint is refused, in one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "model", ["no such model", "/no/such/folder", "./missing", "missing.gguf", "", "a/b/c", "x/y.gguf"]
)
def test_what_is_no_model_is_refused_with_what_may_be_given(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    if model == "":
        monkeypatch.chdir(Path(__file__).parent)  # "" is no folder, whatever the current one holds
    assert refused(model) == (
        f"no such model: {model!r}; give a preset (smollm2-135m, qwen2.5-coder-0.5b), a Hugging Face folder, "
        "a .gguf file or a hub id"
    )


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\0" * 64)
    assert str(tmp_path / "weights.safetensors") in refused(tmp_path / "weights.safetensors")


def test_offline_a_hub_id_is_refused_with_what_to_pass_instead(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rollkv.models.checkpoint import open_checkpoint\n"
        "try:\n    open_checkpoint('someone/some-model', print)\nexcept ValueError as error:\n"
        "    print(error)\n    sys.exit(error.exit_code)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=offline, capture_output=True, text=True, check=False)
    (said,) = done.stdout.splitlines()
    assert done.returncode == 2
    assert said.startswith("hub id 'someone/some-model' cannot be had (")
    assert said.endswith(
        "offline, pass a Hugging Face folder, a .gguf file or a preset (smollm2-135m, qwen2.5-coder-0.5b)"
    )


def test_a_hub_id_is_looked_up_and_keeps_its_name(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda model, **_: asked.append(model) or str(checkpoint("llama"))
    )
    opened = open_checkpoint("someone/some-model")
    assert (opened.kind, opened.id, asked) == ("hub", "someone/some-model", ["someone/some-model"])
