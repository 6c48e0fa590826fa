"""The coverage proof: a package against the published checkpoints, on the meta device.

For every published checkpoint the package's own towers are built without memory, and its own
loaders run on tensors that have a shape and no values: every parameter is filled exactly once,
every checkpoint key is used or listed as ignored, and what a loader returns has the parameter's
shape. On one layer of each kind all ranks of every legal tensor-parallel size run, and together
they must read every element; so must the ranks that share out experts. On all layers `load_weights`
itself runs, on the first rank of the smallest and the last rank of the largest size.

Needs torch, transformers and vLLM, and the plugin or the stand-in.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from vlmgen import standin
from vlmgen.check.finding import Finding
from vlmgen.check.parallel import legal_text_tp, legal_vision_tp
from vlmgen.check.source import PackageSource
from vlmgen.weights.published import (
    PublishedCheckpoint,
    PublishedFamily,
    Shape,
    families,
    published_family,
)
from vlmgen.weights.sizes import sizes_of

if TYPE_CHECKING:
    from vlmgen.spec.model import ResolvedCheckpoint, Spec

# Tower of the mapping -> attribute of the model that holds it.
TOWERS = {"text": "language_model", "head": "lm_head", "vision": "visual"}
MAPPING_FILE = "weight_mapping.py"

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: per dim, a half-open interval."""

# Verbs of rows that share one key: each reads its part of it, together they read all.
SHARING_VERBS = {"split_gate_up"}
# Verbs of rows that expert parallelism shares out.
EXPERT_VERBS = {"experts_in_out", "experts_out_in", "stack_experts"}
EP_DEGREE = 2


def check_coverage(
    source: PackageSource, spec: Spec, progress: Callable[[str], None] | None = None
) -> list[Finding]:
    """Prove that a package loads every published checkpoint of its family.

    Args:
        source: The package.
        spec: The spec it came from.
        progress: Told which checkpoint is being proven.

    Returns:
        Findings; many of one cause (every layer, every rank) are one.
    """
    path = source.path(MAPPING_FILE)
    if spec.family not in families():
        return [
            Finding(
                path,
                1,
                "VG300",
                f"no published keys are recorded for {spec.family}",
                f"add vlmgen/weights/published/{spec.family}.json",
            )
        ]
    published = published_family(spec.family)
    report = _Report(path, _row_lines(source))
    _duplicate_rows(source, report)
    with _imported(source) as package:
        for entry in spec.checkpoints:
            if progress is not None:
                progress(entry.name)
            found = published.checkpoints.get(entry.name)
            if found is None:
                report.add("VG300", entry.name, f"no published keys are recorded for {entry.name}",
                           f"add it to vlmgen/weights/published/{spec.family}.json")  # fmt: skip
                continue
            _Proof(package, spec, spec.checkpoint(entry.name), found, published, report).run()
    return report.findings()


# ---------------------------------------------------------------- reporting


@dataclass
class _Report:
    """Findings by cause: code and parameter without layer numbers."""

    path: str
    lines: Mapping[str, int]
    _found: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, code: str, name: str, message: str, fix: str) -> None:
        self._found.setdefault((code, _pattern(name)), []).append((message, fix))

    def findings(self) -> list[Finding]:
        rows = []
        for (code, pattern), found in self._found.items():
            message, fix = found[0]
            more = len(found) - 1
            if more:
                message += f" (and {more} more of this kind: layers, ranks, sizes, checkpoints)"
            rows.append(Finding(self.path, self.lines.get(pattern, 1), code, message, fix))
        return sorted(set(rows))


def _pattern(name: str) -> str:
    """`layers.3.mlp.up_proj_weight` -> `layers.#.mlp.up_proj_weight`."""
    return re.sub(r"(?<=\.)(\d+|\{\w+\})(?=\.)", "#", name)


def _rows(source: PackageSource) -> Iterator[tuple[str, str, int]]:
    """(table, parameter, line) of every row of the weight mapping."""
    module = source.modules.get("weight_mapping")
    for node in module.tree.body if module else ():
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        for call in ast.walk(node.value):
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                yield node.targets[0].id, str(call.args[0].value), call.lineno


