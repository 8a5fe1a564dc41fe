#!/usr/bin/env bash
# All that only a GPU can tell, in one command under 9 minutes:
#
#     PYTHONPATH=. benchmarks/gpu.sh [OUT]        OUT: a folder, benchmarks/results/gpu
#
# Needs jax, flax, optax, orbax and numpy; no network, no install. One JSON line a part
# in OUT/step.jsonl and OUT/kernels.jsonl, what was printed in OUT/PART.log. What is there
# of the same commit is not made again: called once more, it goes on where it was cut off.
# Parts compile at once, and measure in turn (turns.py). Without a GPU it runs at toy size,
# so that it is known to work. PYTHON names the interpreter, COMMIT the commit where there
# is no git; SECONDS_LEFT (520) is the whole time: parts that would not fit are said.
# OUT/*.config.json are the kernels' figures for this card: checked in as
# kernels/*/config.json they make it take the kernels.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-520}))
export PYTHONPATH=. PYTHONUNBUFFERED=1
# jax takes three quarters of the memory by default, less than some parts need.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}
export XLA_PYTHON_CLIENT_PREALLOCATE=false
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TURNS=$scratch/turns
# What one part has found the fastest way to multiply, the others take as well.
export JAX_COMPILATION_CACHE_DIR=$scratch/cache
jobs=$(($(nproc) > 3 ? $(nproc) - 2 : 1))
mkdir -p "$out"
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
if [ "$(cat "$out/commit" 2>/dev/null)" != "$commit" ]; then
    rm -f "$out"/*.jsonl "$out"/*.log "$out"/*.done
    echo "$commit" >"$out/commit"
fi

gib=$("$python" -c '
import jax
stats = jax.devices()[0].memory_stats() or {}
print(stats.get("bytes_limit", 0) >> 30 if jax.default_backend() == "gpu" else 0)')
if [ "${gib:-0}" -gt 0 ]; then
    small=(--model 350m --batch 128 --seq 256 --steps 12 --seconds 8)
    large=(--model 1b --seq 1024 --steps 8 --seconds 8)
    # The largest that fit the compiled program (docs/results.md), which have to run.
    if [ "$gib" -gt 125 ]; then # 141 GB
        large+=(--batch 24)
        batches=(exact:305 remat_nothing:6099 int4:2317 compact_int4:2345)
    else # 80 GB, or whatever fails here says so
        large+=(--batch 16)
        batches=(exact:167 remat_nothing:3225 int4:1286 compact_int4:1314)
    fi
    train=(--model 60m --steps 300 --batch-size 64 --seq-len 256)
    on_gpu=1
else
    echo "no GPU: toy size"
    small=(--model tiny --batch 4 --seq 64 --dtype float32 --steps 3 --seconds 5)
    large=("${small[@]}")
    batches=(int4:8)
    train=(--model tiny --steps 4 --batch-size 2 --seq-len 32)
    on_gpu=
fi

limited() { # NAME SECONDS COMMAND...: within the time that is left
    local name=$1 most=$2 left=$((end - SECONDS))
    shift 2
    [ -e "$out/$name.done" ] && return 0
    if [ "$left" -lt 20 ]; then
        echo "$name: not run, no time left"
    elif timeout "$((left < most ? left : most))" "$@" >"$out/$name.log" 2>&1; then
        echo "$name: done at $SECONDS s"
        touch "$out/$name.done"
        return 0
    else
        echo "$name: FAILED with status $?, see $out/$name.log"
        tail -n 3 "$out/$name.log"
    fi
    touch "$scratch/failed"
    return 1
}

beside() { # COMMAND...: in the background, when there is a place
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    "$@" &
}

step() { # NAME OPTIONS...: one row of step.jsonl
    local name=$1
    shift
    [ -e "$out/$name.done" ] && return 0
    if limited "$name" 400 nice "$python" benchmarks/step.py --part "$name" "$@"; then
        grep '^{"part' "$out/$name.log" >>"$out/step.jsonl"
    fi
}

of() { # NAME: the method's options
    case $1 in
    exact) echo "--method exact" ;;
    remat_* | compact_remat_*) echo "--checkpoint ${1#*remat_}" ;;&
    remat_*) echo "--method remat" ;;
    compact_*) echo "--method compact --rank 0.25" ;;&
    compact_remat_*) ;;
    compact_*) echo "--checkpoint ${1#compact_}" ;;
    compact) echo "--method compact --rank 0.25" ;;
    galore) echo "--method galore --rank 0.25" ;;
    *) echo "--method exact --checkpoint $1" ;;
    esac
}

losses_of() { # NAME: at equal steps
    local folder=$scratch/train_$1
    [ -e "$out/train_$1.done" ] && return 0
    # shellcheck disable=SC2046
    limited "train_$1" 150 "$python" train/pretrain.py $(of "$1") "${train[@]}" \
        --out "$folder" && cp "$folder"/*/metrics.jsonl "$out/train_$1.jsonl"
}

