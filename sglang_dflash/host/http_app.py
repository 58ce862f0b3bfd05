"""Application of the processes of `--tokenizer-worker-num`: SGLang's, with the hooks that one process has.

SGLang loads plugins where it launches and where it schedules, not where it tokenizes in processes of their own.
`plugin.check_requests` names this module in SGLANG_HTTP_SERVER_APP_PATH, from which they import what they serve.
"""

from sglang.srt.entrypoints.http_server import app

from sglang_dflash.host.admission import hook_tokenizer

__all__ = ["app"]

hook_tokenizer()
