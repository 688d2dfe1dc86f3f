"""Bodies of type multipart/form-data, as browsers and SDKs upload files (RFC 7578). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message

from octavo.entrypoints.errors import APIError, bad_request

_MAX_PARTS = 100


@dataclass(frozen=True)
class Part:
    """A field of a form; ``filename`` is None for one that is no file."""

    filename: str | None
    data: bytes


def parse_form(content_type: str, body: bytes) -> dict[str, Part]:
    """The fields by name; of several with one name the last. Raises APIError."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise APIError(415, f"Content-Type must be multipart/form-data with a boundary, got {content_type[:100]!r}")
    mark = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(mark, _MAX_PARTS + 2)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise bad_request(f"the form is cut short, or has more than {_MAX_PARTS} fields")
    form = {}
    for piece in pieces[1:-1]:
        head, separator, data = piece.partition(b"\r\n\r\n")
        described = Message()
        for line in head.strip().decode("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip():
                described[name.strip()] = value.strip()
        field = described.get_param("name", header="content-disposition")
        if not separator or not isinstance(field, str):
            raise bad_request("a field of the form has no name")
        form[field] = Part(described.get_filename(), data)
    return form
