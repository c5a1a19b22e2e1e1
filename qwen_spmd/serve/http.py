# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP application. Not here: what a body may say, tokens and text, starting and stopping."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from qwen_spmd.serve.args import ServeArgs
from qwen_spmd.serve.fields import ApiError, bad_request
from qwen_spmd.serve.front import Front, Generation
from qwen_spmd.serve.metrics import Metrics
from qwen_spmd.serve.middleware import ApiKeys, RequestId, error_response
from qwen_spmd.serve.protocol import Ask, Defaults, parse_chat, parse_completion, parse_json
from qwen_spmd.serve.responses import Answer
from qwen_spmd.serve.tokenizer import Tokenizer

if TYPE_CHECKING:  # it imports jax
    from qwen_spmd.serve.engine import Engine

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20


def build_app(engine: Engine, tokenizer: Tokenizer, args: ServeArgs) -> Starlette:
    """The application, with its Front as `app.state.front`."""
    metrics = Metrics(args.model_names[0], engine.stats)
    front = Front(engine, tokenizer, metrics, seed=args.seed, log_requests=not args.disable_log_requests)
    api = _Api(front, args)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completion, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
        Route("/ready", api.ready, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/version", api.version, methods=["GET"]),
    ]
    middleware = [Middleware(RequestId)]
    if args.allowed_origins:  # before the keys: a browser asks first and carries none then
        cors = Middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            expose_headers=["X-Request-Id"],
        )
        middleware.append(cors)
    if args.api_key:
        middleware.append(Middleware(ApiKeys, keys=args.api_key))
    handlers: dict[Any, Callable[..., Response]] = {
        ApiError: _refuse,
        HTTPException: _refuse_route,
        ClientDisconnect: lambda request, error: Response(status_code=499),  # while it sent the body: nobody reads this
        Exception: _crash,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.front = front
    return app


class _Api:
    """The endpoints."""

    def __init__(self, front: Front, args: ServeArgs) -> None:
        self.front, self.args = front, args
        self.created = int(time.time())
        self.defaults = Defaults(
            vocab_size=front.engine.vocab_size,
            sampling=front.tokenizer.sampling,
            chat_template_kwargs=args.default_chat_template_kwargs or {},
        )

    async def chat(self, request: HttpRequest) -> Response:
        ask = parse_chat(await self._body(request), self.defaults)
        self._check_model(ask.model)
        assert ask.chat is not None
        try:
            # A long chat takes a while: other requests must not wait for it.
            _, ids = await asyncio.to_thread(self.front.tokenizer.render_chat, **ask.chat)
        except ValueError as error:
            raise bad_request(error) from None
        return self._answer(request, ask, [ids], [""])

    async def completion(self, request: HttpRequest) -> Response:
        ask = parse_completion(await self._body(request), self.defaults)
        self._check_model(ask.model)
        assert ask.prompts is not None
        texts, prompts = await asyncio.to_thread(self._encode, ask)
        return self._answer(request, ask, prompts, texts)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.args.model_names]})

    async def model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card(request.path_params["name"]))

    async def health(self, request: HttpRequest) -> Response:
        """Alive is: the engine's loop runs, and makes progress when it has work."""
        stats = self.front.engine.stats()
        facts = {"running": stats.running, "waiting": stats.waiting, "step_age_s": round(stats.step_age_s, 3)}
        if not stats.alive:
            return JSONResponse({"status": "dead", "reason": stats.error or "the engine has stopped"} | facts, 503)
        if stats.step_age_s > self.args.watchdog_timeout:
            reason = f"no step ended for {stats.step_age_s:.1f} s, the limit is {self.args.watchdog_timeout} s"
            return JSONResponse({"status": "stuck", "reason": reason} | facts, 503)
        return JSONResponse({"status": "ok"} | facts)

    async def ready(self, request: HttpRequest) -> Response:
        """Ready is: healthy, and new requests are welcome."""
        if self.front.draining:
            return JSONResponse({"status": "draining", "reason": "the server is shutting down"}, 503)
        response = await self.health(request)
        return response if response.status_code == 503 else JSONResponse({"status": "ready"})

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self.front.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": importlib.metadata.version("qwen-spmd")})

    async def _body(self, request: HttpRequest) -> dict[str, Any]:
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, f"Content-Type is {kind[:80]!r}, it must be application/json")
        length = request.headers.get("content-length", "0")
        raw = bytearray()
        if int(length) <= MAX_BODY_BYTES:
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_BODY_BYTES:
                    break
            else:
                return parse_json(bytes(raw))
        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes, which is the limit")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.args.model_names:
            served = " or ".join(map(repr, self.args.model_names))
            raise ApiError(404, f"model is {name!r}, it must be {served}", param="model", code="model_not_found")

    def _encode(self, ask: Ask) -> tuple[list[str], list[list[int]]]:
        tokenizer, texts, prompts = self.front.tokenizer, [], []
        for prompt in ask.prompts or []:
            if isinstance(prompt, str):
                texts.append(prompt)
                prompts.append(tokenizer.encode(prompt))
            else:
                texts.append(tokenizer.decode(prompt, skip_special_tokens=ask.skip_special_tokens) if ask.echo else "")
                prompts.append(prompt)
        return texts, prompts

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qwen_spmd",
            "root": self.args.model or self.args.model_names[0],
            "max_model_len": self.front.engine.max_model_len,
        }

    def _answer(self, request: HttpRequest, ask: Ask, prompts: list[list[int]], texts: list[str]) -> Response:
        prefix = "cmpl" if ask.chat is None else "chatcmpl"
        answer_id = f"{prefix}-{request.state.request_id}"
        generation = self.front.submit(ask, prompts, texts, answer_id)
        answer = Answer(
            id=answer_id,
            model=ask.model or self.args.model_names[0],
            chat=ask.chat is not None,
            prompt_tokens=generation.prompt_tokens,
        )
        return GenerationResponse(generation, ask, answer)