def _row_lines(source: PackageSource) -> dict[str, int]:
    lines: dict[str, int] = {}
    for _, parameter, line in _rows(source):
        lines.setdefault(_pattern(parameter), line)
    return lines


def _duplicate_rows(source: PackageSource, report: _Report) -> None:
    seen: dict[tuple[str, str], int] = {}
    for table, parameter, line in _rows(source):
        key = (table.partition("_")[0], parameter)
        if key in seen:
            report.add("VG302", parameter, f"{parameter} has rows in lines {seen[key]} and {line}",
                       "keep one row per parameter")  # fmt: skip
        seen.setdefault(key, line)


# ------------------------------------------------------------ the package


@dataclass
class _Package:
    """An imported package and what the proof replaces in it."""

    name: str
    modules: list[ModuleType]
    model_class: str

    def module(self, name: str) -> ModuleType:
        return sys.modules[f"{self.name}.{name}"]

    @contextmanager
    def replaced(self, **objects: Any) -> Iterator[None]:
        """Names that any module of the package holds, replaced for a while."""
        with ExitStack() as stack:
            for module in self.modules:
                for name, value in objects.items():
                    if name in vars(module):
                        stack.enter_context(mock.patch.object(module, name, value))
            yield


@contextmanager
def _imported(source: PackageSource) -> Iterator[_Package]:
    """Import a package under a name of its own, so that edited copies do not meet."""
    with ExitStack() as stack:
        if standin.activate() == "none":
            stack.enter_context(mock.patch.dict(os.environ, {standin.CPU_MODE_VARIABLE: "1"}))
            standin.require()
        name = f"_vlmgen_proof_{source.import_name}"
        before = set(sys.modules)
        stack.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
        spec = importlib.util.spec_from_file_location(
            name,
            source.directory / "__init__.py",
            submodule_search_locations=[str(source.directory)],
        )
        assert spec is not None and spec.loader is not None
        top = importlib.util.module_from_spec(spec)
        try:
            sys.modules[name] = top
            spec.loader.exec_module(top)
            for part in ("config", "weight_mapping", "weight_loaders", "model"):
                importlib.import_module(f"{name}.{part}")
            own = [m for key, m in sys.modules.items() if key == name or key.startswith(name + ".")]
            yield _Package(name, own, _model_class(source))
        finally:
            for key in set(sys.modules) - before:
                if key == name or key.startswith(name + "."):
                    del sys.modules[key]


def _model_class(source: PackageSource) -> str:
    for name, node in source.modules["model"].classes.items():
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        if {"load_weights", "bind_kv_cache"} <= methods:
            return name
    raise LookupError("model.py has no class with load_weights and bind_kv_cache")


def _group(rank: int, size: int) -> SimpleNamespace:
    """A group coordinator of one process that counts as `rank` of `size`."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        local_rank=rank,
        ranks=list(range(size)),
        device_group=dist.ProcessGroup(rank, size),  # type: ignore[call-arg]
    )


@contextmanager
def _groups(
    package: _Package, text: tuple[int, int], vision: tuple[int, int], ep_degree: int = 1
) -> Iterator[None]:
    """Pretend to be a (rank, size) of the text and of the vision group.

    Neighbouring ranks hold the same experts; `ep_degree` is how many shares there are.
    """
    text_group, vision_group = _group(*text), _group(*vision)
    share = text[1] // ep_degree
    same_experts = _group(text[0] % share, share)
    with ExitStack() as stack:
        stack.enter_context(
            package.replaced(
                get_tp_group=lambda: text_group,
                get_neuron_vision_tp_group=lambda: vision_group,
                get_neuron_vision_dp_group=lambda: None,
                get_neuron_ep_degree=lambda: ep_degree,
                get_neuron_ep_rank=lambda: text[0] // share,
                get_neuron_ep_tp_group=lambda: same_experts,
            )
        )
        stack.enter_context(
            mock.patch.object(dist, "get_rank", lambda group=None: group.rank() if group else 0)
        )
        stack.enter_context(
            mock.patch.object(
                dist, "get_world_size", lambda group=None: group.size() if group else 1
            )
        )
        yield


# ------------------------------------------------------- fake checkpoints


class _Slice:
    """A checkpoint tensor without values, which notes what is read of it."""

    def __init__(self, shape: Shape, read: set[Box] | None = None) -> None:
        self._meta = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        self._read = read

    def get_shape(self) -> list[int]:
        return list(self._meta.shape)

    @property
    def shape(self) -> Shape:
        return tuple(self._meta.shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._read is not None:
            self._read.add(self._box(index))
        return self._meta[index]

    def _box(self, index: Any) -> Box:
        """Per dim, the half-open interval that an index reads."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in parts:
            place = parts.index(Ellipsis)
            fill = self._meta.dim() - len(parts) + 1
            parts[place : place + 1] = [slice(None)] * fill
        parts += [slice(None)] * (self._meta.dim() - len(parts))
        intervals = []
        for part, size in zip(parts, self._meta.shape, strict=True):
            if isinstance(part, slice):
                start, stop, _ = part.indices(size)
            elif isinstance(part, int):
                start, stop = part % size, part % size + 1
            else:
                start, stop = 0, size  # a list of places: not followed
            intervals.append((start, max(start, stop)))
        return tuple(intervals)


