#!/usr/bin/env bash
# sbatch docs/clusters/slurm.sh configs/llama3-8b.yaml
# One process per GPU. When the time limit is reached or a host is lost, the job is queued again and resumes the run.
#SBATCH --job-name=jaxmem
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300      # five minutes before the time limit every process gets SIGUSR1: the run saves and exits with 75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -uo pipefail
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"    # srun does not inherit it from sbatch
config="${1:?give a config: sbatch docs/clusters/slurm.sh configs/NAME.yaml}"

srun --kill-on-bad-exit=0 jaxmem train "$config" mesh.fsdp=-1 cluster.heartbeat_timeout=30
code=$?

# srun returns the largest code of all processes. If a process was killed, that is 137 and not the 75 of the others. A
# process that is killed for its memory would be killed again, so this is repeated five times at most. 130 is Ctrl-C.
killed=$(( code > 128 && code != 130 && ${SLURM_RESTART_COUNT:-0} < 5 ))
if [ "$code" -eq 75 ] || [ "$killed" -eq 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
