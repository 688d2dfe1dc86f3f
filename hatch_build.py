"""Hooks of the build: the wheel's compiles the CPU kernels for every instruction set of the machine's architecture.

Without a C compiler the wheel is built all the same, without them: plain torch takes their place, which is slower.
An editable install is left alone (`make setup` compiles there, or the first use does). The metadata's hook turns the
README's links to files of the repository into addresses, since a package index shows it without them.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/octavo-dev/octavo"


def readme_elsewhere(text: str, version: str) -> str:
    """A README whose links to files of the repository lead to those of a version, also for pictures."""
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{REPOSITORY}/raw/v{version}/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{REPOSITORY}/blob/v{version}/", text)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        version = re.search(r'__version__ = "(.+)"', (Path(self.root) / "server/octavo/version.py").read_text())
        assert version is not None
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_elsewhere(text, version[1])}


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        # By path: the package itself imports torch, which a build environment does not have.
        path = Path(self.root) / "kernels" / "octavo_kernels" / "cpu" / "compiler.py"
        spec = importlib.util.spec_from_file_location("compiler", path)
        assert spec is not None and spec.loader is not None
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        try:
            libraries = compiler.build_several(compiler.all_isas(), report=self.app.display_info)
        except compiler.BuildError as error:
            self.app.display_warning(f"CPU kernels left out of the wheel: {error}")
            return
        if libraries:
            for library in libraries:
                build_data["force_include"][str(library)] = f"octavo_kernels/cpu/lib/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
