"""Which functions of a package run inside a graph, and which while a model is built."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from vlmgen.check.source import Module
from vlmgen.check.types import FunctionNode, OwnClass, OwnFunction, Types


@dataclass(frozen=True, eq=False)
class Code:
    """One function.

    Args:
        module: Where it is.
        node: The function.
        owner: Its class, or empty.
    """

    module: Module
    node: FunctionNode
    owner: str = ""

    @property
    def label(self) -> str:
        """`Class.method` or the function's name."""
        return f"{self.owner}.{self.node.name}" if self.owner else self.node.name

    def nodes(self) -> Iterator[ast.AST]:
        """Nodes that run when the function runs: without nested functions and lambdas."""
        pending: list[ast.AST] = list(self.node.body)
        while pending:
            node = pending.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            yield node
            pending.extend(ast.iter_child_nodes(node))


def torch_modules(types: Types) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Classes of the package that are torch modules."""
    for name, (module, cls) in types.classes.items():
        if is_torch_module(types, name):
            yield module, cls


def is_torch_module(types: Types, name: str, depth: int = 0) -> bool:
    """Whether a class of the package derives from `nn.Module`."""
    if name not in types.classes or depth > 8:
        return False
    bases = [ast.unparse(base) for base in types.classes[name][1].bases]
    return any(
        base in ("nn.Module", "torch.nn.Module", "Module")
        or is_torch_module(types, base, depth + 1)
        for base in bases
    )


def compiled_code(types: Types) -> list[Code]:
    """Every `forward` of a torch module but the factory's, and what those call."""
    roots = []
    for module, cls in torch_modules(types):
        if module.name == "factory":
            continue
        forward = method_of(cls, "forward")
        if forward is not None:
            roots.append(Code(module, forward, cls.name))
    return _reached(types, roots)


def construction_code(types: Types) -> list[Code]:
    """Every `__init__` of a torch module but the factory's, and what those call."""
    roots = []
    for module, cls in torch_modules(types):
        init = method_of(cls, "__init__")
        if module.name != "factory" and init is not None:
            roots.append(Code(module, init, cls.name))
    return _reached(types, roots, construction=True)


def method_of(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A class's own method of that name."""
    found = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return next(found, None)


def _reached(types: Types, roots: list[Code], construction: bool = False) -> list[Code]:
    """The roots and every function of the package that they call, however deep."""
    reached: dict[int, Code] = {}
    pending = list(roots)
    while pending:
        code = pending.pop()
        if id(code.node) in reached:
            continue
        reached[id(code.node)] = code
        scope = types.scope(code.module, code.node, code.owner)
        nodes = code.nodes() if construction else ast.walk(code.node)
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            callee = scope.infer(node.func)
            if isinstance(callee, OwnFunction):
                pending.append(Code(callee.module, callee.node, callee.owner))
            elif isinstance(callee, OwnClass) and callee.instance and not construction:
                module, cls = types.classes.get(callee.name, (None, None))
                forward = method_of(cls, "forward") if cls is not None else None
                if module is not None and forward is not None:
                    pending.append(Code(module, forward, callee.name))
    return sorted(reached.values(), key=lambda code: (code.module.path, code.node.lineno))
