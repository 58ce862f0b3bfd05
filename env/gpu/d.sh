#!/usr/bin/env bash
# Steps of one token compared with decoding without speculation, by attention backend and prompt length. Writes
# $OUT/d.json.
# shellcheck source=env/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run rests 6 "$@"
