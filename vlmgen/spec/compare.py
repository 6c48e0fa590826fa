"""The semantic difference of two specs: axes and sizes, not lines, and what follows from them.

Comments, order, style, `extends` and sizes that a checkpoint states although they are those of the
section make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vlmgen.spec.axes import AXES
from vlmgen.spec.checkpoints import Checkpoint, CheckpointText, CheckpointVision
from vlmgen.spec.derive import Derived, derive
from vlmgen.spec.memory import BFLOAT16, RankMemory, rank_memory
from vlmgen.spec.model import ResolvedCheckpoint, Spec
from vlmgen.spec.source import dotted
from vlmgen.spec.types import SpecModel
from vlmgen.weights import weight_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Kind = Literal["axis", "size", "name"]
"""`axis`: structure, a choice of the schema. `size`: a number. `name`: a name or a list of them."""

# How the entries of a list are told apart; other lists are one value.
_ENTRY_NAMES = ("name", "pattern")


class _Absent:
    """Stands for a value that one of the specs does not have."""

    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()


@dataclass(frozen=True)
class Change:
    """One value that differs.

    Args:
        path: Dotted path; entries of a list by name, `checkpoints[NAME].also`.
        kind: What sort of value it is.
        left: The first spec's value, `ABSENT` where it has none.
        right: The second spec's value.
        meaning: The schema's description.
    """

    path: str
    kind: Kind
    left: Any
    right: Any
    meaning: str

    @property
    def section(self) -> str:
        """Top-level key of the spec."""
        return self.path.partition(".")[0].partition("[")[0]

    @property
    def block(self) -> str:
        """The section, empty for the values at the top level: what a table keeps together."""
        return "" if self.section == self.path else self.section

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a side that has no value has no key."""
        sides = {"left": self.left, "right": self.right}
        given = {name: _plain(value) for name, value in sides.items() if value is not ABSENT}
        return {"path": self.path, "kind": self.kind, **given, "meaning": self.meaning}


@dataclass(frozen=True)
class WeightChange:
    """One row of the weight table that differs.

    Args:
        group: Group of the table.
        parameter: The package's parameter.
        left: (verb, keys) of the first spec, None where it has no such parameter.
        right: (verb, keys) of the second.
    """

    group: str
    parameter: str
    left: tuple[str, tuple[str, ...]] | None
    right: tuple[str, tuple[str, ...]] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""

        def side(row: tuple[str, tuple[str, ...]] | None) -> dict[str, Any] | None:
            return None if row is None else {"verb": row[0], "keys": list(row[1])}

        names = {"group": self.group, "parameter": self.parameter}
        return {**names, "left": side(self.left), "right": side(self.right)}


@dataclass(frozen=True)
class Effect:
    """A derived quantity of two checkpoints.

    Args:
        name: What it is, with its unit.
        left: The first checkpoint's value.
        right: The second's.
    """

    name: str
    left: Any
    right: Any

    @property
    def differs(self) -> bool:
        """Whether the values are not equal."""
        return bool(self.left != self.right)


@dataclass(frozen=True)
class PairEffects:
    """What the change does to one pair of checkpoints.

    Args:
        left: The first checkpoint's name.
        right: The second's; the same name where both specs list it.
        effects: Every quantity, equal ones too.
    """

    left: str
    right: str
    effects: tuple[Effect, ...]

    @property
    def differs(self) -> bool:
        """Whether any quantity differs."""
        return any(effect.differs for effect in self.effects)


