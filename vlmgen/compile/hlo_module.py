"""HLO modules as bytes, the form that `neuronx-cc` reads.

XLA numbers the instructions of a module with 64 bits since 2025, the computation in the upper half.
Compilers built on an older XLA keep 32 of them and then miss operands (pytorch/xla issue 9685, seen
with the Neuron compiler), so a module for them is numbered anew.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "vlmgen.hlo"

# The fields of xla/service/hlo.proto that name an instruction, and those on the way to them; all
# others are carried along as they are.
_FIELDS = {
    "Module": {"computations": (3, "Computation", True)},
    "Computation": {"instructions": (2, "Instruction", True), "root_id": (6, "", False)},
    "Instruction": {
        "id": (35, "", False),
        "operand_ids": (36, "", True),
        "control_predecessor_ids": (37, "", True),
    },
}


@cache
def message_class() -> Any:
    """The protobuf class of a module, with as many fields as renumbering needs."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="vlmgen/hlo.proto", package=PACKAGE, syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        own = file.message_type.add(name=message)
        for name, (number, kind, repeated) in fields.items():
            field = own.field.add(name=name, number=number)
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            field.type = field.TYPE_MESSAGE if kind else field.TYPE_INT64
            if kind:
                field.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Module"))


def with_narrow_ids(module: bytes) -> bytes:
    """A module whose instructions are numbered from 1, in their order.

    Args:
        module: A serialized `HloModuleProto` without a schedule, as a lowering gives it.
    """
    message = message_class().FromString(module)
    instructions = [one for own in message.computations for one in own.instructions]
    numbers = {one.id: number for number, one in enumerate(instructions, start=1)}
    for one in instructions:
        one.id = numbers[one.id]
        one.operand_ids[:] = [numbers[other] for other in one.operand_ids]
        before = one.control_predecessor_ids
        before[:] = [numbers[other] for other in before]
    for computation in message.computations:
        computation.root_id = numbers[computation.root_id]
    return bytes(message.SerializeToString())
