#!/usr/bin/env bash
# sbatch docs/clusters/slurm.sh configs/llama3-8b.yaml
# One process for each GPU; the same job goes on where it stopped, as often as its time runs out or a host is lost.
#SBATCH --job-name=jaxmem
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300      # five minutes before the end, to every process: save and leave with 75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -uo pipefail
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"    # srun does not take it over by itself
config="${1:?give a config: sbatch docs/clusters/slurm.sh configs/NAME.yaml}"

srun --kill-on-bad-exit=0 jaxmem train "$config" mesh.fsdp=-1 cluster.heartbeat_timeout=30
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
