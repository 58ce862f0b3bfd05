# Sourced by every recipe, which is called as RECIPE.sh h200|b200 [further server flags]: that GPU's profile from env/.
set -euo pipefail
GPU="${1:-}"
case "$GPU" in
  h200) source "$(dirname "${BASH_SOURCE[0]}")/../../env/hopper.sh" ;;
  b200) source "$(dirname "${BASH_SOURCE[0]}")/../../env/blackwell.sh" ;;
  *) echo "usage: $0 h200|b200 [further flags of sglang.launch_server]" >&2 && exit 2 ;;
esac
shift # what is left of "$@" goes to the server, where the flag given last counts
