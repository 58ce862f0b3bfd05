"""Display of the progress of servers that start at the same time."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sglang_dflash.pairs.servers.server import START_TIMEOUT_S, Server


def wait_ready(servers: Sequence[Server], console: Console, timeout_s: float = START_TIMEOUT_S) -> float:
    """Wait for started servers, and show their stages.

    A terminal shows one live line per server. Other outputs get a line per change of stage.

    Returns:
        Seconds waited.

    Raises:
        ServerError: a server ended, or the time is up.
    """
    began = time.monotonic()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[stage]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        tasks = {server: display.add_task(server.name, total=None, stage="") for server in servers}
        shown = dict.fromkeys(servers, "")
        while tasks:
            elapsed_s = time.monotonic() - began
            if elapsed_s > timeout_s:
                raise next(iter(tasks)).not_ready(timeout_s)
            for server in [server for server in tasks if server.is_ready()]:
                display.remove_task(tasks.pop(server))
                console.print(f"[green]✔[/] {server.name}: ready on port {server.port} after {elapsed_s:.0f} s")
            stages = {server: server.stage() for server in tasks}
            for server, stage in stages.items():
                display.update(tasks[server], stage=stage)
            if not console.is_terminal:
                _print_changes(stages, shown, elapsed_s, console)
            time.sleep(0.5)
    return time.monotonic() - began


def _print_changes(
    stages: Mapping["Server", str], shown: dict["Server", str], elapsed_s: float, console: Console
) -> None:
    """Print a line for each server whose stage differs from its entry in `shown`, and update the entry."""
    for server, stage in stages.items():
        if stage != shown[server]:
            console.print(f"  {elapsed_s:4.0f} s  {server.name}: {stage}")
            shown[server] = stage
