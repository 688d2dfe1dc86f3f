"""Modules that refer to modules of others."""

from __future__ import annotations

from torch import nn


def set_unregistered(module: nn.Module, **others: nn.Module | None) -> None:
    """Set attributes of ``module`` to modules that are registered elsewhere.

    torch registers each module that is assigned to an attribute; one that is registered twice has two names, and its
    weights would be loaded and counted twice.
    """
    for name, other in others.items():
        object.__setattr__(module, name, other)
