#!/usr/bin/env bash
# bash scripts/bench/slurm_check.sh: docs/clusters/slurm.sh under a real Slurm, on one host without GPUs.
#
# Starts munged, slurmctld and two slurmd on loopback, with their files in a temporary directory, and submits the script
# three times: two tasks on one node and SIGUSR1, two tasks of which one is killed, one task on each of two nodes and
# SIGUSR1. Each job must be queued again, resume and complete. Needs root, and the packages slurm-wlm and munge.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" > /dev/null || { echo "$program is not installed; run apt-get install slurm-wlm munge"; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd needs root"; exit 2; }
command -v jaxmem > /dev/null || { echo "jaxmem is not on PATH; activate its environment"; exit 2; }

# The nodes' names are looked up in /etc/hosts, of which only these processes see another content.
[ "${1:-}" = inside ] || exec unshare --mount bash "$0" inside
place=$(mktemp -d)
{ cat /etc/hosts; echo "127.0.0.1 node1 node2"; } > "$place/hosts"
mount --bind "$place/hosts" /etc/hosts
chmod 755 "$place"
mkdir "$place"/{state,spool1,spool2,text,log}
daemons=()
cleanup() {
    scancel --user=root > "$place/log/scancel" 2>&1 || true
    for _ in $(seq 20); do [ -z "$(squeue --noheader 2> /dev/null)" ] && break; sleep 1; done
    kill "${daemons[@]}" 2> /dev/null || true
    wait 2> /dev/null || true
    umount /etc/hosts
    rm -rf "$place"
}
trap cleanup EXIT

dd if=/dev/urandom of="$place/munge.key" bs=1024 count=1 status=none
chmod 400 "$place/munge.key"
munged --foreground --force --key-file="$place/munge.key" --socket="$place/munge.socket" --num-threads=2 \
    --pid-file="$place/munge.pid" --seed-file="$place/munge.seed" --log-file="$place/log/munged" > "$place/log/munged.out" 2>&1 &
daemons+=($!)

cat > "$place/slurm.conf" << CONF
ClusterName=check
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
GresTypes=gpu
KillWait=2
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd.%n.pid
SlurmdSpoolDir=$place/spool.%n
StateSaveLocation=$place/state
SlurmctldLogFile=$place/log/slurmctld
SlurmdLogFile=$place/log/slurmd.%n
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=16818 CPUs=$(nproc) Gres=gpu:1 State=UNKNOWN
NodeName=node2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=16819 CPUs=$(nproc) Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP
CONF
echo "Name=gpu File=/dev/null" > "$place/gres.conf"
export SLURM_CONF="$place/slurm.conf"
sleep 1
slurmctld -D > "$place/log/slurmctld.out" 2>&1 &
daemons+=($!)
for node in node1 node2; do
    slurmd -D -N "$node" > "$place/log/$node.out" 2>&1 &
    daemons+=($!)
done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --Node --format=%t 2> /dev/null | grep -c idle)" = 2 ] && break
    sleep 1
done
sinfo --Node --format="%N %t" || { tail "$place"/log/*; exit 1; }

for number in $(seq 40); do seq "$number" $((number + 400)) > "$place/text/$number.txt"; done
write_config() {
    cat > "$place/$1.yaml" << CONFIG
name: $1
output: $place/runs
model: {preset: tiny, layers: 1, embed: 32, mlp: 64, heads: 4, kv_heads: 4}
data: {source: text, path: $place/text, sequence_length: 32}
batch: {global_size: 8}
train: {steps: $2, log_every: 1}
checkpoint: {every: 10}
cluster: {preflight: false}
CONFIG
}

export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1
failed=0
check() { # name, steps, "usr1" or "kill", options of sbatch
    local name=$1 steps=$2 event=$3 job state=""
    shift 3
    write_config "$name" "$steps"
    job=$(sbatch --parsable --job-name="$name" --output="$place/$name.log" --time=20 --cpus-per-task=1 "$@" \
        "$root/docs/clusters/slurm.sh" "$place/$name.yaml")
    local rows="$place/runs/$name/metrics.jsonl"
    for _ in $(seq 600); do [ -s "$rows" ] && [ "$(wc -l < "$rows")" -ge 20 ] && break; sleep 0.2; done
    echo "$name: job $job, $(wc -l < "$rows") of $steps steps; $event"
    case $event in
        usr1) scancel --signal=USR1 "$job.0" ;;
        kill) kill -KILL "$(pgrep -f "jaxmem train $place/$name.yaml" | while read -r pid; do
            tr '\0' '\n' < "/proc/$pid/environ" | grep -q '^SLURM_PROCID=1$' && echo "$pid"; done | head -1)" ;;
    esac
    for _ in $(seq 300); do
        state=$(squeue --noheader --states=all --job="$job" --format="%T" || true)
        [ "$state" = PENDING ] && scontrol update job="$job" starttime=now  # Slurm waits two minutes before a requeued job
        case $state in COMPLETED | FAILED | TIMEOUT | CANCELLED | NODE_FAIL) break ;; esac
        sleep 1
    done
    local restarts rows_at_end
    restarts=$(scontrol show job "$job" | grep -o "Restarts=[0-9]*")
    rows_at_end=$(wc -l < "$rows")
    if [ "$state" = COMPLETED ] && [ "$restarts" = Restarts=1 ] && [ "$rows_at_end" = "$steps" ]; then
        echo "$name: ok: $state, $restarts, $rows_at_end of $steps steps in metrics.jsonl"
    else
        echo "$name: FAILED: $state, $restarts, $rows_at_end of $steps steps"
        failed=1
    fi
    grep -v "^step" "$place/$name.log" | tail -25 | sed 's/^/    /'
}

steps=${STEPS:-3000}
check two-tasks-usr1 "$steps" usr1 --nodes=1 --ntasks-per-node=2 --gpus-per-node=1
check two-tasks-kill "$steps" kill --nodes=1 --ntasks-per-node=2 --gpus-per-node=1
check two-nodes-usr1 "$steps" usr1 --nodes=2 --ntasks-per-node=1 --gpus-per-node=1
exit "$failed"