class _Checkpoint:
    """Answers for the plugin's checkpoint reader, without a file."""

    tensors: Mapping[str, Shape] = {}

    def __init__(self, model_name_or_path: str, cache_dir: str | None = None) -> None:
        self.loaded: dict[int, list[str]] = {}

    def get_tensor_names(self) -> list[str]:
        return sorted(self.tensors)

    def get_num_files(self) -> int:
        return 1

    def load_sharded(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: Any,
        strict: bool = True,
    ) -> SimpleNamespace:
        from vllm_neuron.utils.weight_loader import get_weight_loader

        state = {}
        for name, parameter in model.named_parameters():
            keys = mappings.get(name, name)
            keys = [keys] if isinstance(keys, str) else keys
            slices = [_Slice(self.tensors[key]) for key in keys]
            loaded = get_weight_loader(param=parameter).load(slices, rank)
            if loaded.shape != parameter.shape:
                raise ValueError(
                    f"{name} is {list(parameter.shape)}, its loader makes {list(loaded.shape)} of "
                    f"{', '.join(keys)}"
                )
            state[name] = loaded
        return SimpleNamespace(state_dict=state, missing_keys=[], unexpected_keys=[])

    load_sharded_pipelined = load_sharded


# ---------------------------------------------------------------- the proof


