"""What an expression of a package is, as far as the source says it.

Good enough to know that `self.sampler` is the plugin's `Sampler` and `batch` a `VisionBatch`; what
cannot be told is None, and nothing is claimed about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from vlmgen.check.api import Api, ApiClass, Signature
from vlmgen.check.source import Module, PackageSource

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ModuleType:
    """A module of the contract."""

    name: str


@dataclass(frozen=True)
class FunctionType:
    """A function or method of the contract."""

    label: str
    signature: Signature
    is_method: bool = False
    owner: str = ""


@dataclass(frozen=True, eq=False)
class ClassType:
    """A class of the contract."""

    api: ApiClass


@dataclass(frozen=True, eq=False)
class ObjectType:
    """An object of a class of the contract."""

    api: ApiClass


@dataclass(frozen=True)
class OwnClass:
    """A class of the package; `instance` for its objects."""

    name: str
    instance: bool = False


@dataclass(frozen=True, eq=False)
class OwnFunction:
    """A function or method of the package."""

    module: Module
    node: FunctionNode
    owner: str = ""


@dataclass(frozen=True)
class TupleType:
    """A tuple of known length."""

    items: tuple[Type | None, ...]


Type = ModuleType | FunctionType | ClassType | ObjectType | OwnClass | OwnFunction | TupleType


class Types:
    """Inference over one package.

    Args:
        source: The package.
        api: The contract.
    """

    def __init__(self, source: PackageSource, api: Api) -> None:
        self.source = source
        self.api = api
        self.classes: dict[str, tuple[Module, ast.ClassDef]] = {}
        self.functions: dict[str, list[tuple[Module, ast.FunctionDef]]] = {}
        for module in source.own:
            for name, node in module.classes.items():
                self.classes[name] = (module, node)
            for name, function in module.functions.items():
                self.functions.setdefault(name, []).append((module, function))
        self._imports = {module.name: self._read_imports(module) for module in
                         source.modules.values()}  # fmt: skip
        self._busy: set[tuple[str, str]] = set()
        self._scopes: dict[int, Scope] = {}
        self._attributes: dict[tuple[str, str], Type | None] = {}

    def _read_imports(self, module: Module) -> dict[str, Type]:
        names: dict[str, Type] = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self.api.covers(alias.name):
                        top = alias.name if alias.asname else alias.name.split(".")[0]
                        names[alias.asname or top] = ModuleType(top)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                if self.api.covers(node.module):
                    for alias in node.names:
                        found = self.member(node.module, alias.name)
                        if found is not None:
                            names[alias.asname or alias.name] = found
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found = self._own(alias.name, module)
                    if found is not None:
                        names[alias.asname or alias.name] = found
        return names

    def member(self, module: str, name: str) -> Type | None:
        """What a name of a contract module is."""
        known = self.api.modules.get(module)
        if known is not None and name in known.functions:
            return FunctionType(f"{module}.{name}", known.functions[name])
        if known is not None and name in known.classes:
            return ClassType(known.classes[name])
        if known is not None and name in known.objects:
            return ObjectType(known.objects[name])
        full = f"{module}.{name}"
        if full in self.api.modules or self.api.is_package(full):
            return ModuleType(full)
        return None

    def _own(self, name: str, near: Module) -> Type | None:
        if name in self.classes:
            return OwnClass(name)
        for module, node in self.functions.get(name, ()):
            if module is near or len(self.functions[name]) == 1:
                return OwnFunction(module, node)
        return None

    # --------------------------------------------------------------- scopes

    def scope(self, module: Module, node: FunctionNode, owner: str = "") -> Scope:
        """Names of a function: parameters by annotation, then assignments."""
        if id(node) not in self._scopes:
            self._scopes[id(node)] = Scope(self, module, node, owner)
        return self._scopes[id(node)]

    def annotation(self, node: ast.expr | None, module: Module) -> Type | None:
        """What an annotation stands for."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.annotation(node.left, module) or self.annotation(node.right, module)
        if isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Name) and node.value.id in ("tuple", "Tuple"):
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
                if not any(isinstance(part, ast.Constant) and part.value is ... for part in parts):
                    return TupleType(tuple(self.annotation(part, module) for part in parts))
            return None
        found = self._name(node, module) if isinstance(node, (ast.Name, ast.Attribute)) else None
        if isinstance(found, ClassType):
            return ObjectType(found.api)
        return OwnClass(found.name, instance=True) if isinstance(found, OwnClass) else None

    def _name(self, node: ast.expr, module: Module) -> Type | None:
        if isinstance(node, ast.Name):
            own = self._own(node.id, module) if node.id in module.classes else None
            return self._imports[module.name].get(node.id) or own
        if isinstance(node, ast.Attribute):
            base = self._name(node.value, module)
            return self.member(base.name, node.attr) if isinstance(base, ModuleType) else None
        return None

    def name(self, name: str, module: Module) -> Type | None:
        """What a global name of a module is."""
        return self._imports[module.name].get(name) or self._own(name, module)

    def attribute(self, base: Type | None, name: str) -> Type | None:
        """What an attribute is."""
        if isinstance(base, ModuleType):
            return self.member(base.name, name)
        if isinstance(base, (ObjectType, ClassType)):
            signature = base.api.methods.get(name)
            if signature is not None:
                label = f"{base.api.name}.{name}"
                return FunctionType(label, signature, is_method=True, owner=base.api.name)
            return None
        if isinstance(base, OwnClass) and base.name in self.classes:
            return self._own_attribute(base.name, name)
        return None

    def _own_attribute(self, owner: str, name: str) -> Type | None:
        if (owner, name) in self._busy:
            return None
        if (owner, name) not in self._attributes:
            found = self._find_attribute(owner, name)
            if self._busy:  # part of a larger question, whose answer may be cut short by a cycle
                return found
            self._attributes[owner, name] = found
        return self._attributes[owner, name]

    def _find_attribute(self, owner: str, name: str) -> Type | None:
        self._busy.add((owner, name))
        try:
            module, cls = self.classes[owner]
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    if node.target.id == name:
                        return self.annotation(node.annotation, module)
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    is_property = any(
                        isinstance(d, ast.Name) and d.id in ("property", "cached_property")
                        for d in node.decorator_list
                    )
                    if is_property:
                        return self.annotation(node.returns, module)
                    return OwnFunction(module, node, owner)
            for method in cls.body:
                if isinstance(method, ast.FunctionDef):
                    for value, annotation in self_assignments(method, name):
                        found = self.annotation(annotation, module)
                        if found is None and value is not None:
                            found = self.scope(module, method, owner).infer(value)
                        if found is not None:
                            return found
            return None
        finally:
            self._busy.discard((owner, name))

    def result(self, callee: Type | None) -> Type | None:
        """What a call gives back."""
        if isinstance(callee, FunctionType):
            cls = self.api.class_of(callee.signature.returns)
            return ObjectType(cls) if cls is not None else None
        if isinstance(callee, ClassType):
            return ObjectType(callee.api)
        if isinstance(callee, OwnClass) and not callee.instance:
            return OwnClass(callee.name, instance=True)
        if isinstance(callee, OwnFunction):
            return self.annotation(callee.node.returns, callee.module)
        return None


