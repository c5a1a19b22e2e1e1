# SPDX-License-Identifier: Apache-2.0
"""What happens to every HTTP request before its endpoint: an id, and the check of its key."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_spmd.serve.fields import ApiError

OPEN_PATHS = ("/health", "/ready", "/metrics")
"""What probes and scrapers read; these need no key."""


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


class RequestId:
    """Every answer carries an X-Request-Id: the caller's, or one made here. The answer's `id` and the log have it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id")
        request_id = given if given and re.fullmatch(rb"[!-~]{1,128}", given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id.decode()
        if given is not None and given != request_id:
            shown = given.decode("latin-1")[:128]
            error = ApiError(400, f"X-Request-Id is {shown!r}, it must be 1 to 128 ASCII characters without blanks")
            return await error_response(error)(scope, receive, send_with_id)
        await self.app(scope, receive, send_with_id)


class ApiKeys:
    """Only who has a key comes in."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN_PATHS:
            scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # Every key is compared in full: how long it takes tells nothing.
            if sum([hmac.compare_digest(key.strip(), own) for own in self.keys]) == 0 or scheme.lower() != b"bearer":
                error = ApiError(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
                return await error_response(error)(scope, receive, send)
        await self.app(scope, receive, send)