class GenerationResponse(Response):
    """A generation on its way to a client, whole or as server-sent events, until it ends or the client goes."""

    def __init__(self, generation: Generation, ask: Ask, answer: Answer) -> None:
        self.generation, self.ask, self.answer = generation, ask, answer
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.generation:
            watch = asyncio.create_task(self._leave_with_client(receive))
            try:
                await (self._stream(send) if self.ask.stream else self._whole(scope, receive, send))
            finally:
                watch.cancel()

    async def _leave_with_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.generation.leave()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while deltas := await self.generation.next():
            for delta in deltas:
                self.answer.add(delta)
        if not self.generation.gone:
            await JSONResponse(self.answer.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))  # a proxy must not collect events
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while deltas := await self.generation.next():
                events = [self._event(chunk) for delta in deltas for chunk in self._chunks(delta)]
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            last = [self._event(self.answer.usage_chunk())] if self.ask.include_usage else []
        except ApiError as error:  # too late for a status
            last = [self._event(error.body())]
        last.append(b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"".join(last), "more_body": False})

    def _chunks(self, delta: Any) -> list[dict[str, Any]]:
        self.answer.add(delta)
        chunks = self.answer.chunks(delta)
        if self.ask.continuous_usage:
            return [chunk | {"usage": self.answer.usage()} for chunk in chunks]
        return [chunk | {"usage": None} for chunk in chunks] if self.ask.include_usage else chunks

    @staticmethod
    def _event(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _refuse_route(request: HttpRequest, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    answer.headers |= error.headers or {}
    return error_response(answer)


def _crash(request: HttpRequest, error: Exception) -> Response:
    """Of a bug. Starlette raises it again after this, so that the log has it."""
    return error_response(ApiError(500, f"the server has a bug: {type(error).__name__}"))
