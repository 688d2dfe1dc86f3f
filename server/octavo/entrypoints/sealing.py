"""Thoughts that travel with their client: sealed when an answer is sent, opened when the client sends it back.

Clients keep what an API gives them for that: Anthropic's `signature` of a thinking block, OpenAI's `encrypted_content`.
So thoughts that a client does not show come back, after a restart and at every replica, and nothing is kept here.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import zlib
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from octavo.interface.engine_config import EngineConfig

_MARK = "octavo1."  # before each seal; another number is another way to make them
_MAX_SEALED, _MAX_TEXT = 8 << 20, 32 << 20  # characters, bytes


class Seal:
    """Seals and opens texts: compressed, then encrypted by AES-SIV. Equal texts have equal seals.

    ``secret``: bytes of any length that all replicas share.
    """

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESSIV(hmac.digest(b"octavo thoughts", secret, hashlib.sha512))

    def close(self, text: str) -> str:
        """The seal of a text; '' for one that is too long to be opened again."""
        sealed = self._cipher.encrypt(zlib.compress(text.encode("utf-8", "surrogatepass")), None)
        found = _MARK + base64.urlsafe_b64encode(sealed).decode()
        return found if len(found) <= _MAX_SEALED else ""

    def open(self, sealed: str | None) -> str:
        """The text of a seal; '' where it is not ours: of another server, another key, changed, or too large."""
        if sealed is None or not sealed.startswith(_MARK) or len(sealed) > _MAX_SEALED:
            return ""
        try:
            packed = self._cipher.decrypt(base64.b64decode(sealed[len(_MARK) :], b"-_", validate=True), None)
            unpacking = zlib.decompressobj()  # no more than fits: whoever knows the model can make seals of its key
            text = unpacking.decompress(packed, _MAX_TEXT)
            return text.decode("utf-8", "surrogatepass") if unpacking.eof else ""
        except (InvalidTag, ValueError, zlib.error):
            return ""


def secret_of(config: EngineConfig) -> bytes:
    """The secret of a server without --seal-key: of the model alone, so that its replicas open each other's seals, and
    those made before a restart. It keeps texts opaque, not secret."""
    files = [[Path(path).name, os.path.getsize(path)] for path in config.model.files.weights]
    return json.dumps([config.model.hf_config, files], sort_keys=True, default=str).encode()
