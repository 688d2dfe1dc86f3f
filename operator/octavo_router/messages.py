"""Envoy's ext_proc protocol, as far as the picker speaks it.

Only the fields that are read or written here are declared, with their numbers of envoy.service.ext_proc.v3; protobuf
passes over others. The packages that carry all of Envoy's messages also carry other projects', in the folders of those
projects' own packages.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

PICK_SPACE, PICK = "envoy.lb", "x-gateway-destination-endpoint"  # the endpoint picker protocol's metadata
RETRIES, RETRIED, WITHOUT_ROOM = "octavo-retries", "octavo-retried", "429"  # how often, and after which status
_PACKAGE = "envoy.service.ext_proc.v3"
_STRUCT, _DURATION = ".google.protobuf.Struct", ".google.protobuf.Duration"
_FIELD = descriptor_pb2.FieldDescriptorProto
# Fields of each message: name, number, type (a scalar, or a message), whether repeated.
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "AttributesEntry": [("key", 1, "string", False), ("value", 2, _STRUCT, False)],
    "HttpBody": [("body", 1, "bytes", False)],
    "HttpHeaders": [],
    "ProcessingRequest": [
        ("request_headers", 2, "HttpHeaders", False),
        ("request_body", 4, "HttpBody", False),
        ("attributes", 9, "AttributesEntry", True),
    ],
    "HeaderValue": [("key", 1, "string", False), ("raw_value", 3, "bytes", False)],
    "HeaderValueOption": [("header", 1, "HeaderValue", False), ("append_action", 3, "int32", False)],
    "HeaderMutation": [("set_headers", 1, "HeaderValueOption", True)],
    "BodyResponse": [],
    "HeadersResponse": [],
    "HttpStatus": [("code", 1, "int32", False)],
    "ImmediateResponse": [
        ("status", 1, "HttpStatus", False),
        ("headers", 2, "HeaderMutation", False),
        ("body", 3, "bytes", False),
    ],
    "ProcessingResponse": [
        ("request_headers", 1, "HeadersResponse", False),
        ("request_body", 3, "BodyResponse", False),
        ("immediate_response", 7, "ImmediateResponse", False),
        ("dynamic_metadata", 8, _STRUCT, False),
        ("override_message_timeout", 10, _DURATION, False),
    ],
}
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
}
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


def read(message: bytes) -> tuple[dict[str, str], bytes | None]:
    """Return what Envoy tells of a request, texts by name; and the request's body, None where Envoy asks with the head
    alone."""
    request = ProcessingRequest.FromString(message)
    said: dict[str, str] = {}
    for entry in request.attributes:
        for name, value in entry.value.fields.items():
            if name.startswith("'"):  # a constant, 'NAME=VALUE': a setting of the router, not of the request
                name, _, text = value.string_value.partition("=")
                said[name] = text
            elif value.WhichOneof("kind") == "string_value":
                said[name] = value.string_value
    return said, None if request.HasField("request_headers") else request.request_body.body


def go_on(replicas: str, retries: int = 0, head: bool = False) -> bytes:
    """The request goes on, to the first of these; empty: where the ring hash sends it. `retries`: so often it is tried
    again where a replica has no room for it (429), too; 0: it is not, and the rest is as the route says. `head`: Envoy
    has asked with the head alone."""
    response = ProcessingResponse()
    (response.request_headers if head else response.request_body).SetInParent()
    said = {PICK: replicas, RETRIES: str(retries or ""), RETRIED: WITHOUT_ROOM if retries else ""}
    for name, text in said.items():
        if text:
            response.dynamic_metadata.fields[PICK_SPACE].struct_value.fields[name].string_value = text
    return bytes(response.SerializeToString())


def wait(seconds: float) -> bytes:
    """The answer may take so long."""
    response = ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(int(1000 * seconds))
    return bytes(response.SerializeToString())


def answer(status: int, headers: dict[str, str], text: str) -> bytes:
    """The request goes no further: this is the answer to it. `text`: Envoy puts it into an error of the client's
    dialect."""
    response = ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = text.encode()
    for name, value in headers.items():
        option = response.immediate_response.headers.set_headers.add(append_action=_OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode()
    return bytes(response.SerializeToString())
