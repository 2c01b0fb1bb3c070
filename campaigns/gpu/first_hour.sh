#!/bin/bash
# The first hour on a borrowed GPU: docs/benchmarks/gpu-first-hour.md says what each command tells.
#
#     campaigns/gpu/first_hour.sh works|numbers|quantized|more|served|all FOLDER [--smoke]
#
# Each of the first five stands alone and ends within ten minutes; `all` is one after the other. A command leaves
# results.md, results.json, clocks.csv and all.tgz in FOLDER, written anew while it runs. Packages that the machine
# lacks may lie as wheels in .whl/ at the root of the repository. Nothing is fetched.
set -o pipefail
cd "$(dirname "$0")/../.." || exit 1
what=$1 out=$2 smoke=$3
case "$what" in works | numbers | quantized | more | served | all) ;; *) sed -n '2,9p' "$0"; exit 2 ;; esac
[ -n "$out" ] || { sed -n '2,9p' "$0"; exit 2; }
if [ "$what" = all ]; then
  for each in works numbers quantized more served; do "$0" "$each" "$out/$each" $smoke || failed=1; done
  exit ${failed:-0}
fi
python=$(command -v python3 || command -v python)
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
work=$(mktemp -d) && mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
copy() {
  cp -f "$work"/results.md "$work"/results.json "$out"/ 2>/dev/null
  for kind in md json; do # a folder of its own, since each measurement writes its results anew
    cp -f "$work/tuned/results.$kind" "$out/tuned.$kind" 2>/dev/null
  done
}
(while sleep 4; do copy; done) &
copier=$!
if [ -z "$smoke" ]; then
  (nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv -l 1 >"$out/clocks.csv") &
  clocks=$!
fi
finish() {
  kill $copier $clocks 2>/dev/null
  copy
  tar czf "$out/all.tgz" -C "$work" . && rm -rf "$work" "$wheels"
}
trap finish EXIT
if ls .whl/*.whl >/dev/null 2>&1; then
  wheels=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$wheels" .whl/*.whl
  export PYTHONPATH=$wheels
fi
# Once, before ten processes do it at the same time from a cold disk.
timeout 100 "$python" -c 'import torch, triton, transformers; torch.cuda.is_available() and torch.ones(1).cuda()
print(torch.__version__, triton.__version__, transformers.__version__)'
measure() { # SECONDS PARTS [FOLDER BELOW]
  timeout $(($1 + 20)) "$python" -m campaigns.gpu --out "$work/$3" --within "$1" --parts "$2" $smoke || failed=1
}
[ -z "$smoke" ] || patience=4
case "$what" in
  works)
    measure $((400 * ${patience:-1})) first,device,tokens,steps-qwen3-0.6b,host
    if command -v compute-sanitizer >/dev/null; then
      timeout 110 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$python" -m campaigns.gpu.first.group attention-bfloat16 --notes "$work/memcheck.jsonl" 2>&1 |
        tail -40 >"$work/memcheck.txt" || failed=1
    fi ;;
  numbers)
    measure $((560 * ${patience:-1})) device,steps-llama-3.1-8b,throughput-llama-3.1-8b,throughput-qwen3-0.6b,anchors ;;
  quantized)
    measure $((440 * ${patience:-1})) device,codes,tokens-quantized,steps-llama-3.1-8b-int4,steps-llama-3.1-8b-fp8 ;;
  more)
    measure $((400 * ${patience:-1})) device,steps-qwen3-0.6b-full,steps-llama-3.1-8b-full,pool
    measure $((150 * ${patience:-1})) tune tuned ;;
  served)
    measure $((520 * ${patience:-1})) serving,serving-llama-3.1-8b,ranks ;;
esac
exit ${failed:-0}
