# Sourced by the scripts of this folder: strict mode, paths, the plugin on PYTHONPATH, and the time limit.
#
#   UP        shell file that puts SGLang on PYTHONPATH, sourced if set
#   OUT       folder for results (default: .run/gpu in the checkout)
#   MINUTES   time limit of the script, from its first line on
#   GPU_DRY   1: run on a CPU, with small settings
#   PYTHON    interpreter (default: .venv/bin/python in the checkout, else python3)
set -euo pipefail
export GPU_BEGAN="${GPU_BEGAN:-$(date +%s.%N)}" # seconds since 1970
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT"
export OUT="${OUT:-$ROOT/.run/gpu}" WORK="${WORK:-$ROOT/.run/gpu-work}" GPU_DRY="${GPU_DRY:-0}"
mkdir -p "$OUT" "$WORK"

if [ -n "${UP:-}" ]; then
    export D="${D:-$(dirname "$UP")}"
    before="${PYTHONPATH:-}"
    set +eu # the file may use unset variables
    # shellcheck source=/dev/null
    . "$UP"
    set -eu
    # The file may have replaced PYTHONPATH. Folders from before remain on it.
    if [ -n "$before" ] && [[ ":${PYTHONPATH:-}:" != *":$before:"* ]]; then
        export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$before"
    fi
fi

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$ROOT/.venv/bin/python" ] && PYTHON="$ROOT/.venv/bin/python"
fi
export PYTHON PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE

# If the plugin is not installed, make a folder with links to its packages and with metadata. The metadata has the entry
# points of pyproject.toml.
if ! "$PYTHON" -c 'import importlib.metadata as m; m.version("sglang-dflash")' 2>/dev/null; then
    "$PYTHON" env/gpu/plugin_folder.py "$WORK/plugin"
    export PYTHONPATH="$WORK/plugin${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ "$GPU_DRY" = 1 ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
fi

# run MODULE DEFAULT_MINUTES [ARGUMENT ...]: run a module of this folder in place of the shell. It watches the clock
# itself. `timeout` ends it if it hangs. A signal to the script reaches the module, which then stops its servers.
run() {
    local module="$1" limit
    export MINUTES="${MINUTES:-$2}"
    limit="$("$PYTHON" -c 'import os, time
print(int(60 * float(os.environ["MINUTES"]) - (time.time() - float(os.environ["GPU_BEGAN"]))) + 30)')"
    [ "$limit" -gt 30 ] || limit=30
    exec timeout --kill-after=15 "$limit" "$PYTHON" -m "env.gpu.$module" "${@:3}"
}
