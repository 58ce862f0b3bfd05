#!/usr/bin/env bash
# Speeds of a trained pair (TARGET, DRAFT) without speculation, with SGLang's worker and with this plugin. Writes
# $OUT/c.json. PROMPTS: folder of humaneval.jsonl, chats.jsonl, edits.jsonl and summaries.jsonl.
# shellcheck source=env/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run speeds 7 "$@"
