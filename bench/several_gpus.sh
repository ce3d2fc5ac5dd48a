#!/usr/bin/env bash
# Everything that wants several GPUs of one host, in one command of under ten minutes: reshards and their peers over
# NVLink, one process that drives all GPUs, a whole model's refit. NVLink multicast stays off.
# usage: OUT=folder bench/several_gpus.sh [GPUS]   (default: all)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus=${1:-$(nvidia-smi -L | wc -l)}
out=${OUT:?set OUT to the folder for the results}
export NCCL_NVLS_ENABLE=0 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
port=29600

ranks() {  # the given command as one rank a GPU; each step has a time limit of its own
  local limit=$1 status=0 pids=() r; shift; port=$((port + 1))
  for ((r = 0; r < gpus; r++)); do
    RANK=$r WORLD_SIZE=$gpus LOCAL_RANK=$r LOCAL_WORLD_SIZE=$gpus MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      timeout "$limit" "$@" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  [ $status = 0 ] || echo "exit status $status: $*"
}

step() { printf '\n== %s (at %d s)\n' "$*" "$SECONDS"; }
step doctor; python3 -m nccl_m2n doctor
step "reshards beside their peers"; ranks 240 python3 bench/several_gpus.py --json "$out/several_gpus_$gpus.json"
step "one process, all GPUs"
timeout 60 python3 bench/one_process.py --json "$out/one_process_$gpus.json"
half=$((gpus / 2))
step "a whole model, EP$half to TP$half, twenty steps"
ranks 150 python3 bench/refit.py --model Qwen3-30B-A3B --source ep=$half --destination tp=$half --iterations 20 \
  --method reshard --method limit --method "gather+broadcast, packed" --json "$out/refit_ep_to_tp_$gpus.json"
if [ "$half" -ge 4 ]; then
  step "a whole model, PP2xEP2 to TP2xDP2, twenty steps"
  ranks 150 python3 bench/refit.py --model Qwen3-30B-A3B --source pp=2,ep=2 --destination tp=2,dp=2 --iterations 20 \
    --method reshard --method limit --json "$out/refit_pp_ep_to_tp_dp_$gpus.json"
fi
step "NVIDIA's nccl.m2n"; ranks 60 python3 bench/nvidia_m2n.py --json "$out/nvidia_m2n_$gpus.json"
step done
