#!/usr/bin/env bash
# The first fifteen minutes on one GPU, starts of the machine counted in: bash benchmarks/gpu_call.sh 1|2|3
#
# Calls 1 and 2 end within 330 s, call 3 within 180. Correctness comes before speed, first what explains
# failures, last what may be cut off. Every step has a limit, all together have one deadline, and the next
# step begins after one that fails. Logs, JSON and a summary are in build/gpu, and packed into $OUT/N.tgz
# (build/gpu, too) after every step. A step of call 1 or 2 that failed leaves its command in NAME.failed
# there, for call 3; nothing is read from $OUT, which may be emptied in between.
#
#   1  facts that decide designs, every kernel against float64 on 1 and 2 ranks, the matmul against torch.mm
#   2  4 virtual ranks, failures, graph replays, processes that share the GPU, other ops on one rank, the host
#   3  all steps that failed, one cause after the other; if none did, 7 ranks, a kernel under ncu, the sanitizer
#
# Kernels come from build/gpu-cache.tgz (make gpu-cache), unpacked where they were compiled. After every step
# the summary names the kernels that it had to compile.
# --dry-run: the same on simulated ranks, to check this script; calls 1 and 2 take under three minutes of two
# cores. Limits are four times as long, since a slow machine is no failure.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stop() { echo "gpu_call.sh: $1" >&2; exit 2; }
usage() { sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2; }
call=${1:-}
case $call in
1 | 2) seconds=322 ;;
3) seconds=172 ;;
*) usage ;;
esac
dry=${2:-}
slack=1
case $dry${3:-} in
'') ;;
--dry-run) slack=4 ;;
*) usage ;;
esac
PY=${PY:-python3}
WORK=${WORK:-build/gpu}
OUT=${OUT:-$WORK}
LIMIT=${LIMIT:-$((seconds * slack))}
case $LIMIT in *[!0-9]* | 0?*) stop "LIMIT=$LIMIT: it is a whole number of seconds" ;; esac
packed=${CACHE:-build/gpu-cache.tgz}
kernels=/tmp/interlace-triton # where benchmarks/gpu_cache.py has them
[ "$dry" != --dry-run ] || kernels=$WORK/kernels
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 INTERLACE_TUNE_CACHE=off
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$kernels}
logs=$WORK/$call
summary=$logs/summary.txt
problem=$({ mkdir -p "$logs" "$OUT" "$TRITON_CACHE_DIR" && touch "$summary" "$OUT/$call.tgz"; } 2>&1) ||
  stop "${problem%%$'\n'*}"
began=$SECONDS
[ "$dry" ] || problem=$(timeout 60 "$PY" -c 'import torch; torch.cuda.init()' 2>&1) ||
  stop "no GPU, or no torch for it: ${problem##*$'\n'}"
: >"$summary"
failed=0

say() { echo "$*" | tee -a "$summary"; }

# step NAME SECONDS COMMAND...: the end of its output is shown, all of it kept
step() {
  local name=$1 bound=$(($2 * slack)) left=$((LIMIT - (SECONDS - began))) start=$SECONDS status compiled
  shift 2
  if ((left < 10)); then
    say "$name: left out, no time"
    failed=1
    return 1
  fi
  ((bound > left)) && bound=$left
  touch "$logs/begun"
  timeout --kill-after=5 "$bound" "$@" >"$logs/$name.log" 2>&1
  status=$?
  say "== $name: status $status after $((SECONDS - start)) of $bound s"
  compiled=$(find "$TRITON_CACHE_DIR" -name '*.cubin' -newer "$logs/begun" -exec basename {} .cubin \; |
    sort | uniq -c | awk '{ printf "%s%s x %d", (NR > 1 ? ", " : ""), $2, $1 }')
  [ -z "$compiled" ] || say "   not in the cache, compiled here: $compiled"
  tail -n "${show:-4}" "$logs/$name.log" | cut -c1-220
  ((status == 0)) || failed=1
  rm -f "$WORK/$name.failed"
  ((status == 0 || call == 3)) || printf '%q ' "$@" >"$WORK/$name.failed"
  packed_in="packed in $OUT/$call.tgz"
  tar czf "$OUT/$call.tgz" -C "$WORK" "$call" || failed=1 packed_in="NOT packed in $OUT/$call.tgz"
  return "$status"
}
gpu() { step "$1" "$2" "$PY" benchmarks/gpu.py --out "$logs/$1.json" "${@:3}"; }
tests() { step "$1" "$2" "$PY" -m pytest -q -p no:cacheprovider "${@:3}"; }
check() {
  local name=$1 status=0
  step "$name" "$3" "$PY" -m interlace check --device "$device" --ranks "$2" \
    --seconds $(($3 * slack - 8)) || status=$?
  ((status != 3)) || rm -f "$WORK/$name.failed" # what began has passed, the rest had no time
  return "$status"
}
probe() { show=30 step probe 45 "$PY" benchmarks/gpu_probe.py $dry; }

