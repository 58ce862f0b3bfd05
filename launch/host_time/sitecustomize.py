"""Takes the silicon out of a rehearsed server, and writes down what its decode steps take of the host.

For processes that have this folder on PYTHONPATH. Replays and Triton launches do nothing: what is left of a step is
Python, SGLang's and the worker's, and the operations outside of graphs. What is generated means nothing then.
`HOST_TIME` is the file: a line per decode step that follows one of as many requests, `requests seconds seconds`, CPU
time of the scheduler's thread from one step's launch to the next one's, and inside the launch.
"""

import os
import time

from after_loading import edit_after_loading


def take_the_silicon_out(graph) -> None:
    launch = graph.launch

    def without_triton(fn):
        return (lambda *args, **kwargs: None) if fn.__qualname__ == "GridExecutor.__call__" else launch(fn)

    graph.launch = without_triton
    graph.Graph.replay = lambda self: None


def time_the_steps(scheduler) -> None:
    run_batch = scheduler.Scheduler.run_batch
    file = open(os.environ["HOST_TIME"], "w", buffering=1)  # noqa: SIM115, as long as the process
    last = [0, 0.0]  # requests of the decode step before, 0 where it was none; when it was launched

    def timed(self, batch, *args, **kwargs):
        began = time.thread_time()
        result = run_batch(self, batch, *args, **kwargs)
        launched = time.thread_time()
        n_requests = batch.batch_size() if batch.forward_mode.is_decode() else 0
        if n_requests and n_requests == last[0]:
            file.write(f"{n_requests} {began - last[1]:.7f} {launched - began:.7f}\n")
        last[:] = n_requests, began
        return result

    scheduler.Scheduler.run_batch = timed


edit_after_loading(
    {"sglang_dflash.rehearsal.graph": take_the_silicon_out, "sglang.srt.managers.scheduler": time_the_steps}
)
