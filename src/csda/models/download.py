"""Download weights, check their SHA-256, and move them into the cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from csda.errors import CsdaError
from csda.folders import default_cache

TIMEOUT = 30.0
"""Timeout of the server in seconds."""

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Download:
    """A file on its publisher's server."""

    address: str
    digest: str
    """The published first digits of its SHA-256."""

    @property
    def path(self) -> Path:
        """Its path in the cache."""
        return default_cache() / "weights" / self.address.rpartition("/")[2]

    def matches(self, path: Path) -> bool:
        """Whether a file has the published digest."""
        digest = sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest().startswith(self.digest)


def fetch(download: Download, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """The file in the cache, downloaded if it is missing or damaged; `progress(done, total)` counts bytes.

    The download has a temporary name until it is complete and has the published SHA-256.
    """
    path = download.path
    try:
        if path.is_file() and download.matches(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise CsdaError(
            f"{path}: {(error.strerror or str(error)).lower()}; make it writable, or name another folder in CSDA_CACHE"
        ) from None
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file, urlopen(download.address, timeout=TIMEOUT) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            digest, done = sha256(), 0
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
        if done < total:
            raise _broken(download, f"the connection ended after {done:,} of {total:,} bytes")
        if not digest.hexdigest().startswith(download.digest):
            found = digest.hexdigest()[: len(download.digest)]
            raise _broken(download, f"its SHA-256 begins with {found}, not with the published {download.digest}")
        partial.chmod(0o644)
        partial.replace(path)
    except HTTPError as error:
        error.close()
        raise _broken(download, f"the server answered {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise _broken(download, f"cannot be fetched ({getattr(reason, 'strerror', None) or reason})") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def _broken(download: Download, problem: str) -> CsdaError:
    return CsdaError(
        f"{download.address}: {problem}; nothing was kept: try again, or download it by other means and put it at "
        f"{download.path}, or give it with weights=FILE"
    )
