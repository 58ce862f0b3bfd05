"""SGLang's HTTP application with this plugin's hooks, for the processes of `--tokenizer-worker-num`.

SGLang does not load plugins in separate tokenizer processes. These processes import their application from
SGLANG_HTTP_SERVER_APP_PATH, which `plugin.prepare_tokenizer` sets to this module.
"""

from sglang.srt.entrypoints.http_server import app

from sglang_dflash.engine.host.admission import hook_tokenizer

__all__ = ["app"]

hook_tokenizer()
