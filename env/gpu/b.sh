#!/usr/bin/env bash
# Answers of SmolLM2-135M-Instruct, and drafts of blocks of 8 and 16 trained on them. Writes $OUT/b.json, $OUT/draft8 and
# $OUT/draft16. CARRIED: folders that pack.py wrote. A repeated run continues from $WORK.
for folder in ${CARRIED:-}; do # gguf, if it is not installed
    for wheel in "$folder"/*.whl; do
        [ -e "$wheel" ] && export PYTHONPATH="$(realpath "$wheel")${PYTHONPATH:+:$PYTHONPATH}"
    done
done
# shellcheck source=env/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run pair 8 "$@"
