# SPDX-License-Identifier: Apache-2.0
"""python -m qwen_spmd.serve: take the port, load the model, serve until a signal, finish what runs.

The port is taken first, so that a busy one is known at once and probes get an answer (503) while the model loads. Of
several nodes the first does this; the others load the model and compute with it. All end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen_spmd.serve.args import ServeArgs, parse
from qwen_spmd.serve.channel import Lost
from qwen_spmd.serve.fields import ApiError
from qwen_spmd.serve.front import Front, stopping
from qwen_spmd.serve.http import build_app
from qwen_spmd.serve.middleware import error_response
from qwen_spmd.serve.model_folder import model_folder
from qwen_spmd.serve.nodes import Node
from qwen_spmd.serve.replica import Follower
from qwen_spmd.serve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qwen_spmd.serve.engine import Engine, EngineConfig

log = logging.getLogger("qwen_spmd.serve")

FLUSH_S = 5
"""What answers that are ready have to reach their clients, after the last token."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # Of a GPU's memory jax takes three quarters unless told otherwise, and an engine has a use for all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("qwen_spmd").setLevel(args.log_level.upper())  # libraries only warn
    return asyncio.run(serve(args) if args.node_rank == 0 else follow(args))


def listen(args: ServeArgs) -> socket.socket:
    """A listening socket. OSError if someone else has the address."""
    if args.uds is None:
        family, kind, proto, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        address = args.uds
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if Path(address).is_socket() and sock.connect_ex(address) != 0:
            os.unlink(address)  # what a server that was killed left behind
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def load(args: ServeArgs, node: Node) -> tuple[Engine, Tokenizer]:
    node.join()
    folder = model_folder(args.model, revision=args.revision, download_dir=args.download_dir)
    texts = folder
    if args.tokenizer is not None:
        texts = model_folder(args.tokenizer, download_dir=args.download_dir, weights=False)
    tokenizer = Tokenizer.load(texts, chat_template=args.chat_template, generation_config=args.generation_config)
    node.agree(folder)
    from qwen_spmd.serve.engine import Engine  # jax comes with it, and that takes seconds

    config, leader = engine_config(args), node.leader
    return Engine.load(folder, config) if leader is None else Engine.load(folder, config, leader), tokenizer


def engine_config(args: ServeArgs) -> EngineConfig:
    """What the engine gets of the command line. ValueError if the layout leaves nodes without a part."""
    from qwen_spmd.serve.engine import EngineConfig

    options = args.engine_options()
    if args.layout is None and args.nnodes == 1:
        return EngineConfig(**options)
    import jax

    from qwen_spmd.mesh import rules

    if args.layout is not None:
        options |= rules.named(args.layout, jax.device_count(), tp=args.tensor_parallel_size or 1)
    sizes = {axis: options.get(axis, 1) for axis in ("dp", "ep", "tp")}
    if args.nnodes > 1 and math.prod(sizes.values()) != jax.device_count():
        said = " ".join(f"{axis}={n}" for axis, n in sizes.items())
        raise ValueError(
            f"{said} is {math.prod(sizes.values())} devices, the {args.nnodes} nodes have {jax.device_count()}: "
            "all must have a part, as with --layout dp_ep"
        )
    return EngineConfig(**options)


