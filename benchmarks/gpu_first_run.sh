#!/usr/bin/env bash
# The first half hour on one GPU, in three parts of at most nine minutes: bash benchmarks/gpu_first_run.sh a|b|c
#
# Every step has a limit, and the next begins after one that fails. Logs, JSON and a summary are in build/gpu
# and packed into $OUT/PART.tgz (build/gpu, too) after every step, so that what comes may be cut off. What a
# part finds decides what the next one does: steps that failed have files in build/gpu, as $OUT may be emptied
# in between.
#
#   a  what the driver does, kernels against float64 on 1 and 2 ranks, the matmul against torch.mm, also as
#      configured otherwise
#   b  4 and 7 virtual ranks, graph replays, failures; or, where 2 ranks failed, why
#   c  processes that share the GPU, the host's cost, one kernel under ncu, compute-sanitizer
#
# --dry-run: the same on simulated ranks, to check this script; it takes two minutes.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:-}
case $part in a | b | c) ;; *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
dry=${2:-}
PY=${PY:-python3}
WORK=${WORK:-build/gpu}
OUT=${OUT:-$WORK}
LIMIT=${LIMIT:-520} # seconds for the part
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 INTERLACE_TUNE_CACHE=off
logs=$WORK/$part
mkdir -p "$logs" "$OUT"
summary=$logs/summary.txt
: >"$summary"
began=$SECONDS
failed=0

# step NAME SECONDS COMMAND...: the end of its output is shown, all of it kept
step() {
  local name=$1 bound=$2 left=$((LIMIT - (SECONDS - began))) start=$SECONDS status
  shift 2
  if ((left < 10)); then
    echo "$name: left out, no time" | tee -a "$summary"
    failed=1
    return 1
  fi
  ((bound > left)) && bound=$left
  timeout --kill-after=5 "$bound" "$@" >"$logs/$name.log" 2>&1
  status=$?
  echo "== $name: status $status after $((SECONDS - start)) of $bound s" | tee -a "$summary"
  tail -n "${show:-4}" "$logs/$name.log" | cut -c1-220
  if ((status == 0)); then rm -f "$WORK/$name.failed"; else failed=1 && touch "$WORK/$name.failed"; fi
  tar czf "$OUT/$part.tgz" -C "$WORK" "$part"
  return "$status"
}
interlace() { step "$1" "$2" "$PY" -m interlace "${@:3}"; }
gpu() { step "$1" "$2" "$PY" benchmarks/gpu.py --out "$logs/$1.json" "${@:3}"; }
tests() { step "$1" "$2" "$PY" -m pytest -q -p no:cacheprovider "${@:3}"; }
check() {
  local status=0
  interlace "check-$1" "$2" check --device "$device" --ranks "$1" --seconds $(($2 - 10)) || status=$?
  ((status != 3)) || rm -f "$WORK/check-$1.failed" # what began has passed, the rest had no time
  return "$status"
}

device=cuda
if [ "$dry" = --dry-run ]; then
  device=cpu
  gpu() { step "$1" "$2" "$PY" benchmarks/gpu.py --dry-run "${@:3}"; }
  tests() { step "$1" "$2" "$PY" -m pytest -q -p no:cacheprovider --collect-only "${@:3}"; }
fi
have() { command -v "$1" >/dev/null && [ $device = cuda ]; }

case $part in
a)
  have nvidia-smi && step nvidia-smi 15 nvidia-smi
  interlace doctor 40 doctor
  if [ $device = cuda ]; then
    show=30 step probe 60 "$PY" benchmarks/gpu_probe.py
    show=30 step probe-eager 90 env CUDA_MODULE_LOADING=EAGER "$PY" benchmarks/gpu_probe.py
  fi
  show=12 check 1 80
  show=12 check 2 90
  show=30 gpu matmul 150 --part matmul --repetitions 8
  show=16 gpu variants 90 --part variants --repetitions 8
  show=8 gpu host 60 --part host --repetitions 8
  ;;
b)
  if [ ! -e "$WORK/check-2.failed" ]; then
    show=12 check 4 130
    [ $device = cuda ] && show=12 check 7 90 # as many ranks as no power of two has
    tests virtual-ops 150 tests/gpu/test_cuda.py -k "operations or bit_identical or error_on"
    tests virtual-replays 100 tests/gpu/test_cuda.py -k replays # may hang where ranks share a queue
    show=20 gpu virtual 90 --part virtual --repetitions 4
  else # what 2 ranks fail in, one cause after the other
    show=20 interlace check-2-again 60 check --device "$device" --ranks 2 --seconds 50
    show=20 step check-2-eager 75 env CUDA_MODULE_LOADING=EAGER \
      "$PY" -m interlace check --device "$device" --ranks 2 --seconds 60
    show=20 step check-2-one-queue 75 env CUDA_DEVICE_MAX_CONNECTIONS=1 \
      "$PY" -m interlace check --device "$device" --ranks 2 --seconds 60
    have compute-sanitizer && show=30 step memcheck-2 150 compute-sanitizer --tool memcheck \
      "$PY" -m interlace check --device "$device" --ranks 2 --seconds 100
  fi
  ;;
c)
  tests processes 250 tests/gpu/test_cuda_processes.py
  show=14 step host-cost 60 "$PY" benchmarks/host_cost.py \
    $([ $device = cuda ] && echo --gpu --ranks 2 --repetitions 10 || echo --no-launcher --repetitions 1)
  show=8 gpu small 60 --part small --repetitions 6
  show=8 gpu slow-link 60 --part slow-link --repetitions 6
  tests roles 90 tests/gpu/test_cuda.py -k roles
  have ncu && show=40 step ncu 90 ncu --clock-control none --kill yes --set full \
    -k regex:all_gather_matmul -s 3 -c 1 \
    "$PY" benchmarks/gpu.py --part matmul --repetitions 1 --out "$logs/ncu.json"
  [ $device = cuda ] && gpu sanitizer 90 --part sanitizer
  ;;
esac
echo "-- part $part: $((SECONDS - began)) s; logs in $logs, packed in $OUT/$part.tgz"
cat "$summary"
exit "$failed"