@dataclass
class _Proof:
    """One published checkpoint."""

    package: _Package
    spec: Spec
    resolved: ResolvedCheckpoint
    checkpoint: PublishedCheckpoint
    published: PublishedFamily
    report: _Report

    def run(self) -> None:
        self._sizes()
        layouts = self.package.module("weight_mapping").LAYOUTS
        text_tp = legal_text_tp(self.resolved.text)
        vision_tp = legal_vision_tp(self.resolved.vision)
        clean = True
        for index in range(max(len(text_tp), len(vision_tp))):
            sizes = (text_tp[min(index, len(text_tp) - 1)],
                     vision_tp[min(index, len(vision_tp) - 1)])  # fmt: skip
            first = index == 0
            with _groups(self.package, (0, sizes[0]), (0, sizes[1])):
                try:
                    config, model = self._build(sizes[1])
                except Exception as error:  # the package's code: whatever it raises is a finding
                    self._failed(f"cannot be built at TP {sizes[0]}, vision TP {sizes[1]}", error)
                    return
                mappings = self._mappings(config, self.published.published_layout)
                if mappings is None:
                    return
                if first:
                    clean = self._names(model, mappings) and self._layouts(config, layouts)
                self._shapes(model, mappings, sizes)
        self._expert_shares(text_tp)
        if clean:
            others = [n for n in self.published.layouts if n != self.published.published_layout]
            self._load(1, 1, self.published.published_layout)
            for layout in others or [self.published.published_layout]:
                self._load(text_tp[-1], vision_tp[-1], layout)

    def _failed(self, what: str, error: Exception) -> None:
        self.report.add("VG307", what, f"{self.checkpoint.name} {what}: {error!r}",
                        "see the error; the proof goes no further here")  # fmt: skip

    def _sizes(self) -> None:
        """What the spec says about this checkpoint, against its published config."""
        for field_name, stated, wanted in sizes_of(self.spec, self.resolved, self.checkpoint):
            if stated != wanted:
                self.report.add(
                    "VG309", field_name,
                    f"{self.checkpoint.name}: the spec gives {field_name} {stated}, "
                    f"published is {wanted}",
                    "correct the spec's checkpoints"
                )  # fmt: skip

    def _build(self, vision_tp: int) -> tuple[Any, torch.nn.Module]:
        from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig

        neuron = self.spec.neuron
        config = getattr(self.package.module("config"), f"{self.spec.class_prefix}Config")
        built = config.from_configs(
            self.checkpoint.config,
            text_neuron_config=NeuronConfig(),
            vision_neuron_config=VisionNeuronConfig(
                num_vision_tokens_buckets=list(neuron.num_vision_tokens_buckets),
                vision_attention_block_size=neuron.vision_attention_block_size,
                tp_size=vision_tp,
            ),
        )
        with torch.device("meta"):
            return built, getattr(self.package.module("model"), self.package.model_class)(built)

    def _mappings(self, config: Any, layout: str) -> dict[str, dict[str, list[str]]] | None:
        module = self.package.module("weight_mapping")
        try:
            names = self.checkpoint.tensors(self.published.layouts[layout])
            found = module.LAYOUTS[module.find_layout(names)]
            return module.build_mappings(config, found, has_head=not self.checkpoint.tied)
        except Exception as error:  # the package's code
            self._failed(f"has no mapping in the layout {layout}", error)
            return None

    def _tensors(self, layout: str) -> dict[str, Shape]:
        return self.checkpoint.tensors(self.published.layouts[layout])

    def _names(
        self, model: torch.nn.Module, mappings: Mapping[str, Mapping[str, list[str]]]
    ) -> bool:
        """Parameters and keys against the mapping; True if all is as it should be."""
        name = self.checkpoint.name
        prefixes = self.published.layouts[self.published.published_layout]
        tensors = self.checkpoint.tensors(prefixes)
        ignored = self.package.module("weight_mapping").IGNORED
        users: dict[str, list[str]] = {}
        clean = True
        for tower, mapping in mappings.items():
            module = getattr(model, TOWERS[tower])
            parameters = {p for p, _ in module.named_parameters()}
            for parameter in sorted(parameters - set(mapping)):
                clean = False
                self.report.add("VG301", parameter, f"{name}: no row fills {tower} {parameter}",
                                f"add a row to {MAPPING_FILE}")  # fmt: skip
            for parameter in sorted(set(mapping) - parameters):
                clean = False
                self.report.add(
                    "VG301", parameter, f"{name}: a row fills {tower} {parameter}, which is no "
                    "parameter of the model", "correct the parameter's name"
                )  # fmt: skip
            for parameter, keys in mapping.items():
                for key in keys:
                    users.setdefault(key, []).append(f"{tower} {parameter}")
                    if key not in tensors:
                        clean = False
                        self.report.add(
                            "VG304", parameter, f"{name}: {parameter} asks for {key}, which is not "
                            "published", "correct the key"
                        )  # fmt: skip
        unused = self.checkpoint.ignored_tensors(prefixes)
        unused |= {key: shape for key, shape in tensors.items() if key not in users}
        for key in sorted(unused):
            if not any(fnmatchcase(key, pattern) for pattern in ignored):
                clean = False
                self.report.add(
                    "VG303", key, f"{name}: no parameter uses {key} {list(unused[key])}",
                    f"map it, or list it in IGNORED of {MAPPING_FILE} with a reason"
                )  # fmt: skip
        sharing = self._with_verbs(SHARING_VERBS)
        for key, by in users.items():
            both = {user.split()[0] for user in by} == {"text", "head"}
            head = self.checkpoint.tied and both and len(by) == 2
            parts = all(_pattern(user.split()[1]) in sharing for user in by)
            if len(by) > 1 and not head and not parts:
                clean = False
                self.report.add(
                    "VG302", by[-1].split()[1], f"{name}: {key} fills {' and '.join(by)}",
                    "give each parameter its own key"
                )  # fmt: skip
        return clean

    def _with_verbs(self, verbs: set[str]) -> set[str]:
        """Parameters, as patterns, whose row has one of the verbs."""
        tables = vars(self.package.module("weight_mapping")).values()
        rows = (row for table in tables if isinstance(table, tuple) for row in table)
        return {_pattern(row.parameter) for row in rows if getattr(row, "verb", "") in verbs}

    def _layouts(self, config: Any, layouts: Mapping[str, Any]) -> bool:
        """Every published layout is found by its names and gives the same mapping."""
        clean = True
        bare = {}
        find = self.package.module("weight_mapping").find_layout
        for layout, prefixes in self.published.layouts.items():
            chosen = find(self._tensors(layout))
            chosen_prefixes = layouts[chosen]._asdict()
            if chosen_prefixes != dict(prefixes):
                clean = False
                self.report.add(
                    "VG308", layout, f"{self.checkpoint.name}: names of the layout {layout} are "
                    f"taken for {chosen}", "correct LAYOUTS or find_layout"
                )  # fmt: skip
                continue
            mapping = self._mappings(config, layout) or {}
            bare[layout] = {
                (tower, parameter): [_without_prefix(key, prefixes) for key in keys]
                for tower, rows in mapping.items()
                for parameter, keys in rows.items()
            }
        for layout, rows in bare.items():
            if rows != bare[self.published.published_layout]:
                clean = False
                self.report.add(
                    "VG308", layout,
                    f"{self.checkpoint.name}: the layout {layout} maps differently",
                    "derive both from one table"
                )  # fmt: skip
        return clean

    def _shapes(
        self,
        model: torch.nn.Module,
        mappings: Mapping[str, Mapping[str, list[str]]],
        sizes: tuple[int, int],
    ) -> None:
        tensors = self._tensors(self.published.published_layout)
        for tower, mapping in mappings.items():
            tp = sizes[1] if tower == "vision" else sizes[0]
            where = f"{self.checkpoint.name}, {tower} TP {tp}"
            seen: set[str] = set()
            read: dict[str, set[Box]] = {}
            readers: dict[str, str] = {}
            for name, parameter in getattr(model, TOWERS[tower]).named_parameters():
                keys = mapping.get(name, ())
                if not keys or any(key not in tensors for key in keys) or _pattern(name) in seen:
                    continue
                seen.add(_pattern(name))  # the first layer of its kind stands for the others
                fine = True
                for key in keys:
                    read.setdefault(key, set())
                for rank in range(tp):
                    slices = [_Slice(tensors[key], read[key]) for key in keys]
                    place = f"{where}, rank {rank}: {name}"
                    fine &= self._one(parameter, name, keys, slices, rank, place)
                if fine:
                    readers |= dict.fromkeys(keys, name)
            for key, name in readers.items():
                self._unread(name, key, tensors[key], read[key], where)

    def _expert_shares(self, text_tp: Sequence[int]) -> None:
        """The first layer's experts on all ranks of a size at which some share their experts."""
        sizes = [tp for tp in text_tp if tp > EP_DEGREE and tp % EP_DEGREE == 0]
        if self.resolved.text.moe is None or not sizes:
            return
        tp, tensors = sizes[0], self._tensors(self.published.published_layout)
        where = f"{self.checkpoint.name}, text TP {tp} with {EP_DEGREE} shares of the experts"
        experts = self._with_verbs(EXPERT_VERBS)
        read: dict[str, set[Box]] = {}
        readers: dict[str, str] = {}
        for rank in range(tp):
            with _groups(self.package, (rank, tp), (0, 1), EP_DEGREE):
                try:
                    config, model = self._build(1)
                except Exception as error:  # the package's code: whatever it raises is a finding
                    self._failed(f"cannot be built at {where}", error)
                    return
                mapping = (self._mappings(config, self.published.published_layout) or {})["text"]
                seen: set[str] = set()
                for name, parameter in getattr(model, TOWERS["text"]).named_parameters():
                    if _pattern(name) not in experts or _pattern(name) in seen:
                        continue
                    seen.add(_pattern(name))
                    keys = mapping[name]
                    slices = [_Slice(tensors[key], read.setdefault(key, set())) for key in keys]
                    place = f"{where}, rank {rank}: {name}"
                    if self._one(parameter, name, keys, slices, rank, place):
                        readers |= dict.fromkeys(keys, name)
        for key, name in readers.items():
            self._unread(name, key, tensors[key], read[key], where)

    def _one(
        self,
        parameter: torch.nn.Parameter,
        name: str,
        keys: Sequence[str],
        slices: Sequence[_Slice],
        rank: int,
        where: str,
    ) -> bool:
        from vllm_neuron.utils.weight_loader import get_weight_loader

        try:
            loaded = get_weight_loader(param=parameter).load(slices, rank)
        except Exception as error:  # the package's loader: whatever it raises is a finding
            self.report.add("VG305", name, f"{where} from {', '.join(keys)}: {error}",
                            "correct the loader, or the key of the row")  # fmt: skip
            return False
        if tuple(loaded.shape) != tuple(parameter.shape):
            shapes = ", ".join(str(piece.get_shape()) for piece in slices)
            self.report.add(
                "VG305", name, f"{where} is {list(parameter.shape)}, its loader makes "
                f"{list(loaded.shape)} of {shapes}", "correct the loader's shard size or dim"
            )  # fmt: skip
            return False
        return True

    def _unread(self, name: str, key: str, shape: Shape, read: set[Box], where: str) -> None:
        gap = _first_gap(read, shape)
        if gap is None:
            return
        parts = [
            f"{start} to {stop - 1} of dim {dim}"
            for dim, (start, stop) in enumerate(gap)
            if (start, stop) != (0, shape[dim])
        ]
        self.report.add(
            "VG306", name, f"{where}: no rank reads {' and '.join(parts) or 'anything'} of {key} "
            f"{list(shape)}",
            "correct where a rank's shard begins"
        )  # fmt: skip

    def _load(self, text_tp: int, vision_tp: int, layout: str) -> None:
        """`load_weights` as the runner calls it, on the last rank."""
        tensors = self._tensors(layout)
        tensors |= self.checkpoint.ignored_tensors(self.published.layouts[layout])
        fake = type("PublishedCheckpoint", (_Checkpoint,), {"tensors": tensors})
        ranks = (text_tp - 1, text_tp), (vision_tp - 1, vision_tp)
        where = f"does not load at TP {text_tp}, vision TP {vision_tp} from the layout {layout}"
        with _groups(self.package, *ranks), self.package.replaced(SafetensorsCheckpoint=fake):
            try:
                _, model = self._build(vision_tp)
                before = dict(model.named_parameters())
                load: Callable[..., None] = model.load_weights  # type: ignore[assignment]
                load("published", torch.device("meta"), None)
            except Exception as error:  # the package's code: whatever it raises is a finding
                self._failed(where, error)
                return
        for name, parameter in model.named_parameters():
            if parameter is before[name]:
                self.report.add("VG301", name, f"{self.checkpoint.name}: {name} is not filled "
                                f"by load_weights at TP {text_tp}", "load every tower")  # fmt: skip