# What is not timed, while the first steps compile: none measures until `timed` exists.
touch "$TURNS"
(
    flock --shared 9
    until [ -e "$scratch/timed" ]; do sleep .2; done
) 9<"$TURNS" &
(
    limited tests 170 "$python" tests/gpu/test_gpu.py &
    for name in exact compact int4; do
        losses_of "$name" &
    done
    # The allocator's peak beside that of the compiled program: within 2 %.
    if [ -n "$on_gpu" ]; then
        export XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=.3
        limited memory 90 "$python" benchmarks/memory.py --method int4 --measure &
    fi
    wait
    touch "$scratch/timed"
) &
if [ -z "$on_gpu" ]; then wait; fi # of few cores
if [ -n "$on_gpu" ]; then
    # First, since they compile most. What they time beside others no one else reads.
    crowded=$scratch/crowded
    JAXCOMPACT_CACHE=$crowded beside step plan "${small[@]}" --plan recomputed
    JAXCOMPACT_CACHE=$crowded beside step 1b_plan "${large[@]}" --plan recomputed
fi
for name in exact int4 remat_nothing compact_int4 compact remat_dots_no_batch; do
    # shellcheck disable=SC2046
    beside step "$name" "${small[@]}" $(of "$name")
    # shellcheck disable=SC2046
    beside step "1b_$name" "${large[@]}" $(of "$name")
done
if [ -n "$on_gpu" ]; then
    # int4 takes the kernels that were measured to be faster; here XLA's code alone.
    # shellcheck disable=SC2046
    beside step int4_xla "${small[@]}" $(of int4) --kernels xla
fi
wait
if [ ! -e "$out/kernels.done" ]; then
    # The other parts, before and after, run with the figures that are checked in.
    for file in kernels/*/config.json; do cp --parents "$file" "$scratch"; done
    if limited kernels 200 "$python" benchmarks/kernels.py --json ${on_gpu:+--tune}; then
        for file in kernels/*/config.json; do
            cp "$file" "$out/$(basename "$(dirname "$file")").config.json"
        done
    fi
    cp -r "$scratch/kernels" .
    # Those that there was time for.
    [ ! -e "$out/kernels.log" ] || grep '^{' "$out/kernels.log" >"$out/kernels.jsonl"
fi
for pair in "${batches[@]}"; do # alone, with all of the card's memory
    # shellcheck disable=SC2046
    XLA_PYTHON_CLIENT_PREALLOCATE=${on_gpu:+true} \
        step "largest_${pair%:*}" "${small[@]}" $(of "${pair%:*}") \
        --batch "${pair#*:}" --steps 1
done
for name in int8 int3 int2 offload galore remat_dots compact_remat_nothing; do
    # shellcheck disable=SC2046
    beside step "$name" "${small[@]}" $(of "$name")
done
beside step compact_half_4bit "${small[@]}" --method compact --rank 0.5 --bits 4
beside step compact_gaussian "${small[@]}" --method compact --rank 0.25 --kind gaussian
wait
# Each action of a plan, modelled and measured.
[ -z "$on_gpu" ] ||
    limited actions 150 "$python" benchmarks/plans.py actions LLaMA-350M
# Last: it disturbs all else that uses the card.
if [ -n "$on_gpu" ] && command -v compute-sanitizer >/dev/null; then
    mapfile -t checks < <(sed -n 's/^def \(test_.*_are_xlas\).*/\1/p' tests/gpu/test_gpu.py)
    SMALL=1 XLA_FLAGS=--xla_gpu_autotune_level=0 limited sanitizer 120 \
        compute-sanitizer --error-exitcode 9 "$python" tests/gpu/test_gpu.py "${checks[@]}"
fi
"$python" benchmarks/report.py "$out"
[ ! -e "$scratch/failed" ]
