"""The console as an ASGI application: routes, pages, actions, JSON twins."""

import datetime
import hashlib
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount
from starlette.routing import Route as Endpoint
from starlette.staticfiles import StaticFiles

import mqmesh.console.pages as all_pages
from mqmesh.clock import Clock
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.forms import checks_of, filled, form_fields, read_arguments
from mqmesh.console.json_answers import encode_json, status_of
from mqmesh.console.middleware import API, Gate, Incoming
from mqmesh.console.page import (
    ActionPlan,
    ActionResult,
    ConsoleAction,
    ConsoleDownload,
    ConsolePage,
    Route,
    Visit,
)
from mqmesh.console.rendering import again_link, has_block, render
from mqmesh.console.sessions import LoginLimit, Sessions
from mqmesh.console.shared_answers import SharedAnswers
from mqmesh.console.users import ConsoleUser, Users, is_password
from mqmesh.console.watched_cluster import WatchedCluster
from mqmesh.errors import InvalidArgument, MQMeshError, NoPermission
from mqmesh.protocol.commands import Right
from mqmesh.version import VERSION

NAVIGATION: Final = (
    "/",
    "/topics",
    "/groups",
    "/messages",
    "/tables",
    "/dead-letters",
    "/delayed",
    "/transactions",
    "/clients",
    "/cluster",
    "/access",
    "/archive",
    "/api",
    "/about",
)
"""Order of the entries; pages that are not there yet are left out."""
MAX_FIELDS: Final = 1_000

_STATIC: Final = Path(__file__).parent / "static"


def find_routes() -> list[Route]:
    """Return the routes of all modules in ``pages/``, by the modules' names.

    Longer paths come first, so that ``/topics/new`` is not taken for a topic named "new".
    """
    found: list[Route] = []
    for module in pkgutil.iter_modules(all_pages.__path__):
        loaded = importlib.import_module(f"{all_pages.__name__}.{module.name}")
        found += loaded.ROUTES
    return sorted(found, key=lambda one: ("{" in one.path, -one.path.count("/")))


