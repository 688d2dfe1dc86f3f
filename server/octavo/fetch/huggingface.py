"""Models from a Hugging Face hub, kept in the cache folder that every Hugging Face tool shares.

HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE and the timeouts mean what they mean elsewhere, and so do
the folders (blobs, snapshots, refs, .locks). The transfer is our own because `huggingface_hub` starts a download that
was killed from the beginning, does not check what arrived, and takes half a second to import. Everything fetched is
compared with the hash that the hub states (sha256 for large files, git's sha1 for small ones) before it gets its
name.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from octavo.errors import ModelError
from octavo.fetch.cache import disk_error, hf_home, hub_cache, locked, write_json_atomically
from octavo.fetch.download import ResponseError, UnreachableError, get_json, read_range, resume
from octavo.fetch.headers import get_header
from octavo.fetch.model_config import check_before_weights, weight_map_files
from octavo.fetch.model_names import REPOSITORY, near_models, no_such_name
from octavo.fetch.progress import Progress, format_bytes
from octavo.gguf.file_names import all_parts, by_default, check_whole, models_of, quantised_as

logger = logging.getLogger(__name__)

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model")  # at the top level
# Further files of folders: chat templates, and sentence-transformers' modules.
_IN_FOLDERS = (
    "additional_chat_templates/*.jinja",
    "[0-9]_*/config.json",
    "[0-9]_Dense/model.safetensors",
    "[0-9]_LayerNorm/model.safetensors",
)
_WORKERS = 4  # files at a time
_OF_TOKENIZERS = ("tokenizer", "vocab", "added_tokens", "special_tokens", "chat_template")
_MAX_DESCRIPTION = 16 << 20


@dataclass(frozen=True)
class _File:
    name: str
    size: int | None
    sha256: str | None  # of large files
    git_sha1: str | None

    @property
    def blob(self) -> str:
        """Its name among the blobs: what the hub's ETag says."""
        return self.sha256 or self.git_sha1 or hashlib.sha256(self.name.encode()).hexdigest()


def fetch_repository(
    address: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: bool = True,
    need_weights: bool = True,
    refresh: bool = False,
    check: Callable[[Path], None] = check_before_weights,
) -> Path:
    """The snapshot's folder of ``[hf://]org/name``, or the file of ``org/name/file.gguf`` and ``org/name:Q4_K_M``.

    What was fetched once is used without asking the hub again, unless ``refresh``. ``check`` gets the folder before
    weights are fetched. Raises ModelError.
    """
    match = REPOSITORY.fullmatch(address.removeprefix("hf://"))
    if not match or not _REPOSITORY.fullmatch(match["repo"]):
        raise no_such_name(address, download_dir)
    return _Repository(match["repo"], revision or "main", download_dir, progress, check).fetch(
        match["file"], match["quant"], need_weights, refresh
    )


