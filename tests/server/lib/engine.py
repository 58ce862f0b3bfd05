"""Program that builds SGLang's `Engine` several times, and writes a report of each to a JSON file.

    python -m tests.server.lib.engine '{"fields": {"model_path": ...}, "prompts": [[5, 6]], "n_new": 8, "runs": [{}]}' F

Each run is a dictionary of variables that the program sets before it builds the engine. It removes all other variables
of this package.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

N_AT_ONCE = 8
HARMFUL: tuple[tuple[list[int], dict[str, Any]], ...] = (([5, 1024], {}), ([5, 6], {"top_k": 2**31, "temperature": 1}))


def main(order: str, report: str) -> None:
    asked = json.loads(order)
    reports = [report_of(run, asked) for run in asked["runs"]]
    Path(report).write_text(json.dumps(reports))


def report_of(run: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answers and the state of an engine with the variables `run`, or why it was refused."""
    import sglang

    for name in [name for name in os.environ if name.startswith("SGLANG_DFLASH_")]:
        del os.environ[name]
    os.environ.update(run)
    try:
        engine = sglang.Engine(**asked["fields"])
    except ValueError as error:
        return {"refused": str(error)}
    try:
        return seen(engine, asked["prompts"], {"temperature": 0, "max_new_tokens": asked["n_new"]})
    finally:
        engine.shutdown()


def seen(engine, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "alone": [engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"] for prompt in prompts],
        "batch": [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)],
        "async": engine.loop.run_until_complete(at_once(engine, prompts, sampling)),
        "errors": [error_of(engine, *harmful) for harmful in HARMFUL],
        "alive": engine.generate(input_ids=prompts[0], sampling_params=sampling)["output_ids"],
        "dflash": engine.get_server_info()["internal_states"][0].get("dflash"),
    }


async def at_once(engine, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
    slots = asyncio.Semaphore(N_AT_ONCE)

    async def answer(prompt: list[int]) -> list[int]:
        async with slots:
            return (await engine.async_generate(input_ids=prompt, sampling_params=sampling))["output_ids"]

    return await asyncio.gather(*map(answer, prompts))


def error_of(engine, prompt: list[int], sampling: dict[str, Any]) -> str:
    try:
        engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 4} | sampling)
    except ValueError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
