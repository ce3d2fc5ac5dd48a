#!/usr/bin/env bash
# All GPU numbers of docs/performance.md on one GPU: clusters emulated, NCCL real, every byte verified.
# EMULATE is a launcher that starts its command as the ranks of a cluster with torchrun's variables set and takes
#   --hosts H --ranks-per-host K --nic-gbit G --timeout S -- COMMAND
# with hosts whose ranks reach each other only through a NIC of that rate (0: not capped) for each rank.
# usage: EMULATE="…" OUT=folder bench/table.sh [STEP ...]     steps: pack table small process dense moe wide delta
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${EMULATE:?}" "${OUT:?}"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
steps=${*:-pack table small process dense moe wide delta}

cluster() {  # hosts, ranks a host, Gbit/s, seconds, command …
  local hosts=$1 per_host=$2 gbit=$3 limit=$4; shift 4
  $EMULATE --hosts "$hosts" --ranks-per-host "$per_host" --nic-gbit "$gbit" --timeout "$limit" -- "$@" ||
    echo "exit status $?: $*"
}
cases() { cluster "$1" "$2" "$3" "$4" python3 bench/reshard.py --cluster "$1x$2" --nic-gbit "$3" \
  --iterations 5 --json "$OUT/reshard_$1x$2_$3gbit.json" "${@:5}"; }
packed=(--method reshard --method "reshard, graph" --method limit --method "gather+broadcast, packed")
refit() {  # hosts, ranks a host, Gbit/s, model, source, destination, options …
  cluster "$1" "$2" "$3" 110 python3 bench/refit.py --model "$4" --source "$5" --destination "$6" --per-domain "$2" \
    --iterations 5 "${@:7}" --json "$OUT/refit_$4_$(tr -d =, <<<"$5")_$(tr -d =, <<<"$6")_$1x$2.json"
}

few=()  # at 2 Gbit/s the slower peers would take minutes
for method in reshard "reshard, graph" limit gather+broadcast "gather+broadcast, packed"; do few+=(--method "$method"); done
changed() {  # Gbit/s, model, source, destination, end of the file's name, options …
  cluster 2 4 "$1" 110 python3 bench/delta.py --model "$2" --source "$3" --destination "$4" --per-domain 4 "${@:6}" \
    --json "$OUT/delta_$2_2x4_$5.json"
}
for step in $steps; do
  printf '\n== %s (at %d s)\n' "$step" "$SECONDS"
  case $step in
    pack) timeout 60 python3 bench/pack.py --json "$OUT/pack.json" ;;
    table) cases 2 4 4 60; cases 4 2 4 70; cases 3 4 2 110 "${few[@]}" ;;
    small) cases 2 4 0 120 ;;
    process) NCCL_MULTI_RANK_GPU_ENABLE=1 timeout 60 python3 bench/one_process.py --ranks 8 --same-gpu \
      --json "$OUT/one_process.json" ;;
    dense) refit 2 4 4 dense tp=4 tp=2,dp=2 ;;
    moe) refit 2 4 4 moe ep=4 tp=4; refit 2 4 4 moe pp=2,ep=2 tp=2,dp=2 "${packed[@]}" ;;
    wide) refit 2 6 2 moe ep=6 tp=2,dp=3 "${packed[@]}" ;;
    delta) changed 4 dense tp=4 tp=2,dp=2 4gbit; changed 4 moe ep=4 tp=4 4gbit
      changed 0 dense tp=4 tp=2,dp=2 0gbit --share 0.01 --share 0.03 --share 0.05 --share 1.0
      changed 4 dense tp=4 tp=2,dp=2 4gbit_host --share 0.01 --host-baseline ;;
    *) echo "no such step: $step"; exit 2 ;;
  esac
done
printf '\n== done (at %d s)\n' "$SECONDS"
