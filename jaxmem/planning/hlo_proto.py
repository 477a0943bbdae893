"""Message classes of XLA's serialized modules and buffer assignments, created by the protobuf library from `hlo.proto`.

jaxlib returns `HloProto` serialized and contains no message classes for it; the packages on PyPI that contain them
require TensorFlow.
"""

import re
from importlib.resources import files

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jaxmem.typing import JsonDict

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES,
}  # fmt: skip


def _message_classes() -> JsonDict:
    schema = files(__package__).joinpath("hlo.proto").read_text()
    file = descriptor_pb2.FileDescriptorProto(name="jaxmem_hlo.proto", package="jaxmem_hlo", syntax="proto3")
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", schema, re.DOTALL):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body):
            message.field.add(
                name=field,
                number=int(number),
                label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL,
                type=_SCALARS.get(kind, _Field.TYPE_MESSAGE),
                type_name=None if kind in _SCALARS else f".jaxmem_hlo.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: found_class for name, found_class in classes.items()}


_CLASSES = _message_classes()
HloProto = _CLASSES["HloProto"]
HloModuleProto = _CLASSES["HloModuleProto"]
HloInstructionProto = _CLASSES["HloInstructionProto"]
ShapeProto = _CLASSES["ShapeProto"]
BufferAssignmentProto = _CLASSES["BufferAssignmentProto"]
