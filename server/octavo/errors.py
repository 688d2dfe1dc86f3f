"""Errors meant for users: one line that says what is wrong and how to fix it."""


class OctavoError(Exception):
    """Base of the errors whose text is meant for the user; the CLI prints it without a stack trace and exits 1."""


class ModelError(OctavoError):
    """The model cannot be found, fetched, read or is not supported."""


class NoWeightsError(ModelError):
    """A model's folder holds no weights."""


class ConfigError(OctavoError, ValueError):
    """An option, or a combination of options, that cannot work."""


class FieldError(OctavoError, ValueError):
    """A value of a request that cannot be served. ``param`` is the path of its field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(OctavoError):
    """The engine core process has ended or stopped answering."""


class DeviceLostError(OctavoError):
    """The accelerator can run no further step in this process."""