class Scope:
    """Names inside one function.

    Args:
        types: The package's inference.
        module: Where the function is.
        node: The function.
        owner: Its class, or empty.
    """

    def __init__(self, types: Types, module: Module, node: FunctionNode, owner: str) -> None:
        self.types, self.module, self.node, self.owner = types, module, node, owner
        self._values: dict[str, list[tuple[ast.expr, int | None]]] = {}
        self._known: dict[str, Type | None] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for index, argument in enumerate(arguments):
            self._known[argument.arg] = types.annotation(argument.annotation, module)
            if owner and index == 0 and argument.arg in ("self", "cls"):
                self._known[argument.arg] = OwnClass(owner, instance=argument.arg == "self")
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    self._assign(target, inner.value)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                self._known.setdefault(inner.target.id, types.annotation(inner.annotation, module))
            elif isinstance(inner, (ast.FunctionDef, ast.Lambda)) and inner is not node:
                arguments = [*inner.args.args, *inner.args.kwonlyargs]
                for argument in arguments:
                    self._known.setdefault(
                        argument.arg, types.annotation(argument.annotation, module)
                    )
        self._busy: set[str] = set()

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._values.setdefault(target.id, []).append((value, None))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, element in enumerate(target.elts):
                if not isinstance(element, ast.Name):
                    continue
                if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                    self._values.setdefault(element.id, []).append((value.elts[index], None))
                else:
                    self._values.setdefault(element.id, []).append((value, index))

    def infer(self, node: ast.expr) -> Type | None:
        """What an expression is, or None."""
        if isinstance(node, ast.Name):
            return self._variable(node.id)
        if isinstance(node, ast.Attribute):
            return self.types.attribute(self.infer(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self.types.result(self.infer(node.func))
        if isinstance(node, ast.IfExp):
            return self.infer(node.body) or self.infer(node.orelse)
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                found = self.infer(value)
                if found is not None:
                    return found
            return None
        if isinstance(node, ast.NamedExpr):
            return self.infer(node.value)
        return None

    def _variable(self, name: str) -> Type | None:
        if self._known.get(name) is not None:
            return self._known[name]
        if name not in self._values:
            return None if name in self._known else self.types.name(name, self.module)
        if name in self._busy:
            return None
        self._busy.add(name)
        try:
            for value, index in self._values[name]:
                found = self.infer(value)
                if index is not None:
                    items = found.items if isinstance(found, TupleType) else ()
                    found = items[index] if index < len(items) else None
                if found is not None:
                    return found
            return None
        finally:
            self._busy.discard(name)


def self_assignments(
    method: FunctionNode, name: str
) -> Iterator[tuple[ast.expr | None, ast.expr | None]]:
    """(value, annotation) of every `self.<name> = ...` in a method."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for place, value in pairs:
                    if is_self_attribute(place, name):
                        yield value, None
        elif isinstance(node, ast.AnnAssign) and is_self_attribute(node.target, name):
            yield node.value, node.annotation


def is_self_attribute(node: ast.expr, name: str | None = None) -> bool:
    """Whether an expression is `self.<name>`, or any attribute of `self`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and (name is None or node.attr == name)
    )


def functions_of(module: Module) -> Iterator[tuple[FunctionNode, str]]:
    """(function, owner class) of every function and method of a module."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, ""
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield inner, node.name
