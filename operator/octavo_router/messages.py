"""Envoy's ext_proc protocol, as far as the picker speaks it.

Only the fields that are read or written here are declared, with their numbers of envoy.service.ext_proc.v3; protobuf
passes over others. The packages that carry all of Envoy's messages also carry other projects', in the folders of those
projects' own packages.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
_PACKAGE = "envoy.service.ext_proc.v3"
_STRUCT, _DURATION = ".google.protobuf.Struct", ".google.protobuf.Duration"
_FIELD = descriptor_pb2.FieldDescriptorProto
# Of each message its fields: name, number, type (a scalar, or a message), whether repeated.
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "AttributesEntry": [("key", 1, "string", False), ("value", 2, _STRUCT, False)],
    "HttpBody": [("body", 1, "bytes", False), ("end_of_stream", 2, "bool", False)],
    "HttpHeaders": [("end_of_stream", 3, "bool", False)],
    "ProcessingRequest": [("request_headers", 2, "HttpHeaders", False), ("request_body", 4, "HttpBody", False),
                          ("attributes", 9, "AttributesEntry", True)],
    "HeaderValue": [("key", 1, "string", False), ("raw_value", 3, "bytes", False)],
    "HeaderValueOption": [("header", 1, "HeaderValue", False), ("append_action", 3, "int32", False)],
    "HeaderMutation": [("set_headers", 1, "HeaderValueOption", True)],
    "CommonResponse": [("header_mutation", 2, "HeaderMutation", False)],
    "BodyResponse": [("response", 1, "CommonResponse", False)],
    "HttpStatus": [("code", 1, "int32", False)],
    "ImmediateResponse": [("status", 1, "HttpStatus", False), ("headers", 2, "HeaderMutation", False),
                          ("body", 3, "bytes", False)],
    "HeadersResponse": [("response", 1, "CommonResponse", False)],
    "ProcessingResponse": [("request_headers", 1, "HeadersResponse", False), ("request_body", 3, "BodyResponse", False),
                           ("immediate_response", 7, "ImmediateResponse", False),
                           ("override_message_timeout", 10, _DURATION, False)],
}  # fmt: skip
_SCALARS = {
    "string": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES, "bool": _FIELD.TYPE_BOOL, "int32": _FIELD.TYPE_INT32,
}  # fmt: skip
_OVERWRITE_IF_EXISTS_OR_ADD = 2


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="octavo_router/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    known = (struct_pb2.DESCRIPTOR, duration_pb2.DESCRIPTOR)
    file.dependency.extend(one.name for one in known)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            made = message.field.add(name=field, number=number)
            made.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if kind in _SCALARS:
                made.type = _SCALARS[kind]
            else:
                made.type = _FIELD.TYPE_MESSAGE
                made.type_name = kind if kind.startswith(".") else f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    for one in known:
        pool.AddSerializedFile(one.serialized_pb)
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name: found[f"{_PACKAGE}.{name}"] for name in _MESSAGES}


_CLASSES = _build()
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]


def attributes(request: Any) -> dict[str, str]:
    """What Envoy was configured to tell of the request: texts by name."""
    return {
        name: value.string_value
        for entry in request.attributes
        for name, value in entry.value.fields.items()
        if value.WhichOneof("kind") == "string_value"
    }


def headers_seen() -> Any:
    """The body may come, or, without one, the request go on."""
    response = ProcessingResponse()
    response.request_headers.SetInParent()
    return response


def go_on(headers: dict[str, str]) -> Any:
    """The body was seen: the request goes on, with these headers."""
    response = ProcessingResponse()
    response.request_body.response.SetInParent()
    _set(response.request_body.response.header_mutation, headers)
    return response


def wait(seconds: float) -> Any:
    """The answer may take so long."""
    response = ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(int(1000 * seconds))
    return response


def answer(status: int, headers: dict[str, str], text: str) -> Any:
    """The request goes no further: this is the answer to it. `text`: Envoy puts it into an error of the client's
    dialect."""
    response = ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = text.encode()
    _set(response.immediate_response.headers, headers)
    return response


def _set(mutation: Any, headers: dict[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode()
