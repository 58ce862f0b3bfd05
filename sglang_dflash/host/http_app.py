"""Application for the processes of `--tokenizer-worker-num`: SGLang's, with the hooks of a single process.

SGLang does not load plugins in separate tokenizer processes. `plugin.check_requests` names this module in
SGLANG_HTTP_SERVER_APP_PATH, from which these processes import their application.
"""

from sglang.srt.entrypoints.http_server import app

from sglang_dflash.host.admission import hook_tokenizer

__all__ = ["app"]

hook_tokenizer()
