"""Applications that answer with what their framework read from the request.

Run as `apps.py FRAMEWORK`. Prints its port, and exits when its standard input ends.
"""

import os
import socket
import sys
import threading


def seen(route, cookie, header, query, token, basic):
    """What the application would identify the client and the resource by."""
    return {
        "route": route,
        "cookie": cookie,
        "header": header,
        "query": query,
        "token": token,
        "basic": basic,
    }


def flask_app():
    import flask

    app = flask.Flask("app")
    # It logs requests that it cannot read.
    app.logger.disabled = True

    def echo(route):
        authorization = flask.request.authorization
        return seen(
            route,
            flask.request.cookies.get("session_id"),
            flask.request.headers.get("X-User-Id"),
            flask.request.args.get("api_key"),
            authorization and authorization.token,
            authorization and authorization.username and authorization.password
            and f"{authorization.username}:{authorization.password}",
        )

    app.add_url_rule("/limited/x", "limited", lambda: echo("limited"))
    app.add_url_rule("/", "root", lambda: echo("other"))
    app.add_url_rule("/<path:path>", "other", lambda path: echo("other"))
    return app


def django_app():
    import base64
    import django
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import JsonResponse
    from django.urls import path, re_path

    def echo(request, route):
        # As Django REST framework reads it: parts of the header's bytes.
        parts = request.META.get("HTTP_AUTHORIZATION", "").encode("iso-8859-1").split()
        scheme, value = (parts[0].lower(), parts[1]) if len(parts) == 2 else (b"", b"")
        basic = None
        if scheme == b"basic":
            try:
                basic = base64.b64decode(value).decode("latin-1")
            except ValueError:
                pass
        return JsonResponse(
            seen(
                route,
                request.COOKIES.get("session_id"),
                request.headers.get("X-User-Id"),
                request.GET.get("api_key"),
                value.decode("latin-1") if scheme == b"bearer" else None,
                basic,
            )
        )

    urls = type(sys)("urls")
    urls.urlpatterns = [
        path("limited/x", lambda request: echo(request, "limited")),
        re_path("", lambda request: echo(request, "other")),
    ]
    sys.modules["urls"] = urls
    settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF="urls", SECRET_KEY="x", APPEND_SLASH=False)
    django.setup()
    return WSGIHandler()


def fastapi_app():
    from typing import Annotated

    from fastapi import Cookie, Depends, FastAPI, Header, HTTPException, Query, Request
    from fastapi.security import HTTPAuthorizationCredentials, HTTPBasic, HTTPBearer

    app = FastAPI()
    bearer, basic = HTTPBearer(auto_error=False), HTTPBasic(auto_error=False)

    async def read(
        request: Request,
        session_id: Annotated[str | None, Cookie()] = None,
        x_user_id: Annotated[str | None, Header()] = None,
        api_key: Annotated[str | None, Query()] = None,
        token: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None,
    ):
        try:
            user = await basic(request)
        except HTTPException:
            user = None
        credentials = token and token.credentials
        return session_id, x_user_id, api_key, credentials, user and f"{user.username}:{user.password}"

    Seen = Annotated[tuple, Depends(read)]

    @app.get("/limited/x")
    async def limited(values: Seen):
        return seen("limited", *values)

    @app.get("/{path:path}")
    async def other(values: Seen):
        return seen("other", *values)

    return app


def credentials(authorization):
    """Bearer token and user with password of an `Authorization` header."""
    import base64

    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip(), None
    if scheme.lower() != "basic":
        return None, None
    try:
        return None, base64.b64decode(value.strip()).decode("latin-1")
    except ValueError:
        return None, None


def serve_aiohttp(listener):
    from aiohttp import web

    async def echo(request):
        return web.json_response(
            seen(
                request.match_info.route.name,
                request.cookies.get("session_id"),
                request.headers.get("X-User-Id"),
                request.query.get("api_key"),
                *credentials(request.headers.get("Authorization", "")),
            )
        )

    app = web.Application()
    app.router.add_get("/limited/x", echo, name="limited")
    app.router.add_get("/{path:.*}", echo, name="other")
    exit_with_standard_input(lambda: os._exit(0))
    web.run_app(app, sock=listener, print=None)


def serve_tornado(listener):
    import asyncio

    import tornado.httpserver
    import tornado.web

    class Echo(tornado.web.RequestHandler):
        def initialize(self, route):
            self.route = route

        def get(self):
            headers = self.request.headers
            self.write(
                seen(
                    self.route,
                    self.get_cookie("session_id"),
                    headers.get("X-User-Id"),
                    self.get_query_argument("api_key", None),
                    *credentials(headers.get("Authorization", "")),
                )
            )

    async def serve():
        routes = [("/limited/x", Echo, {"route": "limited"}), (".*", Echo, {"route": "other"})]
        app = tornado.web.Application(routes, log_function=lambda _: None)
        listener.setblocking(False)
        tornado.httpserver.HTTPServer(app).add_socket(listener)
        await asyncio.Event().wait()

    exit_with_standard_input(lambda: os._exit(0))
    asyncio.run(serve())


def serve_php(listener):
    """The server of PHP takes over no listener, so it gets the port of this one."""
    import subprocess
    import time

    port = listener.getsockname()[1]
    listener.close()
    router = os.path.join(os.path.dirname(__file__), "app.php")
    server = subprocess.Popen(
        ["php", "-q", "-S", f"127.0.0.1:{port}", router],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "PHP_CLI_SERVER_WORKERS": "1"},
    )
    while server.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    print(port, flush=True)
    while os.read(0, 1024):
        pass
    server.terminate()
    server.wait()


def exit_with_standard_input(stop):
    def wait():
        while os.read(0, 1024):
            pass
        stop()

    threading.Thread(target=wait, daemon=True).start()


def serve_wsgi(app, listener):
    from gunicorn.app.base import BaseApplication

    class Server(BaseApplication):
        def load_config(self):
            self.cfg.set("bind", f"fd://{listener.fileno()}")
            self.cfg.set("worker_class", "gthread")
            self.cfg.set("threads", 4)
            self.cfg.set("loglevel", "error")
            self.cfg.set(
                "when_ready",
                lambda _: exit_with_standard_input(lambda: os.kill(os.getpid(), 15)),
            )

        def load(self):
            return app

    Server().run()


def serve_asgi(app, listener):
    import uvicorn

    exit_with_standard_input(lambda: os._exit(0))
    config = uvicorn.Config(app, log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


framework = sys.argv[1]
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(128)
# gunicorn takes the listener over by its number.
listener.set_inheritable(True)
if framework == "php":
    serve_php(listener)
    sys.exit()
print(listener.getsockname()[1], flush=True)
if framework == "fastapi":
    serve_asgi(fastapi_app(), listener)
elif framework == "aiohttp":
    serve_aiohttp(listener)
elif framework == "tornado":
    serve_tornado(listener)
else:
    serve_wsgi({"flask": flask_app, "django": django_app}[framework](), listener)
