"""Which requests are accepted: the checks before every request, and the headers of every response.

A page on another site can make a browser send requests to this machine. It cannot choose the Host header, cannot send a
header of its own unless this server allows it, and does not know the token.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "csda-review"
HEADER = "x-csda-review"
"""Required in every request that changes something."""

MOST_BYTES = 64 * 2**20
"""Largest size of a request, such as an image that is dropped on the page."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "x-frame-options": "DENY",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str) -> frozenset[str]:
    """Host names that are accepted if the page is served at `host`."""
    names = {"127.0.0.1", "localhost", "[::1]"}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), _bracketed(host)}
        if host in ("0.0.0.0", "::"):
            names |= _own_addresses()
    return frozenset(names - {"0.0.0.0", "[::]", ""})


def _own_addresses() -> set[str]:
    found = set()
    for name in (socket.gethostname(), socket.getfqdn()):
        try:
            found |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        except OSError:
            continue
    try:
        # Sends nothing: connecting a UDP socket only selects the address of this machine.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            found.add(probe.getsockname()[0])
    except OSError:
        pass
    return {_bracketed(address.partition("%")[0]) for address in found}


def _bracketed(host: str) -> str:
    return f"[{host.lower()}]" if ":" in host else host.lower()


class Guard:
    """Wraps an application. Refused requests never reach it."""

    def __init__(self, app: App, hosts: frozenset[str], token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in present]
                if b"cache-control" not in present:
                    extra.append((b"cache-control", b"no-store"))
                if self.token is not None and self._given_in_address(scope) is not None:
                    cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                    extra.append((b"set-cookie", cookie.encode()))
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await self.app(scope, _bounded(receive), sent)

    def _refusal(self, scope: Scope, headers: dict[str, list[str]]) -> tuple[int, str] | None:
        host = headers.get("host", [])
        if len(host) != 1 or _name(host[0]) not in self.hosts:
            return 421, "the request is for another host; open the address that `csda review` printed"
        if self.token is not None and not self._has_token(scope, headers):
            return 401, "the token is missing or wrong; open the address that `csda review` printed"
        for origin in headers.get("origin", []):
            if origin != f"{scope['scheme']}://{host[0]}":
                return 403, "asked for by a page of another site"
        for site in headers.get("sec-fetch-site", []):
            if site not in ("same-origin", "none") and scope["path"] != "/":
                return 403, "asked for by a page of another site"
        if scope["method"] not in ("GET", "HEAD") and HEADER not in headers:
            return 403, f"requests that change something need the header {HEADER}"
        length = headers.get("content-length", ["0"])[0]
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            return 413, "the request is too large"
        return None

    def _has_token(self, scope: Scope, headers: dict[str, list[str]]) -> bool:
        given = [value.removeprefix("Bearer ") for value in headers.get("authorization", [])]
        for text in headers.get("cookie", []):
            try:
                cookies = SimpleCookie(text)
            except CookieError:
                continue
            if COOKIE in cookies:
                given.append(cookies[COOKIE].value)
        in_address = self._given_in_address(scope)
        given += [] if in_address is None else [in_address]
        assert self.token is not None
        return any(secrets.compare_digest(each.encode(), self.token.encode()) for each in given)

    def _given_in_address(self, scope: Scope) -> str | None:
        """The token in the address of a request, which is accepted only for the page itself."""
        if scope["path"] != "/":
            return None
        values = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return values[0] if len(values) == 1 else None


def _name(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() and not name.endswith(":") else host.lower()


def _bounded(receive: Receive) -> Receive:
    """Also limit bodies without a stated length."""
    seen = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MOST_BYTES:
            return {"type": "http.disconnect"}
        return message

    return bounded


async def _answer(send: Send, status: int, sentence: str) -> None:
    import json

    body = json.dumps({"detail": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
