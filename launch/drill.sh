#!/usr/bin/env bash
# A demonstration on this machine, about a minute without a GPU: a training loses a process, shrinks, grows,
# and ends as if nothing had happened.
#
#     launch/drill.sh                     in a folder of its own below runs/
#     launch/drill.sh runs/my-drill
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/launch/setup.sh"
set_up "$root/requirements.txt"
run=$(realpath -m -- "${1:-runs/drill-$(date +%s)}")
[ ! -e "$run" ] || fail "$run is there already" "name a new folder"
agent=''
trap '[ -z "$agent" ] || kill "$agent" 2> /dev/null' EXIT

say() { printf '\n== %s\n' "$*"; }

train() {  # with so many processes
    "$root/launch/local.sh" --nproc "$1" --run-dir "$run" --epochs 4 --audit --log-every 50 --no-tensorboard &
    agent=$!
}

reach() {  # waits until the training has made so many steps more
    local from
    from=$(steps)
    while [ "$(steps)" -lt $((from + $1)) ]; do
        kill -0 "$agent" 2> /dev/null || fail "the training has ended too early" "its last lines say why"
        sleep 0.2
    done
}

steps() {
    grep -o '"step": [0-9]*' "$run/metrics.jsonl" 2> /dev/null | tail -n 1 | grep -o '[0-9]*$' || echo 0
}

stop() {
    kill "$agent"
    wait "$agent" || [ $? = 143 ] || fail "the training did not stop" "its last lines say why"
}

say "two processes train"
train 2
reach 100
say "one of them is killed: the other one saves the step it has made, and both start again"
kill -9 "$(pgrep -P "$agent" | tail -n 1)"
reach 100
say "the job is asked to leave: it saves; the same command goes on, with one process"
stop
train 1
reach 100
say "and with three, to the end"
stop
train 3
wait "$agent" || fail "the training has failed" "its last lines say why"
agent=''
say "what happened: python -m common.ledger $run"
cd "$root" && "$PYTHON" -m common.ledger "$run"
say "what each process trained on, against an undisturbed run: python -m common.ledger $run --audit"
"$PYTHON" -m common.ledger "$run" --audit
