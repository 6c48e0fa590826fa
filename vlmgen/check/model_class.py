"""What the runner looks up on a package: the model class, the tower, the factory, registration.

Source: the contract's `model_class_contract`, runner contract 1, 2.1, 2.5, 3.8 and appendix B.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmgen.check.api import Api, Signature
from vlmgen.check.finding import Finding
from vlmgen.check.source import Module, PackageSource
from vlmgen.check.types import OwnClass, OwnFunction, Types, self_assignments

if TYPE_CHECKING:
    from vlmgen.spec.model import Spec

FACTORY_METHODS = (
    "get_vision_token_merge_factor",
    "get_max_pixels_token_count",
    "get_epd_kwargs",
)
CACHE_ARGUMENTS = ("encoder_cache_buffer", "write_block_ids")
# Called by position, or with one argument, so that only their number counts.
BY_POSITION = {"load_weights": 3, "bind_kv_cache": 1, "get_kv_spec": 0}


@dataclass(frozen=True)
class _Class:
    module: Module
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.node.body if isinstance(n, ast.FunctionDef)}


def check_model_class(
    source: PackageSource,
    api: Api,
    architecture: str,
    inputs: Sequence[str],
    absent: Sequence[str] = (),
) -> list[Finding]:
    """The members that the runner calls, with the parameters it passes.

    Args:
        source: The package.
        api: The contract.
        architecture: Name under which the model is registered.
        inputs: Keywords of the processor that reach `embed_multimodal`.
        absent: Members that a family of this kind has not.
    """
    return sorted(set(_Checker(source, api, architecture, inputs, absent).run()))


def absent_members(spec: Spec) -> list[str]:
    """Members of the contract that a family with these axis values has not."""
    absent = []
    if spec.text.rope.kind != "mrope":
        absent.append("get_mrope_input_positions")
    if spec.vision.input == "tiles":  # the processor has no limit in pixels
        absent.append("get_max_pixels_token_count")
    return absent


def processor_keywords(spec: Spec) -> list[str]:
    """What the Hugging Face processor makes of a family's images and videos."""
    modalities = spec.inputs.model_dump(exclude_none=True).values()
    return [name for modality in modalities for name in modality.values()]


