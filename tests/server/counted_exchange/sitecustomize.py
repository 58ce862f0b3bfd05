"""Log the collective operations of each decode step, in every process that has this folder on PYTHONPATH."""

from after_loading import edit_after_loading


def report_steps(worker) -> None:
    from sglang_dflash.platforms.rehearsal import exchange

    worker.DFlashWorker.decode = exchange.report_steps(worker.DFlashWorker.decode)


edit_after_loading({"sglang_dflash.engine.worker": report_steps})
