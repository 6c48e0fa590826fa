"""Rules that tie several values of a spec together.

Each rule is a generator over a `View` of the raw values. Reading a value that the schema already
refused ends the rule silently, so that one slip is reported once and every other rule still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vlmgen.spec.rules.checkpoints import (
    checkpoint_deepstack,
    checkpoint_experts,
    checkpoint_kv_heads,
    checkpoint_out_width,
    checkpoint_parts,
    checkpoint_sections,
    checkpoint_vision_heads,
    checkpoint_vocabulary,
    checkpoint_windows,
    defaults_are_a_checkpoint,
)
from vlmgen.spec.rules.conditions import parts_are_paired
from vlmgen.spec.rules.names import (
    architecture_begins_with_prefix,
    checkpoint_names_differ,
    config_keys_differ,
    input_keywords_differ,
    layouts_differ,
    weight_names_differ,
)
from vlmgen.spec.rules.pairings import (
    bounds_fit_the_input,
    experts_fit,
    merger_has_a_prefix,
    merger_is_whole,
    patch_embedding_is_flat,
    position_table_fits_the_input,
    positions_fit_the_rope,
    tiles_are_whole,
    video_prompt_fits_the_positions,
    windows_are_whole,
)
from vlmgen.spec.rules.tokens import (
    block_size,
    buckets,
    quantization_modes,
    token_ids_in_vocabulary,
    tokens_differ,
)
from vlmgen.spec.rules.towers import (
    deepstack_indices,
    kv_heads_divide_heads,
    partial_is_generated,
    position_table_is_square,
    sections_fill_the_rotated_half,
    tower_ends_at_text_width,
    vision_heads,
)
from vlmgen.spec.rules.view import View, Violation, run
from vlmgen.spec.source import Key


def check_rules(data: Any, bad: Iterable[Key] = ()) -> list[Violation]:
    """Apply every rule.

    Args:
        data: The spec as nested dicts and sequences.
        bad: Paths that the schema refused; rules that read them do not run.

    Returns:
        The violations, in the order of the rules.
    """
    return [violation for found in broken_rules(data, bad).values() for violation in found]


def broken_rules(data: Any, bad: Iterable[Key] = ()) -> dict[str, list[Violation]]:
    """Name of every broken rule -> its violations; see `check_rules`."""
    view = View(data, bad)
    found: dict[str, list[Violation]] = {}
    for rule in SPEC_RULES:
        found.setdefault(rule.__name__, []).extend(run(rule(view)))
    for index in range(view.length(("checkpoints",))):
        for checkpoint_rule in CHECKPOINT_RULES:
            found.setdefault(checkpoint_rule.__name__, []).extend(run(checkpoint_rule(view, index)))
    return {name: violations for name, violations in found.items() if violations}


SPEC_RULES: tuple[Callable[[View], Iterator[Violation]], ...] = (
    architecture_begins_with_prefix,
    config_keys_differ,
    input_keywords_differ,
    layouts_differ,
    weight_names_differ,
    checkpoint_names_differ,
    sections_fill_the_rotated_half,
    partial_is_generated,
    kv_heads_divide_heads,
    vision_heads,
    position_table_is_square,
    tower_ends_at_text_width,
    deepstack_indices,
    tokens_differ,
    token_ids_in_vocabulary,
    block_size,
    buckets,
    quantization_modes,
    defaults_are_a_checkpoint,
    parts_are_paired,
    positions_fit_the_rope,
    video_prompt_fits_the_positions,
    bounds_fit_the_input,
    position_table_fits_the_input,
    tiles_are_whole,
    windows_are_whole,
    experts_fit,
    patch_embedding_is_flat,
    merger_is_whole,
    merger_has_a_prefix,
)

CHECKPOINT_RULES: tuple[Callable[[View, int], Iterator[Violation]], ...] = (
    checkpoint_sections,
    checkpoint_kv_heads,
    checkpoint_vision_heads,
    checkpoint_out_width,
    checkpoint_deepstack,
    checkpoint_parts,
    checkpoint_windows,
    checkpoint_experts,
    checkpoint_vocabulary,
)