class Console:
    """All endpoints.

    Args:
        config: Settings.
        clock: Source of time.
        users: Users that may log in; None where no login is needed.
        clusters: By name; "" is the console's own one.
        is_secure: It is served by TLS.
        health: Answers whether name servers answer, in a thread.
        routes: Pages, actions and downloads; all that there are by default.
    """

    def __init__(
        self,
        config: ConsoleConfig,
        clock: Clock,
        users: Users | None,
        clusters: Mapping[str, WatchedCluster],
        *,
        is_secure: bool = False,
        health: Callable[[], tuple[bool, bytes]] | None = None,
        routes: Sequence[Route] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._users = users
        self._clusters = clusters
        self._health = health or (lambda: (True, b"{}"))
        self._answers = SharedAnswers(clock, config.refresh_ms * 3 // 4)
        self._limit = LoginLimit(clock)
        self._sessions = Sessions(clock)
        self.routes = list(find_routes() if routes is None else routes)
        pages = {one.path: one for one in self.routes if isinstance(one, ConsolePage)}
        self._navigation = [pages[path] for path in NAVIGATION if path in pages]
        self.app = Starlette(
            routes=[*self._endpoints()],
            middleware=[
                Middleware(
                    Gate,
                    config=config,
                    clock=clock,
                    users=users,
                    sessions=self._sessions,
                    limit=self._limit,
                    clusters=frozenset(clusters),
                    is_secure=is_secure,
                )
            ],
            exception_handlers={
                MQMeshError: self._on_error,
                404: self._on_error,
                405: self._on_error,
                500: self._on_error,
            },
        )

    def _endpoints(self) -> list[Endpoint | Mount]:
        found: list[Endpoint | Mount] = [
            Mount("/static", StaticFiles(directory=_STATIC), name="static"),
            Endpoint("/healthz", self._on_health),
            Endpoint("/login", self._on_login, methods=["GET", "POST"]),
            Endpoint("/logout", self._on_logout, methods=["POST"]),
        ]
        for one in self.routes:
            if isinstance(one, ConsolePage):
                if one.template:
                    found.append(Endpoint(one.path, self._page(one)))
                path = "/overview" if one.path == "/" else one.path
                found.append(Endpoint(API + path, self._twin(one)))
            elif isinstance(one, ConsoleAction):
                found.append(Endpoint(one.path, self._action(one), methods=["GET", "POST"]))
                found.append(Endpoint(API + one.path, self._act_by_json(one), methods=["POST"]))
            elif isinstance(one, ConsoleDownload):
                found.append(Endpoint(one.path, self._download(one)))
                found.append(Endpoint(API + one.path, self._download(one)))
        return found

    # ---- Pages -------------------------------------------------------------------------

    def _page(self, page: ConsolePage) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            arguments = _arguments(request, page)
            visit = await self._visit(request)
            values = self._values(request, visit, page)
            is_tick = _target(request) == "live"
            if is_tick and not has_block(page.template, "live"):
                return self._live(request, "", values)  # nothing but the state in its header
            result = await self._result(request, visit, page, arguments)
            again = partial(again_link, values["here"], arguments, frozenset(request.path_params))
            values |= {"arguments": arguments, "result": result, "again": again}
            if is_tick:
                return self._live(request, page.template, values)
            return HTMLResponse(render(page.template, values))

        return answer

    def _live(self, request: Request, template: str, values: dict[str, Any]) -> Response:
        """Answer a tick of the page: only if something has changed, see static/live.js."""
        html = render(template, values, "live") if template else ""
        html += render("state.html", values)
        digest = hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=12).hexdigest()
        if request.headers.get("x-seen") == digest:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        return HTMLResponse(html, headers={"X-Digest": digest})

    def _twin(self, page: ConsolePage) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            arguments = _arguments(request, page)
            visit = await self._visit(request)
            return _json(await self._result(request, visit, page, arguments))

        return answer

    async def _result(
        self, request: Request, visit: Visit, page: ConsolePage, arguments: msgspec.Struct
    ) -> Any:
        if page.needs_view and not visit.sees_all:
            raise NoPermission("your user may not see the whole cluster: it needs the role view")
        key = (visit.user, visit.cluster, page.path, msgspec.json.encode(arguments))
        return await self._answers.get(key, lambda: page.query(visit, arguments))

    async def _visit(self, request: Request) -> Visit:
        incoming = Incoming.of(request)
        cluster = self._clusters[incoming.cluster]
        assert incoming.session is not None
        visit = await cluster.visit(incoming.session.user, self._config, self._today())
        return msgspec.structs.replace(visit, routes=self.routes)

    def _today(self) -> datetime.date:
        return datetime.datetime.fromtimestamp(self._clock.wall_ms() / 1_000, datetime.UTC).date()

    def _values(self, request: Request, visit: Visit | None, route: Route | None) -> dict[str, Any]:
        incoming = Incoming.of(request)
        path = getattr(route, "menu", "") or (route.path if route else "")

        def may(right: str, topic: str = "", group: str = "") -> bool:
            allowed = visit is None or visit.rights.may(Right[right], topic, group)
            return allowed and not (self._config.read_only and right.startswith("ADMIN"))

        return {
            "route": route,
            "title": route.title.format(**request.path_params) if route else "",
            "visit": visit,
            "view": None if visit is None else visit.view,
            "user": incoming.session.user if incoming.session else None,
            "csrf": incoming.session.csrf if incoming.session else "",
            "url": incoming.url,
            "static": lambda name: f"{incoming.base}/static/{name}?v={VERSION}",
            "here": incoming.url(request.url.path),
            "menu": "/" + path.split("/")[1] if path else "",
            "navigation": self._navigation,
            "clusters": sorted(self._clusters),
            "cluster": incoming.cluster,
            "base": incoming.base,
            "has_login": self._users is not None,
            "read_only": self._config.read_only,
            "config": self._config,
            "refresh_ms": self._config.refresh_ms,
            "now_ms": self._clock.wall_ms(),
            "may": may,
        }

    # ---- Actions -----------------------------------------------------------------------

    def _action(self, action: ConsoleAction) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self._check_writable()
            visit = await self._visit(request)
            values = self._values(request, visit, action) | {
                "action": action,
                "problem": "",
                "status": HTTPStatus.OK,
            }
            fixed = {key: str(value) for key, value in request.path_params.items()}
            if request.method == "GET":
                step = await self._begin(request, visit, action, fixed)
            else:
                step = await self._go_on(request, visit, action, fixed)
            values |= {"fixed": fixed, "fields": [], "sent": {}} | step
            block = "content" if _target(request) == "dialog" else ""
            template = action.template or "action.html"
            html = render(template, values, block)
            return HTMLResponse(html, values["status"])

        return answer

    async def _begin(
        self, request: Request, visit: Visit, action: ConsoleAction, fixed: dict[str, str]
    ) -> dict[str, Any]:
        given = await self._given(visit, action, fixed, dict(request.query_params))
        fields = form_fields(action.arguments, given, fixed)
        if fields:
            return {"step": "form", "fields": fields}
        plan = await action.plan(visit, read_arguments(action.arguments, fixed))
        return {"step": "plan", "plan": plan}

    async def _given(
        self, visit: Visit, action: ConsoleAction, fixed: dict[str, str], sent: dict[str, str]
    ) -> dict[str, Any]:
        """Return the values of a form: those that were sent, else the initial ones."""
        initial = {} if action.initial is None else await action.initial(visit, fixed)
        return filled(initial, sent)

    async def _go_on(
        self, request: Request, visit: Visit, action: ConsoleAction, fixed: dict[str, str]
    ) -> dict[str, Any]:
        form = await _form(request)
        step, typed = form.pop("step", "plan"), form.pop("typed", "")
        sent = {key: value for key, value in form.items() if key != "csrf"}
        boxes = dict.fromkeys(checks_of(action.arguments), "false")
        try:
            arguments = read_arguments(action.arguments, boxes | sent | fixed)
            plan = await action.plan(visit, arguments)
            if step != "do" or not plan.possible:
                return {"step": "plan", "plan": plan, "sent": sent}
            _check_typed(plan, typed)
            return {"step": "result", "outcome": await self._do(action, visit, arguments)}
        except MQMeshError as error:
            given = await self._given(visit, action, fixed, boxes | sent)
            fields = form_fields(action.arguments, given, fixed)
            status, sentence = status_of(error)
            return {"step": "form", "fields": fields, "problem": sentence, "status": status}

    def _act_by_json(self, action: ConsoleAction) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self._check_writable()
            body = await request.body()
            try:
                sent = msgspec.json.decode(body or b"{}", type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise InvalidArgument(f"the body is no JSON object: {error}") from error
            typed, is_plan = str(sent.pop("confirm", "")), bool(sent.pop("dry_run", False))
            given = {key: _text(value) for key, value in sent.items()}
            arguments = read_arguments(action.arguments, given | dict(request.path_params))
            visit = await self._visit(request)
            plan = await action.plan(visit, arguments)
            if is_plan or not plan.possible:
                return _json(plan)
            _check_typed(plan, typed)
            return _json(await self._do(action, visit, arguments))

        return answer

    async def _do(
        self, action: ConsoleAction, visit: Visit, arguments: msgspec.Struct
    ) -> ActionResult:
        try:
            return await action.do(visit, arguments)
        finally:
            self._answers.forget()  # the next page shows the result

    def _check_writable(self) -> None:
        if self._config.read_only:
            raise NoPermission("this console only shows: read_only is set in its settings")

    def _download(self, download: ConsoleDownload) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            arguments = _arguments(request, download)
            visit = await self._visit(request)
            parts = download.content(visit, arguments)
            # An error before the first part is still an answer of its own.
            first = await anext(parts, b"")

            async def content() -> Any:
                yield first
                async for part in parts:
                    yield part

            disposition = f'attachment; filename="{quote(download.filename)}"'
            return StreamingResponse(
                content(),
                media_type="application/octet-stream",
                headers={"Content-Disposition": disposition},
            )

        return answer

    # ---- Login, health, errors ---------------------------------------------------------

    async def _on_login(self, request: Request) -> Response:
        incoming = Incoming.of(request)
        if self._users is None:
            return RedirectResponse(incoming.url("/"), HTTPStatus.SEE_OTHER)
        problem, name = "", ""
        if request.method == "POST":
            form = await _form(request, checks_csrf=False)
            name = form.get("name", "")
            if not self._limit.admits(name, incoming.address):
                problem = "too many wrong passwords; wait a minute"
            else:
                user = self._users.find(name)
                good = await run_in_threadpool(is_password, user, form.get("password", ""))
                if good and user is not None:
                    cookie, _ = self._sessions.begin(ConsoleUser(user.name, user.credentials))
                    answer = RedirectResponse(_next(incoming, form), HTTPStatus.SEE_OTHER)
                    incoming.set_cookie(answer, cookie)
                    return answer
                self._limit.note_failure(name, incoming.address)
                problem = "user or password is wrong"
        values = self._values(request, None, None) | {
            "title": "Log in",
            "problem": problem,
            "name": name,
            "next": request.query_params.get("next", ""),
        }
        status = HTTPStatus.UNAUTHORIZED if problem else HTTPStatus.OK
        return HTMLResponse(render("login.html", values), status)

    async def _on_logout(self, request: Request) -> Response:
        incoming = Incoming.of(request)
        await _form(request)
        self._sessions.end(incoming.cookie)
        return RedirectResponse(incoming.url("/login"), HTTPStatus.SEE_OTHER)

    async def _on_health(self, request: Request) -> Response:
        answers, body = await run_in_threadpool(self._health)
        status = HTTPStatus.OK if answers else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(body, status, media_type="application/json")

    async def _on_error(self, request: Request, error: Exception) -> Response:
        status, sentence = status_of(error)
        incoming = Incoming.of(request)
        headers = {"Mqmesh-Problem": quote(sentence[:300])}
        if incoming.is_api:
            return _json({"error": sentence, "kind": type(error).__name__}, status, headers)
        visit = None
        if incoming.session is not None:
            try:
                visit = await self._visit(request)
            except MQMeshError:
                visit = None  # the cluster does not answer, which the sentence says
        values = self._values(request, visit, None) | {
            "title": HTTPStatus(status).phrase,
            "problem": sentence,
            "status": int(status),
        }
        if _target(request) == "live":
            html = "" if visit is None else render("state.html", values)
            return HTMLResponse(html, status, headers | {"HX-Reswap": "none"})
        block = "content" if _target(request) == "dialog" else ""
        return HTMLResponse(render("error.html", values, block), status, headers)


async def _form(request: Request, *, checks_csrf: bool = True) -> dict[str, str]:
    """Read a form; a field that it has several times becomes one text, with commas between.

    Raises:
        NoPermission: It lacks the session's token.
    """
    form = await request.form(max_files=0, max_fields=MAX_FIELDS)
    sent = {key: ",".join(map(str, form.getlist(key))) for key in form}
    session = Incoming.of(request).session
    if checks_csrf and (session is None or not session.is_csrf(sent.get("csrf", ""))):
        raise NoPermission("this form is not of your session; load the page again")
    return sent


def _arguments(request: Request, route: Route) -> msgspec.Struct:
    given = dict(request.query_params) | {k: str(v) for k, v in request.path_params.items()}
    return read_arguments(route.arguments, given)


def _check_typed(plan: ActionPlan, typed: str) -> None:
    if plan.typed and typed != plan.typed:
        raise InvalidArgument(f"type {plan.typed!r} to confirm it")


def _target(request: Request) -> str:
    return request.headers.get("hx-target", "") if "hx-request" in request.headers else ""


def _next(incoming: Incoming, form: Mapping[str, str]) -> str:
    """Return the page to show after a login: always one of this console, even in a forged form."""
    wanted = form.get("next", "")
    is_ours = wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    return wanted if is_ours and wanted.isprintable() else incoming.url("/")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _json(
    value: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode_json(value), status, headers, media_type="application/json")
