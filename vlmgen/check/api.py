"""The recorded contract: what the plugin and vLLM offer, as data, and whether a call fits it.

The plugin's part is `contract/vllm_neuron_api.json`, vLLM's part `contract/vllm_names.json`.
`installed_api` reads the same names from an importable plugin.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "contract"
MODEL_CONTRACT = "model_class_contract"
GROUP = ("vllm.distributed.parallel_state", "GroupCoordinator")

# The plugin's modules export these from a submodule only (note in the contract's `vllm_neuron.nn`).
SUBMODULE_ONLY = {
    ("vllm_neuron.nn", "VocabDimShardedEmbedding"): "vllm_neuron.nn.embedding",
    ("vllm_neuron.nn", "EmbedDimShardedEmbedding"): "vllm_neuron.nn.embedding",
}
MODULE_ATTRIBUTES = frozenset(
    "apply buffers children eval load_state_dict modules named_buffers named_modules "
    "named_parameters parameters register_buffer requires_grad_ state_dict to train".split()
)


@dataclass(frozen=True)
class Param:
    """One parameter: `kind` is positional_or_keyword, keyword_only, var_positional, var_keyword."""

    name: str
    kind: str = "positional_or_keyword"
    required: bool = True


@dataclass(frozen=True)
class Signature:
    """Parameters per release that was read.

    Args:
        releases: Release -> parameters; a call must fit every one.
        known: False where only the name is recorded.
        keywords: False where parameter names are inferred, so that keywords prove nothing.
        returns: (module, class) of what comes back, where it is a recorded class.
    """

    releases: Mapping[str, tuple[Param, ...]]
    known: bool = True
    keywords: bool = True
    returns: tuple[str, str] | None = None

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters of the first release."""
        return next(iter(self.releases.values()), ())

    def problems(
        self, positional: int, keywords: Sequence[str], *, open_end: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """(code, message, fix) of what does not fit a call.

        Args:
            positional: Number of positional arguments.
            keywords: Names of the keyword arguments.
            open_end: The call also unpacks `*` or `**`, so nothing can be called missing.
        """
        if not self.known:
            return
        seen = set()
        for release, params in self.releases.items():
            for problem in _problems(params, positional, keywords, open_end):
                if problem not in seen:
                    seen.add(problem)
                    code, message, fix = problem
                    where = f" in {release}" if len(self.releases) > 1 else ""
                    yield code, message + where, fix


def _problems(
    params: Sequence[Param], positional: int, keywords: Sequence[str], open_end: bool
) -> Iterator[tuple[str, str, str]]:
    by_position = [p.name for p in params if p.kind == "positional_or_keyword"]
    names = {p.name for p in params if p.kind in ("positional_or_keyword", "keyword_only")}
    takes_any = any(p.kind == "var_keyword" for p in params)
    takes_more = any(p.kind == "var_positional" for p in params)
    legal = ", ".join(p.name for p in params if p.name in names) or "none"
    if positional > len(by_position) and not takes_more:
        yield (
            "VG105",
            f"{positional} positional arguments, the signature takes {len(by_position)}",
            f"pass {legal} by keyword",
        )
    given = set(by_position[:positional])
    for keyword in keywords:
        if keyword in given:
            yield "VG103", f"argument {keyword!r} is given twice", "pass it once, by keyword"
        elif keyword not in names and not takes_any:
            yield "VG103", f"unknown keyword {keyword!r}", f"legal: {legal}"
        given.add(keyword)
    missing = [p.name for p in params if p.required and p.name in names - given]
    if missing and not open_end:
        yield "VG104", f"missing {', '.join(map(repr, missing))}", f"required of: {legal}"


@dataclass
class ApiClass:
    """A class: how it is made, and what its objects have.

    Args:
        module: Recorded module.
        name: Class name.
        init: The constructor, or None where it is not recorded.
        methods: Methods by name.
        attributes: Attribute and enum member names.
        is_module: Whether it is a torch module, whose call is its `forward`.
    """

    module: str
    name: str
    init: Signature | None = None
    methods: dict[str, Signature] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    is_module: bool = False

    def has(self, name: str) -> bool:
        """Whether objects have this attribute."""
        known = name in self.methods or name in self.attributes
        return known or name.startswith("__") or (self.is_module and name in MODULE_ATTRIBUTES)


@dataclass
class ApiModule:
    """A module: functions, classes and other names."""

    name: str
    functions: dict[str, Signature] = field(default_factory=dict)
    classes: dict[str, ApiClass] = field(default_factory=dict)
    objects: dict[str, ApiClass] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    def names(self) -> list[str]:
        """Everything that can be imported from it."""
        return sorted({*self.functions, *self.classes, *self.objects, *self.constants})


@dataclass
class Api:
    """All modules by name, and what the runner asks of a model class."""

    modules: dict[str, ApiModule] = field(default_factory=dict)
    model: ApiClass | None = None

    def covers(self, module: str) -> bool:
        """Whether a module belongs to the contract, recorded or not."""
        return module.split(".")[0] in ("vllm_neuron", "nkilib", "vllm", "libtorch_neuronx_lite")

    def is_package(self, name: str) -> bool:
        """Whether a recorded module lies below this name."""
        return any(module.startswith(name + ".") for module in self.modules)

    def class_of(self, key: tuple[str, str] | None) -> ApiClass | None:
        """The class of a (module, name) pair."""
        if key is None or key[0] not in self.modules:
            return None
        return self.modules[key[0]].classes.get(key[1])

    def require_class(self, module: str, name: str) -> ApiClass:
        """The class of a (module, name) pair that is certain to be recorded."""
        return self.modules[module].classes[name]


@lru_cache(maxsize=1)
def recorded_api() -> Api:
    """The contract as recorded."""
    api = Api()
    plugin = json.loads((DATA / "vllm_neuron_api.json").read_text(encoding="utf-8"))["modules"]
    for name, body in plugin.items():
        if name == MODEL_CONTRACT:
            (only,) = body["classes"]
            api.model = _class(name, only, body["classes"][only], plugin)
        elif " " not in name and name != "vllm.distributed.parallel_state":
            _add_module(api, name, body, plugin)
    _add_evidence_modules(api, plugin)
    vllm = json.loads((DATA / "vllm_names.json").read_text(encoding="utf-8"))["modules"]
    for name, body in vllm.items():
        module = api.modules.setdefault(name, ApiModule(name))
        for item, entry in body.items():
            if entry["kind"] == "function":
                returns = GROUP if item.endswith("_group") else None
                module.functions[item] = Signature(_releases(entry["params"]), returns=returns)
                continue
            made = ApiClass(
                name,
                item,
                Signature(_releases(entry["init"])) if "init" in entry else None,
                {m: Signature(_releases(p)) for m, p in entry["methods"].items()},
                set(entry["attributes"]),
            )
            (module.classes if entry["kind"] == "class" else module.objects)[item] = made
    return api


def _releases(by_release: Mapping[str, list[dict[str, Any]]]) -> dict[str, tuple[Param, ...]]:
    return {release: _params(params) for release, params in by_release.items()}


def _params(params: Sequence[Mapping[str, Any]]) -> tuple[Param, ...]:
    return tuple(Param(p["name"], p["kind"], p["required"]) for p in params)


def _add_module(api: Api, name: str, body: Mapping[str, Any], plugin: Mapping[str, Any]) -> None:
    module = api.modules[name] = ApiModule(name)
    for item, entry in body["functions"].items():
        # libtorch_neuronx_lite lists functions of submodules with their path.
        prefix, _, last = item.rpartition(".")
        home = module
        if prefix:
            full = f"{name}.{prefix}"
            home = api.modules.setdefault(full, ApiModule(full))
        home.functions[last] = Signature(
            {"the contract": _params(entry["params"])},
            known=entry.get("signature_known", True),
            returns=_returned(entry.get("returns") or "", name, plugin),
        )
    for item, entry in body["classes"].items():
        module.classes[item] = _class(name, item, entry, plugin)
    module.constants.update(body.get("constants", ()))
    if name == "vllm_neuron.functional":
        found = (re.findall(r": (\w+)\.$", note) for note in body["notes"] if "Importable" in note)
        module.constants.update(n for names in found for n in names)


def _class(module: str, name: str, entry: Mapping[str, Any], plugin: Mapping[str, Any]) -> ApiClass:
    init = None
    if entry.get("init_known", True):
        init = Signature({"the contract": _params(entry["init"])})
    methods = {}
    for method, body in entry["methods"].items():
        methods[method] = Signature(
            {"the contract": _params(body["params"])},
            keywords="inferred" not in str(body.get("binding", "")),
            returns=_returned(body.get("returns") or "", module, plugin),
        )
    attributes = {attribute.split("=")[0] for attribute in entry["attributes"]}
    if init is not None and "config" in module:
        attributes |= {p.name for p in init.params if p.kind != "var_keyword"}
    return ApiClass(module, name, init, methods, attributes, module == "vllm_neuron.nn")


def _returned(text: str, module: str, plugin: Mapping[str, Any]) -> tuple[str, str] | None:
    """The recorded class that a description of a result begins with."""
    word = re.match(r"\w*", text)
    first = word.group() if word else ""
    if first in ("GroupCoordinator", "group"):
        return GROUP
    return (module, first) if first in plugin[module]["classes"] else None


def _add_evidence_modules(api: Api, plugin: Mapping[str, Any]) -> None:
    """Items are also importable from the file in which they were read."""
    for name in list(api.modules):
        body = plugin.get(name)
        for kind in ("functions", "classes"):
            for item, entry in (body or {}).get(kind, {}).items():
                path = re.fullmatch(r"([\w/]+)\.py", entry.get("evidence") or "")
                home = path.group(1).replace("/", ".") if path else name
                source = getattr(api.modules[name], kind)
                if home != name and item in source:
                    target = api.modules.setdefault(home, ApiModule(home))
                    getattr(target, kind)[item] = source[item]


def installed_api(wanted: Api) -> tuple[Api, dict[tuple[str, str], str]]:
    """Read the names of a contract from the plugin that is importable here.

    Args:
        wanted: The recorded contract; only its names are read.

    Returns:
        The live contract, and (module, dotted name) -> what cannot be read.

    Raises:
        ImportError: `import vllm_neuron` fails.
    """
    importlib.import_module("vllm_neuron")
    live, trouble = Api(model=wanted.model), {}
    for name, module in wanted.modules.items():
        if name.split(".")[0] == "vllm":
            live.modules[name] = module
            continue
        try:
            loaded = importlib.import_module(name)
        except ImportError as error:
            trouble[name, ""] = f"cannot be imported: {error}"
            continue
        found = live.modules[name] = ApiModule(name, constants=set(module.constants))
        for item, signature in module.functions.items():
            function = getattr(loaded, item, None)
            if function is None:
                trouble[name, item] = "does not exist"
            else:
                found.functions[item] = _live(function, signature)
        for item, recorded in module.classes.items():
            elsewhere = SUBMODULE_ONLY.get((name, item))
            cls = getattr(importlib.import_module(elsewhere) if elsewhere else loaded, item, None)
            if cls is None:
                trouble[name, item] = "does not exist"
                continue
            init = _live(cls.__init__, recorded.init) if recorded.init is not None else None
            methods = {}
            for method, signature in recorded.methods.items():
                function = getattr(cls, method, None)
                if function is None:
                    trouble[name, f"{item}.{method}"] = "does not exist"
                else:
                    methods[method] = _live(function, signature)
            found.classes[item] = ApiClass(
                name, item, init, methods, set(recorded.attributes), recorded.is_module
            )
    return live, trouble


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_or_keyword",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
    inspect.Parameter.KEYWORD_ONLY: "keyword_only",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}


