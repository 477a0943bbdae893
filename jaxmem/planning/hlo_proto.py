"""Message classes of XLA's serialized modules and buffer assignments, made by the protobuf library.

jaxlib hands out `HloProto` serialized and ships no message classes for it, and no package on PyPI does without
TensorFlow. So the part of the schema that a plan reads stands here, with the names and numbers of openxla/xla
(`xla/service/hlo.proto`, `xla/xla_data.proto`); fields that are not listed are skipped. A map is written as what it is
on the wire: a repeated message of key and value.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCHEMA = """
message HloProto { bytes hlo_module = 1; bytes buffer_assignment = 3; }  // serialized, since they are read apart
message HloModuleProto {
  repeated HloComputationProto computations = 3;
  int64 entry_computation_id = 6;
  HloScheduleProto schedule = 7;
  StackFrameIndexProto stack_frame_index = 17;
}
message HloScheduleProto { repeated SequenceEntry sequences = 1; }
message SequenceEntry { int64 key = 1; InstructionSequence value = 2; }
message InstructionSequence { repeated int64 instruction_ids = 1; }
message StackFrameIndexProto {
  repeated string file_names = 1;
  repeated string function_names = 2;
  repeated FileLocation file_locations = 3;
  repeated StackFrame stack_frames = 4;
}
message FileLocation { int32 file_name_id = 1; int32 function_name_id = 2; int32 line = 3; }
message StackFrame { int32 file_location_id = 1; int32 parent_frame_id = 2; }

message HloComputationProto {
  string name = 1;
  repeated HloInstructionProto instructions = 2;
  int64 id = 5;
  int64 root_id = 6;
}
message HloInstructionProto {
  string name = 1;
  string opcode = 2;
  bytes shape = 3;                // a ShapeProto, serialized: equal shapes are read once
  OpMetadata metadata = 7;
  int64 parameter_number = 9;
  int64 tuple_index = 13;
  ConvolutionDimensionNumbers convolution_dimension_numbers = 16;
  string custom_call_target = 28;
  DotDimensionNumbers dot_dimension_numbers = 30;
  int64 id = 35;
  repeated int64 operand_ids = 36;
  repeated int64 called_computation_ids = 38;
  bytes backend_config = 43;
  repeated ReplicaGroup replica_groups = 49;
  repeated SourceTarget source_target_pairs = 52;
  FrontendAttributes frontend_attributes = 68;
  CollectiveDeviceListProto collective_device_list = 87;
  IotaReplicaGroupListProto iota_collective_device_list = 92;
  MeshAxesReplicaGroupListProto mesh_axes_replica_group_list = 93;
}
message OpMetadata { string op_name = 2; int32 stack_frame_id = 15; }
message ShapeProto {
  int32 element_type = 2;
  repeated int64 dimensions = 3;
  repeated bytes tuple_shapes = 4;  // serialized, as above
  LayoutProto layout = 5;
}
message LayoutProto { int64 memory_space = 8; }
message DotDimensionNumbers { repeated int64 lhs_contracting_dimensions = 1; }
message ConvolutionDimensionNumbers { int64 kernel_output_feature_dimension = 4; }
message FrontendAttributes { repeated StringEntry map = 1; }
message StringEntry { string key = 1; string value = 2; }

message ReplicaGroup { repeated int64 replica_ids = 1; }
message SourceTarget { int64 source = 1; int64 target = 2; }
message CollectiveDeviceListProto {
  repeated ReplicaGroup replica_groups = 1;
  IotaReplicaGroupListProto iota_replica_group_list = 2;
}
message IotaReplicaGroupListProto {
  int64 num_replica_groups = 1;
  int64 num_devices_per_group = 2;
  repeated int64 iota_reshape_dims = 3;
  repeated int32 iota_transpose_perm = 4;
}
message MeshAxesReplicaGroupListProto { MeshProto mesh = 1; repeated AxisRefProto axes = 2; }
message MeshProto { repeated MeshAxis axes = 1; repeated int64 device_ids = 2; IotaTileProto iota = 3; }
message MeshAxis { string name = 1; int64 size = 2; }
message IotaTileProto { repeated int64 dims = 1; repeated int32 transpose_perm = 2; }
message AxisRefProto { int64 mesh_axis_index = 1; SubAxisInfo sub_axis_info = 2; }
message SubAxisInfo { int64 pre_size = 1; int64 size = 2; }

message BufferAssignmentProto {
  repeated LogicalBufferProto logical_buffers = 1;
  repeated BufferAlias buffer_aliases = 2;
  repeated BufferAllocationProto buffer_allocations = 3;
  repeated HeapSimulatorTrace heap_simulator_traces = 4;
}
message LogicalBufferProto { int64 id = 1; int64 size = 2; Location defined_at = 3; }
message Location { repeated int64 shape_index = 3; int64 instruction_id = 4; }
message BufferAlias { int64 source_buffer_id = 1; Location location = 2; }
message BufferAllocationProto {
  int64 size = 2;
  bool is_thread_local = 3;       // scratch on the stack of a CPU's thread
  bool is_entry_computation_parameter = 5;
  int64 parameter_number = 6;
  bool maybe_live_out = 7;
  int64 color = 8;                // memory space
  repeated Assigned assigned = 9;
  bool is_constant = 12;
}
message Assigned { int64 logical_buffer_id = 1; int64 offset = 2; int64 size = 3; }
message HeapSimulatorTrace { repeated HeapEvent events = 1; int64 buffer_allocation_index = 3; }
message HeapEvent { int32 kind = 1; int64 buffer_id = 2; int64 share_with_canonical_id = 5; }
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES,
}  # fmt: skip


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="jaxmem_hlo.proto", package="jaxmem_hlo", syntax="proto3")
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", _SCHEMA, re.DOTALL):
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
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: found_class for name, found_class in found.items()}


_CLASSES = _message_classes()
HloProto = _CLASSES["HloProto"]
HloModuleProto = _CLASSES["HloModuleProto"]
HloInstructionProto = _CLASSES["HloInstructionProto"]
ShapeProto = _CLASSES["ShapeProto"]
BufferAssignmentProto = _CLASSES["BufferAssignmentProto"]
