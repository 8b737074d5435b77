#!/bin/bash
# Convert a checkpoint with a Slurm job array, then publish the result with a job that waits for all of it.
#
#     SHARDS=8 ./slurm.sh /models/Qwen3-30B-A3B-GPTQ /models/qwen3-marlin --gpu H100
#
# Source and destination lie on a file system that all nodes see. To run failed tasks again, submit the same
# command: tasks of finished shards end at once.
#
#SBATCH --job-name=moeq
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=moeq-%A_%a.log
set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then # on the login node: submit
    array=$(sbatch --parsable --array="0-$((${SHARDS:-8} - 1))" "$0" "$@")
    sbatch --dependency="afterok:$array" --cpus-per-task=2 --mem=4G --output=moeq-finalize-%j.log "$0" "$@"
elif [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # a task of the array: its shard
    moeq convert "$@" --shard slurm-array --workers "${SLURM_CPUS_PER_TASK:-1}"
else # the job that waited: all shards are there
    moeq finalize "$2"
fi
