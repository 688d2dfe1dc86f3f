"""Configuration by environment variables."""

from __future__ import annotations

import pytest

from octavo_operator.config import ConfigError, OperatorConfig


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OCTAVO_WORKERS", "0"),
        ("OCTAVO_WORKERS", "many"),
        ("OCTAVO_LOG_LEVEL", "loud"),
        ("OCTAVO_LEASE_SECONDS", "1"),
        ("OCTAVO_IMAGE_POLICY", "Latest"),
        ("OCTAVO_IMAGE_ROLLOUTS", "0"),
        ("OCTAVO_ALLOW_PRIVILEGED_PODS", "si"),
        ("OCTAVO_ALLOW_SNIPPET_ANNOTATIONS", "si"),
        ("OCTAVO_DEFAULTS", "{"),
        ("OCTAVO_DEFAULTS", '{"images": ["a"]}'),
        ("OCTAVO_DEFAULTS", '{"scheduling": {"tolerations": {}}}'),
        ("OCTAVO_DEFAULTS", '{"resourcesByAccelerator": {"cpu": {"limits": {"memory": "4GB"}}}}'),
        ("OCTAVO_DEFAULTS", '{"resourcesByAccelerator": {"cpu": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}}'),
    ],
)
def test_settings_that_make_no_sense_are_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        OperatorConfig.from_environment({variable: value})
