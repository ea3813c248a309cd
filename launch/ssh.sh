#!/usr/bin/env bash
# Train on two to eight machines without a scheduler. Ctrl-C saves on all; the same command resumes.
#
#     launch/ssh.sh node1,node2 --epochs 10                                   flags of train_ddp.py
#     NPROC=8 MIN=2 launch/ssh.sh node1,node2,node3 --run-dir /shared/run   each, fewest machines
#
# All have this folder at the same place and the same Python packages, and let you in without a password. They
# meet at the first one: the others must reach it by that name. A machine that dies is done without.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
IFS=, read -ra hosts <<< "${1:-}"
if [ "${#hosts[@]}" -lt 2 ] || [ "${#hosts[@]}" -gt 8 ]; then
    printf 'error: %s machines are named, wanted are 2 to 8\n       launch/ssh.sh node1,node2 --epochs 10\n' \
        "${#hosts[@]}" >&2
    exit 2
fi
shift
meeting=${hosts[0]#*@}:${PORT:-29400}
words=(launch/torchrun.py --nnodes="${MIN:-1}:${#hosts[@]}" --nproc_per_node="${NPROC:-1}" --rdzv_backend=c10d
       --rdzv_id="ssh-$(date +%s)-$$" --rdzv_endpoint="$meeting" --rdzv_conf=is_host=0 train_ddp.py "$@")

# Runs Python there until it ends, or asks it to leave when our end of its standard input is closed.
# shellcheck disable=SC2016
there='cd -- "$1" || exit 2; python=$2; shift 2; exec 3<&0
[ "$python" ] || python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
"$python" "$@" < /dev/null 3<&- & training=$!
{ cat; kill -TERM "$training"; } <&3 > /dev/null 2>&1 & watcher=$!
exec 3<&-; wait "$training"; code=$?; kill "$watcher" 2> /dev/null; exit "$code"'
on() {  # HOST WORDS...
    local host=$1
    shift
    exec ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5 -- "$host" \
        "$(printf '%q ' bash -c "$there" bash "$root" "${PYTHON:-}" "$@")" 6<&- 7<&- 8>&- 9>&-
}

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
mkfifo "$folder/store" "$folder/agents"
exec 8<> "$folder/store" 9<> "$folder/agents"         # to close one of them asks its readers to leave
exec 6< "$folder/store" 7< "$folder/agents"           # opened here: later, nobody may hold the other end
trap 'exec 9>&-' INT TERM HUP USR1
serve() {  # one that dies is started again; one that is asked to leave ends with 0
    until (on "${hosts[0]}" launch/store.py "$meeting" <&6 > "$folder/said"); do
        { kill -0 $$ && grep -q "store on" "$folder/said"; } 2> /dev/null || exit 2
        sleep 1
    done
}
serve 8>&- 9>&- & store=$!
until grep -q "store on" "$folder/said"; do kill -0 "$store" || exit 2; sleep 0.1; done 2> /dev/null
echo "$(< "$folder/said"); to join later, on another machine: python ${words[*]}" || :  # the log may be full
agents=() result=''
for host in "${hosts[@]}"; do
    on "$host" "${words[@]}" <&7 & agents+=($!)
done
for pid in "${agents[@]}"; do
    while kill -0 "$pid" 2> /dev/null; do wait "$pid" || :; done    # a trap ends a wait early
    wait "$pid" && code=0 || code=$?
    case $code:$result in
        *: | 0:* | *:255) result=$code ;;              # 255: that machine was not reached
    esac
done
exit "$result"                                         # the end of this shell asks the store to leave too
