"""`rollkv families`: every row of the tables, and the class that it is proved with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import SHAPES
from family_shapes import FAMILY_SHAPES

from rollkv.models.families import FAMILIES
from rollkv.models.family_listing import REFERENCES, entries
from rollkv.models.wrappers import WRAPPERS


def test_the_command_prints_every_model_type_with_the_class_that_it_is_proved_with(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = run("families")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for name in (*FAMILIES, *WRAPPERS):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert max(map(len, lines)) <= 118
    assert "llama3, yarn, longrope" in lines[-1]
    assert "attention softcap" in " ".join(out[out.index("gemma2") : out.index("gemma3_text")].split())


def test_as_json_it_is_the_same_table(run: Callable[..., tuple[int, str, str]]) -> None:
    table = json.loads(run("families", "--json")[1])
    assert [row["model_type"] for row in table] == [*sorted(FAMILIES), *sorted(WRAPPERS)]
    assert [(row["features"], row["proved_with"]) for row in table] == [
        (list(entry.features), entry.proved_with) for entry in entries()
    ]


def test_the_classes_are_those_of_transformers() -> None:
    from transformers.models.auto import modeling_auto as auto

    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {
        name: auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in WRAPPERS
    }
    known["internlm3"] = "LlamaForCausalLM"  # which has no class of its own there
    assert {name: known[name] for name in REFERENCES} == REFERENCES
    assert REFERENCES.keys() == {*FAMILIES, *WRAPPERS}


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("qwen2", {"biases always: q/k/v"}),
        ("llama", {"biases on request: q/k/v, out, MLP"}),
        ("gpt_neox", {"biases always: MLP", "biases on request: q/k/v, out"}),
        ("qwen2_moe", {"mixture of experts and one for every token", "sliding window on request"}),
        ("ministral3", {"query scale by position"}),
        ("gemma4_text", {"two rotations", "two head sizes", "shared keys and values", "mixture of experts on request"}),
        ("qwen2_vl", {"text decoder qwen2", "three-part rotation"}),
        ("llava", {"text decoder llama, or another of the above"}),
    ],
)
def test_what_is_special_to_a_model_is_listed(name: str, features: set[str]) -> None:
    (entry,) = [entry for entry in entries() if entry.model_type == name]
    assert features <= set(entry.features)


def test_a_text_decoder_is_one_of_the_families() -> None:
    texts = [entry.features[0] for entry in entries() if entry.model_type in WRAPPERS]
    assert len(texts) == len(WRAPPERS)
    for text in texts:
        assert text.partition(",")[0].removeprefix("text decoder ") in FAMILIES, text


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_tiny_model_that_proves_it(name: str) -> None:
    shapes: dict[str, Any] = {**SHAPES, **FAMILY_SHAPES}
    assert name == "gemma4_text" or any(family == name for family, _ in shapes.values())  # test_gemma4.py
