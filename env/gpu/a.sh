#!/usr/bin/env bash
# Steps of a 27B target by worker and block size, times of kernels, and checks of `prove`. Writes $OUT/a.json.
# shellcheck source=env/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run steps 6 "$@"