def _without_prefix(key: str, prefixes: Mapping[str, str]) -> str:
    """The key without its tower's prefix; the longest prefix that fits."""
    for prefix in sorted(prefixes.values(), key=len, reverse=True):
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _first_gap(read: set[Box], shape: Shape) -> Box | None:
    """A part of a tensor that none of the boxes covers, as large as its place allows."""
    # Between two neighbouring cuts of a dim every box covers all or nothing.
    cuts = [
        sorted({0, size, *(edge for box in read for edge in box[dim])})
        for dim, size in enumerate(shape)
    ]
    places = [{cut: place for place, cut in enumerate(edges)} for edges in cuts]
    covered = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for box in read:
        covered[
            tuple(slice(at[start], at[stop]) for at, (start, stop) in zip(places, box, strict=True))
        ] = True
    if covered.all():
        return None
    cell = [int(place) for place in np.argwhere(~covered)[0]]
    gap = [slice(place, place + 1) for place in cell]
    for dim, edges in enumerate(cuts):
        while gap[dim].stop < len(edges) - 1:
            wider = list(gap)
            wider[dim] = slice(gap[dim].stop, gap[dim].stop + 1)
            if covered[tuple(wider)].any():
                break
            gap[dim] = slice(gap[dim].start, gap[dim].stop + 1)
    return tuple(
        (edges[part.start], edges[part.stop]) for edges, part in zip(cuts, gap, strict=True)
    )
