"""Modules for compilers that number instructions with 32 bits."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.needs_jax


def _module() -> bytes:
    from vlmgen.compile import torchax_import

    jax = torchax_import.load().jax  # it settles how many devices this process has
    jnp = jax.numpy

    def function(left: Any, right: Any) -> Any:
        return jax.nn.softmax(left @ right) + jnp.sum(left)

    values = jnp.arange(16.0).reshape(4, 4)
    lowered = jax.jit(function, donate_argnums=(0,)).lower(values, values)
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def _text(module: bytes) -> str:
    from jaxlib import _hlo as hlo

    return hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def test_instructions_are_numbered_with_32_bits_and_nothing_else_changes() -> None:
    from vlmgen.compile.hlo_module import message_class, with_narrow_ids

    module = _module()
    narrow = with_narrow_ids(module)

    def ids(data: bytes) -> list[int]:
        parsed = message_class().FromString(data)
        return [one.id for own in parsed.computations for one in own.instructions]

    assert max(ids(module)) > 2**31  # what older compilers cannot read
    assert ids(narrow) == list(range(1, len(ids(module)) + 1))
    assert "reduce" in _text(module) and "input_output_alias" in _text(module)
    assert _text(narrow) == _text(module)


def test_an_operand_that_no_instruction_has_is_an_error() -> None:
    from vlmgen.compile.hlo_module import message_class, with_narrow_ids

    broken = message_class().FromString(_module())
    broken.computations[0].instructions[-1].operand_ids[0] += 1000
    with pytest.raises(KeyError):
        with_narrow_ids(broken.SerializeToString())
