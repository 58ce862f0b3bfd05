"""Command line of the demo: starts the servers and stops them."""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

import httpx
import openai
from rich.console import Console
from tokenizers import Tokenizer

from sglang_dflash.cli import Parser
from sglang_dflash.pairs.servers.document import require_folder
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import HOST, free_port, port_is_free, port_number
from sglang_dflash.pairs.servers.progress import wait_ready
from sglang_dflash.pairs.servers.server import Server, end_on_sigterm
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm, require_worker
from sglang_dflash.tools.demo.ask import ask
from sglang_dflash.tools.demo.pairs import Show, chosen
from sglang_dflash.tools.demo.terminal import compare, legend, summary
from sglang_dflash.tools.demo.web import Demo, Side, StepTrace, web_server

LOGS = Path(gettempdir()) / "sglang-dflash"
DESCRIPTION = "Serve a model on a CPU: answer a few questions with and without speculation, then run an OpenAI server."


def make_server(arm: Arm, show: Show, port: int, logs: Path, env: dict[str, str] | None = None) -> Server:
    return Server(
        tiny.command(arm, show.pair, *show.flags),
        port=port,
        log=logs / f"demo-{port}-{arm}.log",
        env=tiny.ENV | tiny.environment(arm) | {"OMP_NUM_THREADS": str(show.n_threads)} | (env or {}),
        name="without speculation" if arm is Arm.OFF else "with DFlash",
    )


def keep_serving(server: Server, question: str, console: Console) -> None:
    """Block until Ctrl-C.

    Raises:
        ServerError: the server ended by itself.
    """
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": question}]})
    console.print(f"\nServing [bold]{server.url}/v1[/] until Ctrl-C; the log is {server.log}. Try:", highlight=False)
    print(f"  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'")
    while server.running:
        time.sleep(0.5)
    raise ServerError(f"the server ended by itself; the end of {server.log}:\n{server.log_tail()}")


def show_page(demo: Demo, port: int, console: Console) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ServerError: the port was taken while the servers started.
    """
    try:
        server = web_server(demo, port)
    except OSError as error:
        raise ServerError(f"port {port} cannot be used ({error}); choose another with --web-port") from error
    with server:
        console.print(f"\nOpen [bold]http://{HOST}:{port}[/] in a browser; Ctrl-C ends it.", highlight=False)
        server.serve_forever()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="sglang-dflash demo", description=DESCRIPTION)
    parser.add_argument("--port", type=port_number, default=30000, help="port of the server with DFlash")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="stop after the questions are answered")
    form.add_argument("--web", action="store_true", help="serve a page for questions instead, until Ctrl-C")
    parser.add_argument("--web-port", type=port_number, default=30080, help="port of the page of --web")
    workers = [Arm.PLUGIN, Arm.STOCK]
    parser.add_argument(
        "--arm", type=Arm, default=Arm.PLUGIN, choices=workers, help="DFLASH worker; stock: SGLang's own"
    )
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for the servers' logs")
    parser.add_argument("--smollm2", action="store_true", help="serve SmolLM2-135M-Instruct, a download of 93 MB")
    parser.add_argument("--target", type=Path, help="folder of another target, of the tiny pair's architecture")
    parser.add_argument("--draft", type=Path, help="folder of another draft")
    options = parser.parse_args(arguments)
    if options.web and options.web_port == options.port:
        parser.error(f"--web-port and --port are both {options.port}; change one")
    if options.smollm2 and (options.target or options.draft):
        parser.error("--smollm2 serves its own target and draft; drop it, or --target and --draft")
    for name, folder, file in (("target", options.target, "tokenizer.json"), ("draft", options.draft, "config.json")):
        if folder and not (folder / file).is_file():
            parser.error(f"--{name} {folder} has no {file}; give the folder of a {name}")
    return options


def main(argv: Sequence[str]) -> int:
    try:
        run(parse(argv), Console())
    except KeyboardInterrupt:
        print("stopped")
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except (openai.APIError, httpx.TransportError) as error:
        print(f"demo: a server sent no whole answer ({error}); see its log in the folder of --logs", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace, console: Console) -> None:
    """Start both servers, ask the questions, and stop the servers.

    Raises:
        ServerError: a port is taken, the folder of the logs cannot be written, or a server ends by itself.
        openai.APIError, httpx.TransportError: a server sends no whole answer.
    """
    end_on_sigterm()
    if options.web and not port_is_free(options.web_port):
        raise ServerError(f"port {options.web_port} is taken or not permitted; choose another with --web-port")
    require_folder(options.logs, "--logs")
    show = chosen(options.target, options.draft, real=options.smollm2, console=console)
    tokenizer = Tokenizer.from_file(str(show.pair.target / "tokenizer.json"))
    trace = options.logs / f"steps-{options.port}"
    shutil.rmtree(trace, ignore_errors=True)  # from an earlier demo
    env = {"SGLANG_DFLASH_WIDTH_TRACE": str(trace)} if options.web else {}
    on = make_server(options.arm, show, options.port, options.logs, env)
    other_port = free_port(options.port + 1)
    if other_port == options.web_port:
        other_port = free_port(other_port + 1)
    off = make_server(Arm.OFF, show, other_port, options.logs)
    try:
        on.start()
        off.start()
        console.print(
            f"[bold]sglang-dflash {version('sglang-dflash')}[/] on SGLang {version('sglang')}, CPU only: {show.name}"
        )
        console.print("[dim]Two servers start. Most of the time goes into importing SGLang.[/]")
        wait_ready([on, off], console)
        require_worker(options.arm, on)
        for server in (on, off):  # not shown, because a server's first request includes lazy set-up
            ask(server.openai(), "Hello.", lambda step: None)
        if options.web:
            sides = {"with": Side(on.openai(), StepTrace(trace)), "without": Side(off.openai(), None)}
            show_page(Demo(sides, tokenizer, show), options.web_port, console)
        else:
            console.print(f"\nAccepted drafts {legend(console)}")
            console.print(summary(compare(on, off, show, console, tokenizer)))
            off.stop()
            if not options.once:
                keep_serving(on, show.questions[0][1], console)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave a server running
        console.print("\n[dim]stopping[/]")
        try:
            on.stop()
        finally:
            off.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
