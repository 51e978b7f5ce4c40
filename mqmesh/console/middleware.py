"""Gate of the console: admits requests, and puts the headers on every answer."""

import base64
import binascii
import hashlib
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode, urlsplit

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqmesh.clock import Clock
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.json_answers import encode_json
from mqmesh.console.sessions import LoginLimit, Session, Sessions, new_session
from mqmesh.console.users import ConsoleUser, Users, is_password
from mqmesh.hosts import LOOPBACK_NAMES
from mqmesh.units import MIB

API: Final = "/api/v1"
MAX_BODY_BYTES: Final = MIB
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'self'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
OPEN_PATHS: Final = ("/static/", "/login", "/healthz")
"""Paths that need no session."""
_KEY: Final = "mqmesh.console.incoming"


class Incoming(msgspec.Struct, kw_only=True):
    """A request, as the gate has admitted it.

    Attributes:
        base: Path in front of all of the console's own: of the proxy.
        cluster: Name of the cluster; "" for the console's own one.
        address: Of the browser.
        is_secure: It came by TLS.
        is_api: It is for JSON.
        cookie_name: Of the session.
        cookie: Value of the session's cookie, "" for none.
        session: None where no session is needed, and there is none.
    """

    base: str
    cluster: str
    address: str
    is_secure: bool
    is_api: bool
    cookie_name: str
    cookie: str = ""
    session: Session | None = None

    @staticmethod
    def of(request: Request) -> "Incoming":
        """Return the gate's data of a request."""
        incoming: Incoming = request.scope[_KEY]
        return incoming

    def url(self, path: str) -> str:
        """Return a path of the console as browsers ask for it, in the same cluster."""
        return self.base + (f"/@{self.cluster}" if self.cluster else "") + path

    def set_cookie(self, response: Response, cookie: str) -> None:
        """Have the browser keep a session's cookie until it is closed."""
        response.set_cookie(
            self.cookie_name,
            cookie,
            path=f"{self.base}/",
            httponly=True,
            samesite="strict",
            secure=self.is_secure,
        )


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Gate:
    """ASGI middleware in front of all endpoints.

    It refuses unknown hosts, foreign origins, large bodies and too many requests, finds the
    session, and sends those without one to the login.

    Args:
        app: Endpoints.
        config: Settings.
        clock: Source of time.
        users: Users that may log in; None where no login is needed.
        sessions: Sessions of browsers.
        limit: Limit of wrong passwords.
        clusters: Names of all clusters.
        is_secure: The console itself is served by TLS.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ConsoleConfig,
        clock: Clock,
        users: Users | None,
        sessions: Sessions,
        limit: LoginLimit,
        clusters: frozenset[str],
        is_secure: bool,
    ) -> None:
        self._app = app
        self._config = config
        self._clock = clock
        self._users = users
        self._sessions = sessions
        self._limit = limit
        self._clusters = clusters
        self._is_secure = is_secure
        self._hosts = LOOPBACK_NAMES | {"127.0.0.1", "::1", config.listen_host, *config.hosts}
        # Programs that log in with each request: sessions by the digest of their credentials.
        self._programs: dict[bytes, Session] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        incoming = self._incoming(scope, headers)
        scope[_KEY] = incoming
        new_cookie = ""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_headers(scope, MutableHeaders(scope=message))
                if new_cookie:
                    carrier = Response()
                    incoming.set_cookie(carrier, new_cookie)
                    answer_headers = MutableHeaders(scope=message)
                    answer_headers.append("set-cookie", carrier.headers["set-cookie"])
                    if "hx-request" in headers:
                        answer_headers["HX-Refresh"] = (
                            "true"  # its page has the token of a former session
                        )
            await send(message)

        try:
            self._check_request(scope, headers, incoming)
            new_cookie = await self._find_session(scope, headers, incoming)
            limited = _Limited(receive)
            await self._app(scope, limited, send_with_headers)
        except _Refused as refused:
            answer = self._refusal(scope, headers, incoming, refused)
            await answer(scope, receive, send_with_headers)

    def _incoming(self, scope: Scope, headers: Headers) -> Incoming:
        client = scope.get("client")
        address, is_secure = (client[0] if client else ""), self._is_secure
        if address in self._config.trusted_proxies:
            address = headers.get("x-forwarded-for", address).rpartition(",")[2].strip()
            is_secure = headers.get("x-forwarded-proto", "") == "https" or is_secure
        path, cluster = scope["path"], ""
        base = self._config.base_path
        if base and (path + "/").startswith(base + "/"):
            path = path[len(base) :] or "/"
        if path.startswith("/@"):
            cluster, _, rest = path[2:].partition("/")
            path = f"/{rest}"
        scope["path"], scope["root_path"] = path, ""
        return Incoming(
            base=base,
            cluster=cluster,
            address=address,
            is_secure=is_secure,
            is_api=path.startswith(API + "/"),
            cookie_name=f"mqmesh_console_{self._config.listen_port}",
        )

    def _check_request(self, scope: Scope, headers: Headers, incoming: Incoming) -> None:
        if incoming.cluster and incoming.cluster not in self._clusters:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such cluster")
        host = headers.get("host", "")
        if scope["client"] and scope["client"][0] in self._config.trusted_proxies:
            host = headers.get("x-forwarded-host", host)
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in self._hosts:
            raise _Refused(
                HTTPStatus.BAD_REQUEST,
                f"this console is not called {host[:80]!r}; the setting hosts has further names",
            )
        if scope["method"] in ("GET", "HEAD"):
            return
        # Without a referrer, forms of our own pages have the origin "null".
        origin, site = headers.get("origin", "null"), headers.get("sec-fetch-site", "same-origin")
        is_ours = site in ("same-origin", "none")
        if not is_ours or (origin != "null" and urlsplit(origin).netloc != host):
            raise _Refused(HTTPStatus.FORBIDDEN, "this request comes from another site")
        if int(headers.get("content-length", "0") or 0) > MAX_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes")

    async def _find_session(self, scope: Scope, headers: Headers, incoming: Incoming) -> str:
        """Find or begin a session; returns the cookie of one that was begun."""
        new_cookie = ""
        cookies = cookie_parser(headers.get("cookie", ""))
        incoming.cookie = cookies.get(incoming.cookie_name, "")
        incoming.session = self._sessions.find(incoming.cookie) if incoming.cookie else None
        if incoming.session is not None and not self._is_known(incoming.session):
            self._sessions.end(incoming.cookie)
            incoming.session = None
        is_open = scope["path"].startswith(OPEN_PATHS)
        if incoming.session is None and not is_open:
            if self._users is None:
                everybody = ConsoleUser("", self._config.credentials)
                if incoming.is_api:
                    incoming.session = new_session(everybody, self._clock.monotonic_ms())
                else:
                    new_cookie, incoming.session = self._sessions.begin(everybody)
            elif incoming.is_api and "authorization" in headers:
                incoming.session = await self._program(headers["authorization"], incoming)
            else:
                raise _Refused(HTTPStatus.UNAUTHORIZED, "log in first")
        session = incoming.session
        if session is not None:
            if not session.admits(self._clock.monotonic_ms()) and not is_open:
                raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, "more than 100 requests a second")
            _check_program(scope, headers, incoming)
        return new_cookie

    def _is_known(self, session: Session) -> bool:
        """Return False if the user of a session may log in no more, or acts by other keys."""
        if self._users is None:
            return True
        user = self._users.find(session.user.name)
        return user is not None and user.credentials == session.user.credentials

    async def _program(self, authorization: str, incoming: Incoming) -> Session:
        digest = hashlib.sha256(authorization.encode()).digest()
        session = self._programs.get(digest)
        now_ms = self._clock.monotonic_ms()
        if session is not None and now_ms - session.began_ms < 60_000:
            return session
        assert self._users is not None
        name, password = _basic(authorization)
        if not self._limit.admits(name, incoming.address):
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, "too many wrong passwords; wait a minute")
        user = self._users.find(name)
        if not await run_in_threadpool(is_password, user, password) or user is None:
            self._limit.note_failure(name, incoming.address)
            raise _Refused(HTTPStatus.UNAUTHORIZED, "user or password is wrong")
        session = new_session(ConsoleUser(user.name, user.credentials), now_ms)
        if len(self._programs) >= 1_000:
            self._programs.clear()
        self._programs[digest] = session
        return session

    def _add_headers(self, scope: Scope, headers: MutableHeaders) -> None:
        for name, value in HEADERS.items():
            headers[name] = value
        if not scope["path"].startswith("/static/"):
            headers["Cache-Control"] = "no-store"

    def _refusal(
        self, scope: Scope, headers: Headers, incoming: Incoming, refused: _Refused
    ) -> Response:
        is_unknown = refused.status is HTTPStatus.UNAUTHORIZED
        if incoming.is_api:
            body = encode_json({"error": str(refused), "kind": refused.status.phrase})
            more = {"WWW-Authenticate": 'Basic realm="mqmesh"'} if is_unknown else {}
            return Response(body, refused.status, more, media_type="application/json")
        if is_unknown and "hx-request" not in headers:
            path = scope["path"]
            query = scope["query_string"].decode("latin-1")
            back = incoming.url(path) + (f"?{query}" if query else "")
            where = f"{incoming.base}/login?{urlencode({'next': back})}"
            return RedirectResponse(where, HTTPStatus.SEE_OTHER)
        more = {"HX-Redirect": f"{incoming.base}/login"} if is_unknown else {}
        return Response(f"{refused}\n", refused.status, more, media_type="text/plain")


def _check_program(scope: Scope, headers: Headers, incoming: Incoming) -> None:
    """Refuse a change by the API that another site's page could have a browser send.

    A form of another site cannot name the type of JSON.
    """
    if incoming.is_api and scope["method"] == "POST":
        if headers.get("content-type", "").partition(";")[0] != "application/json":
            raise _Refused(HTTPStatus.FORBIDDEN, "send Content-Type: application/json")


class _Limited:
    """Receiver of a body that is no longer than allowed, however it is sent."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._room = MAX_BODY_BYTES

    async def __call__(self) -> Message:
        message = await self._receive()
        self._room -= len(message.get("body", b""))
        if self._room < 0:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes")
        return message


def _basic(authorization: str) -> tuple[str, str]:
    kind, _, value = authorization.partition(" ")
    try:
        text = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = ""
    name, colon, password = text.partition(":")
    if kind.lower() != "basic" or not colon:
        raise _Refused(HTTPStatus.UNAUTHORIZED, "log in by HTTP basic: user and password")
    return name, password