def fetch_repository_files(
    repo: str,
    names: Sequence[str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: bool = True,
) -> Path:
    """The snapshot's folder of ``org/name``, with these files of it and no others. Raises ModelError."""
    if not _REPOSITORY.fullmatch(repo):
        raise no_such_name(repo, download_dir)
    return _Repository(repo, revision or "main", download_dir, progress).fetch_named(names)


def cached_repository(address: str, *, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """Find what the cache has of a repository, whole or not; None: nothing. See `fetch_repository`."""
    match = REPOSITORY.fullmatch(address.removeprefix("hf://"))
    if not match:
        return None
    return _Repository(match["repo"], revision or "main", download_dir, False)._cached(match["file"], match["quant"])


def bytes_to_fetch(address: str, timeout: float) -> int:
    """Ask the hub how many bytes of weights ``org/name:QUANT`` or ``org/name`` has; ``timeout`` in seconds. Raises
    ModelError, UnreachableError and ResponseError; nothing where HF_HUB_OFFLINE forbids to ask."""
    match = REPOSITORY.fullmatch(address)
    if match is None or _flag("HF_HUB_OFFLINE") or _flag("TRANSFORMERS_OFFLINE"):
        raise UnreachableError("not asked")
    repository = _Repository(match["repo"], "main", None, False)
    _, files = repository._list(timeout)
    result = repository._gguf(files, match["file"], match["quant"])
    names = all_parts(result) if result else [name for name in files if name.endswith(".safetensors")]
    return sum(files[name].size or 0 for name in names)


def fetch_headers(address: str, *, revision: str | None = None, into: Path) -> Path:
    """The description of ``[hf://]org/name`` and its files of weights, with their headers and nothing behind them: of
    the right size, they take no room. The .gguf of ``org/name:Q4_K_M`` alone. Raises ModelError."""
    match = REPOSITORY.fullmatch(address.removeprefix("hf://"))
    if not match or not _REPOSITORY.fullmatch(match["repo"]):
        raise no_such_name(address, None)
    repository = _Repository(match["repo"], revision or "main", None, False)
    try:
        return repository.get_headers(match["file"], match["quant"], into)
    except UnreachableError as error:
        raise ModelError(
            f"cannot reach {repository.endpoint} to look at {repository.repo}: {error}; check the network, HTTPS_PROXY "
            "and HF_ENDPOINT, or name a model that is on this machine"
        ) from None
    except ResponseError as error:
        raise repository._refused(error) from None


class _Repository:
    def __init__(
        self,
        repo: str,
        revision: str,
        download_dir: str | None,
        progress: bool,
        check: Callable[[Path], None] = check_before_weights,
    ) -> None:
        self.repo, self.revision, self.progress, self.check = repo, revision, progress, check
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.download_dir, self.cache = download_dir, hub_cache(download_dir)
        self.folder = self.cache / ("models--" + repo.replace("/", "--"))
        token = _token()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.stopped = False

    def fetch(self, file: str | None, quant: str | None, need_weights: bool, refresh: bool) -> Path:
        wanted = json.dumps([self.revision, file, quant, need_weights])
        record = self.folder / "octavo" / f"{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.json"
        if not refresh and (found := self._recorded(record)):
            return found
        if _flag("HF_HUB_OFFLINE") or _flag("TRANSFORMERS_OFFLINE"):
            if found := self._cached(file, quant):
                return found
            raise ModelError(
                f"{self.repo} (revision {self.revision}) is not in {self.cache}, and HF_HUB_OFFLINE keeps it from "
                "being fetched; unset it, or fetch the model first with `octavo fetch`"
                + near_models(self.repo, self.download_dir)
            )
        try:
            return self._download(record, file, quant, need_weights)
        except UnreachableError as error:
            if found := self._cached(file, quant):
                print(
                    f"cannot reach {self.endpoint} ({error}); using {self.repo} as it is in {self.cache}",
                    file=sys.stderr,
                )
                return found
            raise ModelError(
                f"cannot reach {self.endpoint} to fetch {self.repo}: {error}; check the network, HTTPS_PROXY and "
                "HF_ENDPOINT, or name a model that is on this machine" + near_models(self.repo, self.download_dir)
            ) from None
        except ResponseError as error:
            raise self._refused(error) from None
        except OSError as error:
            raise disk_error(error, self.cache) from None

    def fetch_named(self, names: Sequence[str]) -> Path:
        """See `fetch_repository_files`."""
        wanted = json.dumps([self.revision, *names])
        record = self.folder / "octavo" / f"{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.json"
        if found := self._recorded(record):
            return found
        if _flag("HF_HUB_OFFLINE") or _flag("TRANSFORMERS_OFFLINE"):
            raise ModelError(
                f"{self.repo} (revision {self.revision}) is not in {self.cache}, and HF_HUB_OFFLINE keeps it from "
                "being fetched; unset it"
            )
        try:
            commit, files = self._list()
            if missing := [name for name in names if name not in files]:
                raise ModelError(f"{self.repo} at {self.endpoint} has no {' and no '.join(missing)}")
            snapshot = self.folder / "snapshots" / commit
            with locked(record, wait_for=self.repo):
                self._get((files[name] for name in names), snapshot)
                write_json_atomically(record, {"commit": commit, "files": list(names), "result": ""})
            return snapshot
        except UnreachableError as error:
            raise ModelError(
                f"cannot reach {self.endpoint} to fetch {self.repo}: {error}; check the network, HTTPS_PROXY and "
                "HF_ENDPOINT"
            ) from None
        except ResponseError as error:
            raise self._refused(error) from None
        except OSError as error:
            raise disk_error(error, self.cache) from None

    def _recorded(self, record: Path) -> Path | None:
        """Return the result of an earlier fetch if all of it still exists."""
        try:
            known = json.loads(record.read_text(encoding="utf-8"))
            snapshot: Path = self.folder / "snapshots" / known["commit"]
            if all((snapshot / name).exists() for name in known["files"]):
                return snapshot / str(known["result"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def _cached(self, file: str | None, quant: str | None) -> Path | None:
        """A snapshot that somebody fetched, whole or not (a missing file is found later, by name)."""
        commit = self.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = (self.folder / "refs" / self.revision).read_text().strip()
            except OSError:
                return None
        snapshot = self.folder / "snapshots" / commit
        if file or quant:
            names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf")]
            models = models_of(names)
            found = [file] if file in names else quantised_as(models, quant) if quant else []
            whole = len(found) == 1 and set(all_parts(found[0])) <= set(names)
            return snapshot / all_parts(found[0])[0] if whole else None
        return snapshot if (snapshot / "config.json").exists() or any(snapshot.glob("*.gguf")) else None

    def _download(self, record: Path, file: str | None, quant: str | None, need_weights: bool) -> Path:
        commit, files = self._list()
        snapshot = self.folder / "snapshots" / commit
        result = self._gguf(files, file, quant)
        if result:
            names = all_parts(result)
        else:
            names = [n for n in files if _is_description(n)]
            if "config.json" not in names:
                raise ModelError(f"{self.repo} at {self.endpoint} has no config.json: it is not a model")
        with locked(record, wait_for=self.repo):
            self._get((files[n] for n in names), snapshot)
            if not result and need_weights:
                self.check(snapshot)
                weights = self._weights(files, snapshot)
                self._get((files[n] for n in weights), snapshot)
                names += weights
            if self.revision != commit:
                ref = self.folder / "refs" / self.revision
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(commit)
            write_json_atomically(record, {"commit": commit, "files": names, "result": result or ""})
        return snapshot / (result or "")

    def get_headers(self, file: str | None, quant: str | None, into: Path) -> Path:
        """See `fetch_headers`."""
        commit, files = self._list()
        if result := self._gguf(files, file, quant):
            for name in all_parts(result):
                self._get_header(files[name], commit, into / Path(name).name)
            return into / Path(result).name
        if "config.json" not in files:
            raise ModelError(f"{self.repo} at {self.endpoint} has no config.json: it is not a model")
        for name in files:
            large = name.startswith(_OF_TOKENIZERS) and "config" not in name
            if _is_description(name) and name.endswith(".json") and "/" not in name and not large:
                size = files[name].size or _MAX_DESCRIPTION
                (into / name).write_bytes(self._part(commit, name, 0, min(size, _MAX_DESCRIPTION) - 1))
        names = self._weights(files, into)
        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(lambda name: self._get_header(files[name], commit, into / name), names))
        return into

    def _get_header(self, file: _File, commit: str, into: Path) -> None:
        get_header(lambda first, last: self._part(commit, file.name, first, last), file.size, into)

    def _part(self, commit: str, name: str, first: int, last: int) -> bytes:
        url = f"{self.endpoint}/{self.repo}/resolve/{commit}/{quote(name)}"
        timeout = _seconds("HF_HUB_DOWNLOAD_TIMEOUT")
        return read_range(url, first, last, headers=self.headers, timeout=timeout)

    def _list(self, timeout: float | None = None) -> tuple[str, dict[str, _File]]:
        """The commit that the revision stands for, and its files by name."""
        url = f"{self.endpoint}/api/models/{self.repo}/revision/{quote(self.revision, safe='')}?blobs=true"
        answer = get_json(url, headers=self.headers, timeout=timeout or _seconds("HF_HUB_ETAG_TIMEOUT"))
        try:
            commit, files = answer["sha"], [_parse(sibling) for sibling in answer["siblings"]]
        except (KeyError, TypeError, AttributeError):
            raise UnreachableError("its answer is not a hub's; is this the hub's address?") from None
        if not _COMMIT.fullmatch(str(commit)):
            raise UnreachableError(f"it names no commit but {commit!r}")
        for file in files:
            if file.name.startswith("/") or ".." in PurePosixPath(file.name).parts or "\\" in file.name:
                raise ModelError(
                    f"{self.repo} has a file called {file.name!r}, which would lie outside its folder; refused"
                )
        return commit, {file.name: file for file in files}

    def _gguf(self, files: Iterable[str], file: str | None, quant: str | None) -> str | None:
        """The .gguf that is meant, if one is, the first of several parts: by name, by quantisation, or because there is
        nothing else."""
        ggufs = sorted(name for name in files if name.endswith(".gguf"))
        listed = ", ".join(ggufs[:12]) + (", ..." if len(ggufs) > 12 else "") if ggufs else "none"
        models = models_of(ggufs)
        if file:
            if file not in ggufs:
                raise ModelError(f"{self.repo} has no file {file!r}; its GGUF files: {listed}")
            return check_whole(models, all_parts(file)[0], self.repo)[0] if len(all_parts(file)) > 1 else file
        if not quant and (not models or any(name.endswith(".safetensors") for name in files)):
            return None
        chosen = quantised_as(models, quant) if quant else [*models]
        if quant and len(chosen) != 1:
            problem = "several files match" if chosen else "no file matches"
            raise ModelError(f"{self.repo}:{quant}: {problem}; name one as {self.repo}/FILE: {listed}")
        if len(chosen) > 1:
            if (default := by_default(chosen)) is None:
                raise ModelError(f"{self.repo} holds several GGUF files; choose one as {self.repo}/FILE: {listed}")
            logger.warning(
                "%s holds several GGUF files: %s is taken; name another as %s/FILE", self.repo, default, self.repo
            )
            chosen = [default]
        return check_whole(models, chosen[0], self.repo)[0]

    def _weights(self, files: dict[str, _File], snapshot: Path) -> list[str]:
        index = "model.safetensors.index.json"
        if index in files:
            names = weight_map_files(snapshot / index)
            if missing := [name for name in names if name not in files]:
                raise ModelError(
                    f"{self.repo} lacks {', '.join(missing[:3])}, which its {index} names; the repository is incomplete"
                )
            return names
        if "model.safetensors" in files:
            return ["model.safetensors"]
        names = [n for n in files if n.endswith(".safetensors") and "/" not in n]
        if names:
            return names
        pickles = [n for n in files if n.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise ModelError(
                f"{self.repo} holds its weights as Python pickles ({', '.join(pickles[:3])}), which can run code when "
                "they are read and are therefore refused; look for a safetensors or GGUF version of the model"
            )
        raise ModelError(f"{self.repo} has no safetensors or GGUF weights")

    def _get(self, files: Iterable[_File], snapshot: Path) -> None:
        missing = [file for file in files if not (snapshot / file.name).exists()]
        if not missing:
            return
        total = sum(file.size or 0 for file in missing)
        self.cache.mkdir(parents=True, exist_ok=True)
        have = sum(_size(self._blob(f)) or _size(self._incomplete(f)) for f in missing)
        free = shutil.disk_usage(self.cache).free
        if total - have > free:
            raise ModelError(
                f"{self.repo} needs {format_bytes(total - have)} more in {self.cache}, which has "
                f"{format_bytes(free)} free; make room, or set HF_HOME or --download-dir to a larger disk"
            )
        what = f"fetching {self.repo}" + (f" ({len(missing)} files)" if len(missing) > 1 else f" {missing[0].name}")
        with Progress(what, total=total, enabled=self.progress) as bar, ThreadPoolExecutor(_WORKERS) as pool:
            jobs = [pool.submit(self._get_one, file, snapshot, bar) for file in missing]
            try:
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                self.stopped = True  # the others end at their next piece
                pool.shutdown(cancel_futures=True)
                raise

    def _get_one(self, file: _File, snapshot: Path, bar: Progress) -> None:
        def advance(count: int) -> None:
            if self.stopped:
                raise InterruptedError
            bar.advance(count)

        target, blob, part = snapshot / file.name, self._blob(file), self._incomplete(file)
        # The lock is where huggingface_hub has it, so that its processes and ours wait for each other.
        with locked(self.cache / ".locks" / self.folder.name / file.blob):
            for path in (blob, target):
                path.parent.mkdir(parents=True, exist_ok=True)
            if blob.exists():
                bar.advance(file.size or 0)
                self._check(file, blob)
            else:
                bar.advance(_size(part))
                url = f"{self.endpoint}/{self.repo}/resolve/{snapshot.name}/{quote(file.name)}"
                timeout = _seconds("HF_HUB_DOWNLOAD_TIMEOUT")
                resume(url, part, file.size, headers=self.headers, timeout=timeout, advance=advance)
                self._check(file, part)
                with open(part, "rb") as done:
                    os.fsync(done.fileno())
                os.replace(part, blob)
            if not target.exists():
                target.unlink(missing_ok=True)  # a link to a blob that is gone
                try:
                    target.symlink_to(os.path.relpath(blob, target.parent))
                except OSError:  # a file system without links
                    os.replace(blob, target)

    def _check(self, file: _File, path: Path) -> None:
        """Delete a file that is not what the hub says it is."""
        expected = file.sha256 or file.git_sha1
        digest = hashlib.sha256()
        if not file.sha256:  # git names a file by the sha1 of its length and content
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with open(path, "rb") as source:
            while piece := source.read(1 << 20):
                digest.update(piece)
        if expected and digest.hexdigest() != expected:
            path.unlink(missing_ok=True)
            raise ModelError(
                f"{file.name} of {self.repo} is damaged (hash {digest.hexdigest()[:12]}..., expected "
                f"{expected[:12]}...) and was deleted; try again"
            )

    def _blob(self, file: _File) -> Path:
        return self.folder / "blobs" / file.blob

    def _incomplete(self, file: _File) -> Path:
        return self.folder / "blobs" / f"{file.blob}.incomplete"

    def _refused(self, error: ResponseError) -> ModelError:
        where = f"{self.repo} at {self.endpoint}"
        if error.code == "GatedRepo" or error.status == 403:
            return ModelError(
                f"{where} is gated (HTTP {error.status}): accept its conditions at {self.endpoint}/{self.repo} and set "
                "HF_TOKEN to a token of that account"
            )
        if error.code == "RevisionNotFound":
            return ModelError(f"{where} has no revision {self.revision!r} (HTTP {error.status}); check --revision")
        if error.status == 401 and self.headers and error.code != "RepoNotFound":
            return ModelError(f"{self.endpoint} refused HF_TOKEN for {self.repo} (HTTP 401): it is wrong or expired")
        if error.status in (401, 404):
            hint = "HF_TOKEN may lack access" if self.headers else "if it is private, set HF_TOKEN"
            near = near_models(self.repo, self.download_dir)
            return ModelError(f"there is no model {where} (HTTP {error.status}): check the name; {hint}{near}")
        return ModelError(f"{self.endpoint} answered HTTP {error.status} for {self.repo} ({error}); try again later")


def _parse(sibling: dict[str, Any]) -> _File:
    lfs = sibling.get("lfs") or {}
    sha256, sha1 = lfs.get("sha256") or lfs.get("oid"), sibling.get("blobId")
    return _File(
        name=str(sibling["rfilename"]),
        size=lfs.get("size", sibling.get("size")),
        sha256=sha256 if re.fullmatch(r"[0-9a-f]{64}", str(sha256)) else None,
        git_sha1=sha1 if re.fullmatch(r"[0-9a-f]{40}", str(sha1)) else None,
    )


def _is_description(name: str) -> bool:
    if "/" in name:
        return any(fnmatch.fnmatch(name, pattern) for pattern in _IN_FOLDERS)
    return any(fnmatch.fnmatch(name, pattern) for pattern in _DESCRIPTION)


def _token() -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return os.environ[name].strip()
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token").read_text().strip() or None
    except OSError:
        return None


def _flag(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _seconds(name: str) -> float:
    try:
        return float(os.environ.get(name) or 10)
    except ValueError:
        return 10.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
