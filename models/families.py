"""The table of decoder families: a row for each `model_type`, which is looked up exactly."""

from __future__ import annotations

from collections.abc import Mapping

from rollkv.models import families_experts, families_gemma4, families_layer_norm, families_post_norm, families_rms
from rollkv.models.family import Family

FAMILIES: Mapping[str, Family] = {
    row.model_type: row
    for module in (families_rms, families_post_norm, families_layer_norm, families_experts, families_gemma4)
    for row in module.ROWS
}
