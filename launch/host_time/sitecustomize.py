"""Takes the silicon out of a rehearsed server, and writes down what its decode steps take of the host.

For processes that have this folder on PYTHONPATH. Replays do nothing. A kernel's stand-in, a matrix product and an
argmax return what they returned to the first call of these shapes: what is left of a step is Python, SGLang's and the
worker's, and small torch operations outside of graphs. What is generated means nothing then.

`HOST_TIME` is the file: a line per decode step that follows one of as many requests, `requests seconds seconds
launches`: CPU time of the scheduler's thread from one step's launch to the next one's, and inside the launch; kernels
launched outside of graphs, whose launcher's own time is not in these seconds.
"""

import functools
import os
import time
from operator import attrgetter

import torch
from after_loading import edit_after_loading

launched = [0]
decoding = [False]  # while a decode step is launched; prompts compute what they always do


def kind(argument):
    if isinstance(argument, torch.Tensor):
        return argument.shape
    return argument.fn if hasattr(argument, "fn") else None  # an interpreted Triton kernel, which launches itself


def once(run, *, is_kernel):
    results = {}

    @functools.wraps(run)
    def call(*args, **kwargs):
        if not decoding[0]:
            return run(*args, **kwargs)
        launched[0] += is_kernel
        key = tuple(map(kind, (*args, *kwargs.values())))
        if key not in results:
            results[key] = run(*args, **kwargs)
        return results[key]

    return call


def take_the_silicon_out(graph) -> None:
    launch = graph.launch
    graph.launch = lambda fn: once(launch(fn), is_kernel=True)
    graph.Graph.replay = lambda self: None
    products = (torch.nn.functional, "linear"), (torch, "mm"), (torch, "bmm"), (torch, "matmul"), (torch, "baddbmm")
    for owner, name in (*products, (torch, "argmax"), (torch.Tensor, "argmax"), (torch.Tensor, "__matmul__")):
        setattr(owner, name, once(attrgetter(name)(owner), is_kernel=False))


def time_the_steps(scheduler) -> None:
    run_batch = scheduler.Scheduler.run_batch
    file = open(os.environ["HOST_TIME"], "w", buffering=1)  # noqa: SIM115, as long as the process
    last = [
        0,
        0.0,
        0,
    ]  # requests of the decode step before, 0 where it was none; when it was launched; launches by then

    def timed(self, batch, *args, **kwargs):
        n_requests = batch.batch_size() if batch.forward_mode.is_decode() else 0
        began = time.thread_time()
        decoding[0] = n_requests > 0
        result = run_batch(self, batch, *args, **kwargs)
        decoding[0] = False
        ended = time.thread_time()
        if n_requests and n_requests == last[0]:
            file.write(f"{n_requests} {began - last[1]:.7f} {ended - began:.7f} {launched[0] - last[2]}\n")
        last[:] = n_requests, began, launched[0]
        return result

    scheduler.Scheduler.run_batch = timed


edit_after_loading(
    {"sglang_dflash.rehearsal.graph": take_the_silicon_out, "sglang.srt.managers.scheduler": time_the_steps}
)
