#!/usr/bin/env bash
# Answers of SmolLM2-135M-Instruct, and drafts of blocks of 8 and 16 trained on them. Writes $OUT/b.json, and the drafts
# to $WORK and, in pieces, to $OUT. CARRIED: folders that pack.py wrote. A repeated run continues from $WORK.
folders=""
for folder in ${CARRIED:-}; do
    folder="$(realpath "$folder")"
    folders="$folders $folder"
    for wheel in "$folder"/*.whl; do # gguf, if it is not installed
        [ -e "$wheel" ] && export PYTHONPATH="$wheel${PYTHONPATH:+:$PYTHONPATH}"
    done
done
export CARRIED="$folders"
# shellcheck source=env/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run pair 8 "$@"
