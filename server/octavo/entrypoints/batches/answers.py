"""OpenAI's files and batches. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class FileAnswer(Struct):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class FileList(Struct):
    """The answer of GET /v1/files."""

    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class FileDeleted(Struct):
    """The answer of DELETE /v1/files/{id}."""

    id: str
    deleted: bool = True
    object: str = "file"


class RequestCounts(Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct):
    """The error that failed a whole batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """A list of them."""

    data: list[BatchError]
    object: str = "list"


class BatchAnswer(Struct, kw_only=True):
    """A batch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    object: str = "batch"
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None = None


class BatchList(Struct):
    """The answer of GET /v1/batches."""

    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"