def _live(function: Any, recorded: Signature) -> Signature:
    """The signature of a live function, without `self` and `cls`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return Signature({"installed": ()}, known=False, returns=recorded.returns)
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    params = tuple(
        Param(p.name, _KINDS[p.kind], p.default is p.empty and _KINDS[p.kind][:3] != "var")
        for p in parameters
    )
    return Signature({"installed": params}, keywords=recorded.keywords, returns=recorded.returns)


def differences(recorded: Signature, live: Signature) -> str:
    """What a live signature changes for callers, or an empty text."""
    if not (recorded.known and live.known):
        return ""
    old = {p.name: p for p in recorded.params}
    new = {p.name: p for p in live.params}
    if any(p.kind == "var_keyword" for p in live.params):
        return ""
    parts = []
    if recorded.keywords and (gone := [name for name in old if name not in new]):
        parts.append(f"lacks {', '.join(gone)}")
    if added := [name for name in new if name not in old and new[name].required]:
        parts.append(f"also requires {', '.join(added)}")
    common = [name for name in old if name in new]
    if [name for name in new if name in old] != common:
        parts.append(f"has another order: {', '.join(new)}")
    if changed := [name for name in common if new[name].required and not old[name].required]:
        parts.append(f"now requires {', '.join(changed)}")
    return "; ".join(parts)