class _Checker:
    def __init__(
        self,
        source: PackageSource,
        api: Api,
        architecture: str,
        inputs: Sequence[str],
        absent: Sequence[str],
    ) -> None:
        self.source, self.architecture, self.inputs = source, architecture, list(inputs)
        self.absent = frozenset(absent)
        self.types = Types(source, api)
        assert api.model is not None
        self.wanted = api.model
        self.path = source.path("model.py")

    def run(self) -> Iterator[Finding]:
        yield from self._factory()
        yield from self._registration()
        model = self._model()
        if model is None:
            yield Finding(
                self.path,
                1,
                "VG110",
                "no class has both embed_multimodal and bind_kv_cache",
                "define the model class in model.py",
            )
            return
        yield from self._members(model)
        yield from self._methods(model)
        yield from self._tower(model)

    def _model(self) -> _Class | None:
        module = self.source.modules.get("model")
        if module is None:
            return None
        for node in module.classes.values():
            found = _Class(module, node)
            if {"embed_multimodal", "bind_kv_cache"} & set(found.methods):
                return found
        return None

    # ---------------------------------------------------------- model class

    def _members(self, model: _Class) -> Iterator[Finding]:
        init = model.methods.get("__init__")
        for name in sorted(self.wanted.attributes):
            if init is None or not any(True for _ in self_assignments(init, name)):
                yield self._finding(
                    model, model.node, "VG110", f"{model.node.name} sets no attribute {name!r}",
                    f"assign self.{name} in __init__"
                )  # fmt: skip

    def _methods(self, model: _Class) -> Iterator[Finding]:
        for name, wanted in self.wanted.methods.items():
            if name in (*FACTORY_METHODS, "load_weights_lite", "from_configs", *self.absent):
                continue
            method = model.methods.get(name)
            if method is None:
                yield self._finding(
                    model, model.node, "VG110", f"{model.node.name} has no method {name!r}",
                    f"define {name}({', '.join(_names(wanted))})"
                )  # fmt: skip
            elif name in BY_POSITION:
                yield from self._takes(model, method, BY_POSITION[name], ())
            elif name == "forward":
                yield from self._forward(model, method, wanted)
            elif name == "embed_multimodal":
                yield from self._embed(model, method)
            else:
                yield from self._takes(model, method, 0, _names(wanted))
                yield from self._order(model, method, _names(wanted))

    def _embed(self, model: _Class, method: ast.FunctionDef) -> Iterator[Finding]:
        wanted = ["encoder_cache", "mm_hashes", *self.inputs]
        yield from self._takes(model, method, 0, wanted)
        if method.args.kwarg is None:
            yield self._finding(
                model,
                method,
                "VG111",
                "embed_multimodal takes no further keywords",
                "add **kwargs: processors pass more than the model uses",
            )
            return
        named = {a.arg for a in (*method.args.args, *method.args.kwonlyargs)}
        if swallowed := [name for name in wanted if name not in named]:
            yield self._finding(
                model,
                method,
                "VG111",
                f"embed_multimodal swallows {', '.join(swallowed)} in its further keywords",
                "name the parameters that the runner passes",
            )

    def _takes(
        self, owner: _Class, method: ast.FunctionDef, count: int, keywords: Sequence[str]
    ) -> Iterator[Finding]:
        """Whether a method can be called with `count` positional and these keyword arguments."""
        args = method.args
        positional = [a.arg for a in (*args.posonlyargs, *args.args)]
        if not _is_static(method):
            positional = positional[1:]
        named = {*positional, *(a.arg for a in args.kwonlyargs)}
        required = positional[: len(positional) - len(args.defaults)]
        required += [a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
                     if d is None]  # fmt: skip
        given = {*positional[:count], *keywords}
        if count > len(positional) and args.vararg is None:
            yield self._finding(
                owner, method, "VG111",
                f"{method.name} takes {len(positional)} by position, the runner gives {count}",
                f"take {count}"
            )  # fmt: skip
        unknown = [k for k in keywords if k not in named]
        if unknown and args.kwarg is None:
            yield self._finding(
                owner, method, "VG111", f"{method.name} does not take {', '.join(unknown)}",
                f"the runner passes {', '.join(keywords)}"
            )  # fmt: skip
        missing = [name for name in required if name not in given]
        if missing:
            yield self._finding(
                owner, method, "VG111",
                f"{method.name} requires {', '.join(missing)}, which the runner does not pass",
                "give a default, or take it from the configuration"
            )  # fmt: skip

    def _order(
        self, owner: _Class, method: ast.FunctionDef, names: Sequence[str]
    ) -> Iterator[Finding]:
        own = [a.arg for a in method.args.args][0 if _is_static(method) else 1 :]
        if set(names) <= set(own) and own[: len(names)] != list(names):
            yield self._finding(
                owner, method, "VG111", f"{method.name} has the order {', '.join(own)}",
                f"use {', '.join(names)}"
            )  # fmt: skip

    def _forward(
        self, model: _Class, method: ast.FunctionDef, wanted: Signature
    ) -> Iterator[Finding]:
        own = [a.arg for a in (*method.args.args, *method.args.kwonlyargs)][1:]
        names = _names(wanted)
        if "get_mrope_input_positions" not in model.methods:
            names = [name for name in names if name != "rotary_position_ids"]
        missing = [name for name in names if name not in own]
        extra = [name for name in own if name not in names]
        for what, items in (("lacks", missing), ("takes besides", extra)):
            if items:
                yield self._finding(
                    model, method, "VG112", f"forward {what} {', '.join(items)}",
                    f"the runner passes {', '.join(names)}"
                )  # fmt: skip
        defaults = own[len(own) - len(method.args.defaults) :] if method.args.defaults else []
        if "rotary_position_ids" in defaults:
            yield self._finding(
                model, method, "VG112", "rotary_position_ids has a default",
                "make it mandatory: a call without it must fail loudly"
            )  # fmt: skip
        required = [n for n in own if n not in defaults and n not in _always_passed(wanted)]
        if required := [n for n in required if n in names]:
            yield self._finding(
                model, method, "VG112", f"forward requires {', '.join(required)}",
                "give None as default: the runner leaves it out in one of the two graphs"
            )  # fmt: skip

    # ----------------------------------------------------------------- tower

    def _tower(self, model: _Class) -> Iterator[Finding]:
        tower = self.types.attribute(OwnClass(model.node.name, instance=True), "visual")
        if not isinstance(tower, OwnClass) or tower.name not in self.types.classes:
            yield self._finding(
                model, model.node, "VG110", "self.visual is no class of the package",
                "assign the tower to self.visual"
            )  # fmt: skip
            return
        cls = _Class(*self.types.classes[tower.name])
        forward = cls.methods.get("forward")
        warmup = model.methods.get("build_vision_synthetic_inputs")
        keys = self._returned_keys(model.module, warmup, model.node.name) if warmup else None
        if forward is None or keys is None:
            if warmup is not None:
                yield self._finding(
                    model, warmup, "VG113", "the warm-up inputs cannot be read from the source",
                    "return a dict with literal keys"
                )  # fmt: skip
            return
        own = [a.arg for a in (*forward.args.args, *forward.args.kwonlyargs)][1:]
        wanted = [*keys, *CACHE_ARGUMENTS]
        missing = [name for name in wanted if name not in own]
        extra = [name for name in own if name not in wanted]
        for what, items in (("lacks", missing), ("takes besides", extra)):
            if items:
                yield self._finding(
                    cls, forward, "VG113", f"{tower.name}.forward {what} {', '.join(items)}",
                    f"warm-up passes {', '.join(wanted)}"
                )  # fmt: skip

    def _returned_keys(
        self, module: Module, function: ast.FunctionDef, owner: str = "", depth: int = 0
    ) -> list[str] | None:
        """Literal keys of the dict that a function returns, through calls of the package."""
        if depth > 4:
            return None
        scope = self.types.scope(module, function, owner)
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            value: ast.expr | None = node.value
            if isinstance(value, ast.Name):
                value = _assigned(function, value.id)
            if isinstance(value, ast.Dict):
                keys = [k.value for k in value.keys if isinstance(k, ast.Constant)]
                return [str(key) for key in keys] if len(keys) == len(value.keys) else None
            if isinstance(value, ast.Call):
                callee = scope.infer(value.func)
                if isinstance(callee, OwnFunction):
                    return self._returned_keys(
                        callee.module, callee.node, callee.owner, depth + 1  # type: ignore[arg-type]
                    )
        return None

    # --------------------------------------------------------------- factory

    def _factory(self) -> Iterator[Finding]:
        module = self.source.modules.get("factory")
        if module is None:
            return
        node = module.classes.get(self.architecture)
        if node is None:
            yield Finding(
                module.path, 1, "VG114", f"factory.py defines no class {self.architecture}",
                "name the factory as the Hugging Face architecture"
            )  # fmt: skip
            return
        factory = _Class(module, node)
        names = {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets
                 if isinstance(t, ast.Name)}  # fmt: skip
        if "_processor_factory" not in names:
            yield self._finding(
                factory, node, "VG114", "the factory has no _processor_factory",
                "attach vLLM's processor: without one newer releases run text-only in silence"
            )  # fmt: skip
        if not any("Module" in ast.unparse(base) for base in node.bases):
            yield self._finding(
                factory, node, "VG114", "the factory is no nn.Module", "derive it from nn.Module"
            )  # fmt: skip
        for name in ("from_configs", *FACTORY_METHODS):
            if name in self.absent:
                continue
            method = factory.methods.get(name)
            if method is None or not _decorated(method, "classmethod"):
                what = "has no" if method is None else "does not mark as classmethod"
                yield self._finding(
                    factory, method or node, "VG114", f"the factory {what} {name}",
                    f"define it as a classmethod on {self.architecture}"
                )  # fmt: skip
                continue
            wanted = _names(self.wanted.methods[name])
            if name == "from_configs":
                yield from self._takes(factory, method, 2, ())
                yield from self._takes(factory, method, 0, wanted)
            else:
                yield from self._takes(factory, method, 0, wanted)
                yield from self._order(factory, method, wanted)

    def _registration(self) -> Iterator[Finding]:
        module = self.source.modules.get("")
        register = module.functions.get("register") if module else None
        path = self.source.path("__init__.py")
        if register is None:
            yield Finding(
                path, 1, "VG115", "the package defines no register()",
                "define it; the entry point of vllm.general_plugins calls it"
            )  # fmt: skip
            return
        text = ast.unparse(register)
        calls = [n for n in ast.walk(register) if isinstance(n, ast.Call)
                 and ast.unparse(n.func).endswith("ModelRegistry.register_model")]  # fmt: skip
        if not calls:
            yield Finding(
                path, register.lineno, "VG115", "register() does not call ModelRegistry",
                "call ModelRegistry.register_model(architecture, factory)"
            )  # fmt: skip
        stores = [n for n in ast.walk(register) if isinstance(n, ast.Attribute)
                  and n.attr == "get_models" and isinstance(n.ctx, ast.Store)]  # fmt: skip
        if not stores:
            yield Finding(
                path, register.lineno, "VG115",
                "register() leaves the plugin's table get_models alone",
                "add the class there, or its merge factor counts as 1"
            )  # fmt: skip
        if self.architecture not in text and "ARCHITECTURE" not in text:
            yield Finding(
                path, register.lineno, "VG115", f"register() does not name {self.architecture}",
                "register the class under its architecture"
            )  # fmt: skip
        project = self.source.root / "pyproject.toml"
        if project.is_file() and self.source.root != self.source.directory:
            body = tomllib.loads(project.read_text(encoding="utf-8"))
            points = body.get("project", {}).get("entry-points", {}).get("vllm.general_plugins", {})
            if f"{self.source.import_name}:register" not in points.values():
                yield Finding(
                    project.as_posix(), 1, "VG115",
                    "the entry point group vllm.general_plugins does not name register",
                    f'add {self.source.import_name} = "{self.source.import_name}:register"'
                )  # fmt: skip

    def _finding(self, owner: _Class, node: ast.stmt, code: str, message: str, fix: str) -> Finding:
        return Finding(owner.module.path, node.lineno, code, message, fix)


def _names(signature: Signature) -> list[str]:
    return [p.name for p in signature.params if p.kind[:3] != "var" and p.name != "kwargs"]


def _always_passed(signature: Signature) -> set[str]:
    optional = {"spec_decode_metadata", "logit_mask", "rank", "vision_embedding_blocks",
                "vision_positions"}  # fmt: skip
    return {p.name for p in signature.params} - optional


def _is_static(method: ast.FunctionDef) -> bool:
    return _decorated(method, "staticmethod")


def _decorated(method: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(d, ast.Name) and d.id == name for d in method.decorator_list)


def _assigned(function: ast.FunctionDef, name: str) -> ast.expr | None:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node.value
    return None