device=cuda
odd=7
if [ "$dry" = --dry-run ]; then
  device=cpu
  odd=3
  gpu() { step "$1" "$2" "$PY" benchmarks/gpu.py --dry-run "${@:3}"; }
  tests() { step "$1" "$2" "$PY" -m pytest -q -p no:cacheprovider --collect-only "${@:3}"; }
fi
have() { command -v "$1" >/dev/null && [ $device = cuda ]; }

if [ -e "$packed" ]; then # times are those of now: what is newer was compiled in a step
  tar xmzf "$packed" -C "$TRITON_CACHE_DIR" || say "$packed: it could not be unpacked"
else
  say "no $packed: every kernel is compiled here, which takes minutes"
fi
rm -f "$logs"/*.log
case $call in
1)
  have nvidia-smi && step smi 10 nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv
  show=16 step facts 40 "$PY" benchmarks/gpu_facts.py $dry
  show=4 check check-1 1 50
  show=12 check check-2 2 70
  [ -e "$WORK/check-1.failed" ] || [ -e "$WORK/check-2.failed" ] && probe # what explains it
  show=24 gpu matmul 75 --part matmul --repetitions 5
  show=14 gpu variants 45 --part variants --repetitions 5
  [ -e "$logs/probe.log" ] || probe
  ;;
2)
  show=12 check check-4 4 50
  tests operations 45 tests/gpu/test_cuda.py -k "test_operations and 2"
  tests roles 35 tests/gpu/test_cuda.py -k "roles and tile0"
  tests replays 40 tests/gpu/test_cuda.py -k "replays and 2-fused_gather or replays and 2-all_reduce_low"
  tests processes 70 tests/gpu/test_cuda_processes.py \
    -k "memory_is_torchs or (operations and 2 and torch-stream) or does_not_come or dies_is"
  show=30 gpu ops 60 --part ops --repetitions 5
  show=8 gpu slow-link 40 --part slow-link --repetitions 5
  show=14 step host-cost 30 "$PY" benchmarks/host_cost.py \
    $([ $device = cuda ] && echo --gpu --ranks 1 --repetitions 5 || echo --no-launcher --repetitions 1)
  ;;
3)
  causes=("eager env CUDA_MODULE_LOADING=EAGER" "one-queue env CUDA_DEVICE_MAX_CONNECTIONS=1"
    "blocking env CUDA_LAUNCH_BLOCKING=1")
  have compute-sanitizer && causes+=("memcheck compute-sanitizer --tool memcheck")
  mapfile -t steps < <(cd "$WORK" && ls -tr ./*.failed 2>/dev/null) # in the order in which they failed
  runs=$((${#causes[@]} * ${#steps[@]}))
  for cause in "${causes[@]}"; do
    for failure in "${steps[@]}"; do
      share=$(((LIMIT - (SECONDS - began)) / slack / runs--)) # of what is left
      share=$((share < 20 ? 20 : share > 70 ? 70 : share))
      eval "again=(${cause#* } $(<"$WORK/$failure"))"
      again=("${again[@]/"$WORK"\/[12]\//"$logs"/}") # where JSON goes
      [[ $failure != ./check-* ]] || again+=(--seconds $((share * slack - 8))) # in place of the first one
      failure=${failure#./}
      show=20 step "${failure%.failed}-${cause%% *}" "$share" "${again[@]}"
    done
  done
  if ((${#steps[@]} == 0)); then
    show=12 check check-odd "$odd" 50 # as many ranks as no power of two has
    have ncu && show=40 step ncu 60 ncu --clock-control none --kill yes --set full \
      -k regex:all_gather_matmul -s 3 -c 1 \
      "$PY" benchmarks/gpu.py --part matmul --repetitions 1 --out "$logs/ncu.json"
    [ $device = cuda ] && gpu sanitizer 50 --part sanitizer
    show=8 gpu small 40 --part small --repetitions 5
  fi
  ;;
esac
rm -f "$logs/begun"
echo "-- call $call: $((SECONDS - began)) s; logs in $logs, ${packed_in:-not packed}"
cat "$summary"
exit "$failed"