@dataclass(frozen=True)
class Comparison:
    """Two specs, compared.

    Args:
        left: Title of the first spec.
        right: Title of the second.
        changes: Values that differ, in the order of the schema.
        weights: Rows of the weight table that differ.
        pairs: Derived quantities of the checkpoints that are compared with one another.
    """

    left: str
    right: str
    changes: tuple[Change, ...]
    weights: tuple[WeightChange, ...]
    pairs: tuple[PairEffects, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the specs say the same."""
        return not self.changes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "left": self.left,
            "right": self.right,
            "changes": [change.to_dict() for change in self.changes],
            "weights": [row.to_dict() for row in self.weights],
            "checkpoints": [
                {
                    "left": pair.left,
                    "right": pair.right,
                    "effects": [
                        {"name": e.name, "left": _plain(e.left), "right": _plain(e.right)}
                        for e in pair.effects
                    ],
                }
                for pair in self.pairs
            ],
        }


def compare_specs(left: Spec, right: Spec) -> Comparison:
    """Compare two specs.

    Args:
        left: The first spec, what is there.
        right: The second, what it becomes.

    Returns:
        The differences. Checkpoints that both specs list are compared with each other; where
        there are none, the default checkpoints are.
    """
    return Comparison(
        left.title,
        right.title,
        tuple(value_changes(left, right)),
        tuple(_weight_changes(left, right)),
        tuple(_pair_effects(left, right, *names) for names in _pairs(left, right)),
    )


# ---------------------------------------------------------------- values


def value_changes(left: Spec, right: Spec) -> list[Change]:
    """The values that differ between two specs, in the order of the schema."""
    changes = [
        *_model_changes(Spec, left, right, "", skip=("checkpoints",)),
        *_checkpoint_changes(left, right),
    ]
    order = list(Spec.model_fields)
    return sorted(changes, key=lambda change: order.index(change.section))


def indexed_path(spec: Spec, path: str) -> str:
    """The path of a change with the places of list entries, `checkpoints[0].also`.

    Args:
        spec: The spec that holds the entries.
        path: As `Change` has it, with their names; an entry that the spec has not keeps its name.
    """

    node: Any = spec
    keys: list[str | int] = []
    for name, entry in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if name:
            keys.append(name)
            node = getattr(node, name, None)
            continue
        names = [_entry_name(each) for each in node or ()]
        if entry not in names:
            return path
        keys.append(names.index(entry))
        node = node[names.index(entry)]
    return dotted(tuple(keys))


def _model_changes(
    model: type[SpecModel], left: Any, right: Any, prefix: str, skip: Sequence[str] = ()
) -> Iterator[Change]:
    """Changes below two models of one class, either of which may be absent."""
    for name, info in model.model_fields.items():
        if name in skip:
            continue
        a, b = (ABSENT if side is ABSENT else getattr(side, name) for side in (left, right))
        if ABSENT in (a, b) and info.default in (a, b):
            continue  # of structure that one side lacks, what the other leaves at its default
        yield from _value_changes(f"{prefix}{name}", a, b, info.description or "")


def _value_changes(path: str, left: Any, right: Any, meaning: str) -> Iterator[Change]:
    if left == right:
        return
    # Structure that one side lacks (null) is told value by value, as the other side states it.
    parts = [side for side in (left, right) if isinstance(side, SpecModel)]
    if parts and all(isinstance(side, SpecModel) or _missing(side) for side in (left, right)):
        a, b = (side if isinstance(side, SpecModel) else ABSENT for side in (left, right))
        yield from _model_changes(type(parts[0]), a, b, f"{path}.")
        return
    if _is_list_of_entries(left) or _is_list_of_entries(right):
        yield from _entry_changes(path, left, right, meaning)
        return
    if _missing(left) and _missing(right):
        return
    yield Change(path, _kind(path, left, right), left, right, meaning)


def _entry_changes(path: str, left: Any, right: Any, meaning: str) -> Iterator[Change]:
    """Lists of named entries, matched by name."""
    before, after = ({_entry_name(e): e for e in side or ()} for side in (left, right))
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name, ABSENT), after.get(name, ABSENT)
        where = f"{path}[{name}]"
        if a is ABSENT or b is ABSENT:
            yield Change(where, "name", a, b, meaning)
        else:
            yield from _model_changes(type(a), a, b, f"{where}.")


def _checkpoint_changes(left: Spec, right: Spec) -> Iterator[Change]:
    """Checkpoints by name and by the sizes that they have, wherever a spec states them."""
    before, after = ({e.name: e for e in spec.checkpoints} for spec in (left, right))
    meaning = Spec.model_fields["checkpoints"].description or ""
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        where = f"checkpoints[{name}]"
        if a is None or b is None:
            yield Change(where, "name", ABSENT if a is None else name,
                         ABSENT if b is None else name, meaning)  # fmt: skip
            continue
        also = Checkpoint.model_fields["also"].description or ""
        yield from _value_changes(f"{where}.also", a.also, b.also, also)
        sizes = _sizes(right.checkpoint(name))
        for key, value in _sizes(left.checkpoint(name)).items():
            if _states(a, key) or _states(b, key):  # else the section says it
                yield from _value_changes(f"{where}.{key}", value, sizes[key], _SIZE_MEANINGS[key])


_SIZE_MEANINGS = {
    f"{tower}.{name}": info.description or ""
    for tower, model in (("text", CheckpointText), ("vision", CheckpointVision))
    for name, info in model.model_fields.items()
}


def _states(entry: Checkpoint, key: str) -> bool:
    tower, _, name = key.partition(".")
    return getattr(getattr(entry, tower), name) is not None


def _sizes(checkpoint: ResolvedCheckpoint) -> dict[str, Any]:
    """Every size that a checkpoint may state -> the value that it has, None where it has none."""
    text, vision = checkpoint.text, checkpoint.vision
    moe, deepstack = text.moe, vision.deepstack
    return {
        "text.hidden_size": text.hidden_size,
        "text.num_layers": text.num_layers,
        "text.num_heads": text.attention.num_heads,
        "text.num_kv_heads": text.attention.num_kv_heads,
        "text.intermediate_size": text.mlp.intermediate_size,
        "text.moe_intermediate_size": moe.intermediate_size if moe else None,
        "text.num_experts": moe.num_experts if moe else None,
        "text.tie_word_embeddings": text.tie_word_embeddings,
        "text.head_dim": text.attention.head_dim,
        "text.vocab_size": text.vocab_size,
        "text.max_position_embeddings": text.max_position_embeddings,
        "vision.hidden_size": vision.hidden_size,
        "vision.depth": vision.depth,
        "vision.num_heads": vision.attention.num_heads,
        "vision.intermediate_size": vision.mlp.intermediate_size,
        "vision.out_hidden_size": vision.out_hidden_size,
        "vision.deepstack": deepstack.indices if deepstack else None,
    }


def _missing(value: Any) -> bool:
    return value is None or value is ABSENT


def _is_list_of_entries(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and _entry_name(value[0]) is not None


def _entry_name(entry: Any) -> str | None:
    names = [n for n in _ENTRY_NAMES if n in getattr(type(entry), "model_fields", ())]
    return str(getattr(entry, names[0])) if names else None


def _kind(path: str, *sides: Any) -> Kind:
    value = next((side for side in sides if not _missing(side)), None)
    first = value[0] if isinstance(value, tuple) and value else value
    if path in AXES or isinstance(first, bool):
        return "axis"
    return "size" if isinstance(first, (int, float)) else "name"


def _plain(value: Any) -> Any:
    if isinstance(value, SpecModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# ---------------------------------------------------------------- effects


def _weight_changes(left: Spec, right: Spec) -> Iterator[WeightChange]:
    before, after = (
        {
            (group, row.parameter): (row.verb, row.keys)
            for group, rows in weight_table(spec).groups()
            for row in rows
        }
        for spec in (left, right)
    )
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield WeightChange(*key, before.get(key), after.get(key))


def _pairs(left: Spec, right: Spec) -> list[tuple[str, str]]:
    both = [c.name for c in left.checkpoints if c.name in {d.name for d in right.checkpoints}]
    return [(name, name) for name in both] or [(left.defaults_from, right.defaults_from)]


def _pair_effects(left: Spec, right: Spec, left_name: str, right_name: str) -> PairEffects:
    a, b = derive(left, left_name), derive(right, right_name)
    effects = [Effect(name, one, other) for (name, one), (_, other) in
               zip(_facts(a), _facts(b), strict=True)]  # fmt: skip
    checkpoints = left.checkpoint(left_name), right.checkpoint(right_name)
    for tp in sorted({*a.text_tp, *b.text_tp}):
        sides = [
            rank_memory(checkpoint, tp) if tp in derived.text_tp else None
            for checkpoint, derived in zip(checkpoints, (a, b), strict=True)
        ]
        for name, value in _MEMORY:
            one, other = (None if side is None else value(side) for side in sides)
            effects.append(Effect(f"{name}, TP {tp}", one, other))
    return PairEffects(left_name, right_name, tuple(effects))


def _facts(derived: Derived) -> list[tuple[str, Any]]:
    return [
        ("parameters", derived.parameters),
        ("text parameters", derived.text_parameters),
        ("vision parameters", derived.vision_parameters),
        ("legal text TP", derived.text_tp),
        ("legal vision TP", derived.vision_tp),
        ("encoder cache: width of a row", derived.fat_width),
        ("encoder cache: rows of a block", derived.cache_block_tokens),
        (
            "encoder cache: bytes of a block",
            derived.cache_block_tokens * derived.fat_width * BFLOAT16,
        ),
    ]


_MEMORY: tuple[tuple[str, Callable[[RankMemory], int]], ...] = (
    ("bytes of weights per rank", lambda memory: memory.weights),
    ("bytes of KV cache per token and rank", lambda memory: memory.kv_per_token),
)


# ---------------------------------------------------------------- for people


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison: what differs, then what it does.

    Args:
        comparison: The comparison.
        console: Where to.
    """
    if comparison.is_equal:
        console.print(f"{comparison.left} and {comparison.right} say the same", highlight=False)
        return
    table = _table("spec", comparison.left, comparison.right)
    block = ""
    for change in comparison.changes:
        if change.block != block:
            table.add_section()
            block = change.block
        table.add_row(*map(_cell, (change.path, change.left, change.right)))
    console.print(table)
    if comparison.weights:
        console.print()
        table = _table("weight table", comparison.left, comparison.right)
        group = ""
        for row in comparison.weights:
            if row.group != group:
                table.add_section()
                group = row.group
            table.add_row(*map(_cell, (row.parameter, _keys(row.left), _keys(row.right))))
        console.print(table)
    for pair in comparison.pairs:
        differing = [effect for effect in pair.effects if effect.differs]
        if not differing:
            continue
        console.print()
        title = pair.left if pair.left == pair.right else f"{pair.left} and {pair.right}"
        table = _table("effect", comparison.left, comparison.right, title)
        for effect in differing:
            table.add_row(*map(_cell, (effect.name, _amount(effect, 0), _amount(effect, 1))))
        console.print(table)
    same = [pair.left for pair in comparison.pairs if not pair.differs]
    if same:
        console.print(
            f"\nthe same parameters, splits, cache widths and memory: {', '.join(same)}",
            highlight=False,
        )


def _table(first: str, left: str, right: str, title: str | None = None) -> Table:
    from rich.table import Table

    # Two specs of one family bear one name.
    names = (left, right) if left != right else (f"{left} (first)", f"{right} (second)")
    return Table(first, *names, title=title, title_justify="left")


def _cell(value: Any) -> Any:
    from rich.text import Text

    return Text(shown(value))


def shown(value: Any) -> str:
    """A value on one line, as a spec writes it; `-` where there is none."""
    if _missing(value):
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, SpecModel):
        pairs = _plain(value).items()
        return f"{{{', '.join(f'{key}: {inner}' for key, inner in pairs)}}}"
    return str(value)


def _keys(row: tuple[str, tuple[str, ...]] | None) -> str | None:
    return None if row is None else f"{row[0]}: {', '.join(row[1])}"


def _amount(effect: Effect, side: int) -> str:
    value = (effect.left, effect.right)[side]
    if value is None:
        return "illegal"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    text = f"{value:,}"
    return f"{text} ({value / 2**30:.2f} GiB)" if "weights" in effect.name else text