async def serve(args: ServeArgs) -> int:
    """From the command line to the exit code."""
    signals = Signals()
    door = Door()
    config = uvicorn.Config(
        door,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        timeout_keep_alive=65,  # above that of the usual proxies and client pools, so that they close first
        timeout_graceful_shutdown=FLUSH_S,
    )
    try:
        config.load()
    except OSError as error:  # ssl's are too
        return fail(f"--ssl-certfile or --ssl-keyfile cannot be used: {error}")
    try:
        sock = listen(args)
    except OSError as error:
        where = f"socket {args.uds}" if args.uds else f"port {args.port} on {args.host}"
        return fail(f"cannot listen on {where}: {error.strerror or error}")
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stop = asyncio.create_task(signals.first.wait())

    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    node = Node(args, on_lost=threadsafe(settle, lost), on_leave=threadsafe(signals.first.set))
    loading = in_thread(lambda: load(args, node))
    await asyncio.wait({loading, stop, serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    if signals.last is not None:
        print("stopped while loading", file=sys.stderr)
        node.fail("it was stopped while loading")
        leave(128 + signals.last)  # the loading thread cannot be asked to end
    await asyncio.wait({loading, lost}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not loading.done():
            raise Lost(lost.result())
        engine, tokenizer = loading.result()
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)):
            if args.nnodes == 1:
                raise
            log.exception("this node failed")
        node.fail(str(error), wait_s=1)
        server.should_exit = True
        await serving
        fail(str(error))
        return 1 if args.nnodes == 1 else leave(1)

    app = build_app(engine, tokenizer, args)
    door.app = app
    print(f"ready: {address(args, sock)}/v1 serves {', '.join(args.model_names)}", flush=True)
    await asyncio.wait({stop, serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not lost.done() and not await finish(app.state.front, args.shutdown_timeout, lost):
        node.fail("its engine did not stop")
        await asyncio.sleep(0)
    if lost.done():
        engine.fail(lost.result())
        server.should_exit = True  # once those who wait have their answers
        await asyncio.wait({serving}, timeout=FLUSH_S / 2)
        fail(lost.result())
        leave(1)
    server.should_exit = True
    await serving
    await in_thread(node.end)
    return 0


async def follow(args: ServeArgs) -> int:
    """The same for another node than the first, which has no clients."""
    signals = Signals()

    ready = threading.Event()

    def die(reason: str) -> None:  # in a thread of its own: the others may wait for devices that never answer
        if signals.last is None or ready.is_set():  # else this node itself said so, and is on its way out
            fail(reason)
            leave(1)

    node = Node(args, on_lost=die, on_leave=lambda: None)

    def is_ready() -> None:
        ready.set()
        print(f"ready: node {args.node_rank} of {args.nnodes}", flush=True)

    def work() -> None:
        node.join()
        folder = model_folder(args.model, revision=args.revision, download_dir=args.download_dir)
        node.agree(folder)
        from qwen_spmd.serve import start

        assert isinstance(node.channel, Follower)
        start.follow(folder, engine_config(args), node.channel, is_ready)
        node.end()

    working, stop = in_thread(work), asyncio.create_task(signals.first.wait())
    await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
    if signals.last is not None and isinstance(node.channel, Follower) and ready.is_set():
        node.channel.leave()  # node 0 ends it in good order
    elif signals.last is not None:
        print("stopped while loading", file=sys.stderr)
        if node.channel is not None:
            node.channel.fail("it was stopped while loading")
        leave(128 + signals.last)
    try:
        await working
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)):
            log.exception("this node failed")
        node.fail(str(error), wait_s=2)
        fail(str(error))
        leave(1)
    return 0


async def finish(front: Front, timeout: float, lost: asyncio.Future[str]) -> bool:
    """Take nothing new, let what runs end, end what does not; at once if `lost`. False if the engine does not stop."""
    front.draining = True
    log.info("shutting down: running requests have %g s; a second signal ends them at once", timeout)
    drained = in_thread(lambda: front.engine.drain(timeout))
    await asyncio.wait({drained, lost}, timeout=timeout + FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        return True
    stopped = drained.done() and not drained.exception()
    if not stopped:
        log.error("the engine did not stop: %s", drained.exception() if drained.done() else "it takes too long")
    await asyncio.sleep(0)  # the last tokens are on their way to this loop
    front.fail_all(stopping())
    return stopped


class Signals:
    """SIGINT and SIGTERM: the first asks, the second does not wait."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.last: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.last is not None:
            print("second signal: leaving at once", file=sys.stderr)
            leave(128 + number)
        self.last = number
        self.first.set()


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are ours: uvicorn's own would stop before running requests have ended


class Door:
    """The application, once there is one. Until then everybody is asked to come back."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            return await self.app(scope, receive, send)
        if scope["path"] in ("/health", "/ready"):
            response = JSONResponse({"status": "loading", "reason": "the model is being loaded"}, 503)
        else:
            response = error_response(ApiError(503, "the model is being loaded", code="loading", retry_after=10))
        await response(scope, receive, send)


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a thread that, unlike asyncio's, does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def done(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(done, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def threadsafe(call: Callable[..., object], *args: Any) -> Callable[..., None]:
    """`call` for another thread: this loop runs it a little later."""
    loop = asyncio.get_running_loop()

    def later(*more: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(call, *args, *more)

    return later


def settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def address(args: ServeArgs, sock: socket.socket) -> str:
    if args.uds is not None:
        return f"unix:{args.uds}:{args.root_path}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if sock.family is socket.AF_INET6 else host)
    return f"http{'s' if args.ssl_certfile else ''}://{host}:{port}{args.root_path}"


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
