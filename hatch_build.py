"""Build hook of the wheel: compiles the CPU kernels for every instruction set of the machine's architecture.

Without a C compiler the wheel is built all the same, without them: plain torch takes their place, which is slower.
An editable install is left alone (`make setup` compiles there, or the first use does).
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


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
            libraries = compiler.build_several(compiler.all_isas())
        except compiler.BuildError as error:
            self.app.display_warning(f"CPU kernels left out of the wheel: {error}")
            return
        if libraries:
            for library in libraries:
                build_data["force_include"][str(library)] = f"octavo_kernels/cpu/lib/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
