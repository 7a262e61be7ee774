#!/bin/sh
# The batch script of a run. It runs on the first node of the job, and again there whenever Slurm requeues the job.
cc_run=/opt/llm/runs/20261127-101500-sft-1a2b
cc_left=1800
# clusterctl checks the nodes first, and writes their plans. An earlier job of the run may have left its number there.
until read -r cc_job 2>/dev/null <"$cc_run/slurm/go" && [ "$cc_job" = "$SLURM_JOB_ID" ]; do
    [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || exit 0 # the run was stopped while the job was in the queue
    [ "$cc_left" -gt 0 ] || exit 1
    cc_left=$((cc_left - 1))
    sleep 1
done
exec >>"$cc_run/slurm/log" 2>&1
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restarts: ${SLURM_RESTART_COUNT:-0}"
# shellcheck disable=SC2329 # the traps call it
cc_agent() {
    read -r cc_plan <"$cc_run/slurm/node-$SLURMD_NODENAME" && read -r cc_release <"$cc_run/release" &&
        "$cc_release/bin/python" -IS "$cc_run/agent" "$@" "$cc_run/$cc_plan" </dev/null &
}
# shellcheck disable=SC2329
cc_save() { # the job's time is almost over
    cc_agent stop --save --who 'Slurm: the time of the job is almost over'
}
trap : TERM USR1 # the agents get SIGTERM too; this waits for them
# One agent on each node, as a step of the job: Slurm counts and ends what it starts.
cc_restart=${SLURM_RESTART_COUNT:-0}
cc_nodes=2
srun --nodes="$cc_nodes" --ntasks="$cc_nodes" '--ntasks-per-node=1' '--cpu-bind=none' '--mem=0' '--input=none' '--kill-on-bad-exit=0' '--wait=0' '--gpus-per-node=8' sh -c 'read -r cc_plan <"$1/slurm/node-$SLURMD_NODENAME" && read -r cc_release <"$1/release" ||
    { echo "$SLURMD_NODENAME: the run has no plan here" >&2; exit 1; }
cc_run=$1
if [ "$2" -gt 0 ]; then set -- --resume; else set --; fi
exec "$cc_release/bin/python" -IS "$cc_run/agent" run "$@" "$cc_run/$cc_plan" >/dev/null
' clusterctl /opt/llm/runs/20261127-101500-sft-1a2b "$cc_restart" &
cc_srun=$!

trap cc_save USR1 # not before: it starts a process, whose pid is in $! then
while :; do
    wait "$cc_srun"
    cc_rc=$?
    [ "$cc_rc" -gt 128 ] || break # else a signal has ended the wait, or srun
    kill -0 "$cc_srun" 2>/dev/null || { wait "$cc_srun"; cc_rc=$?; break; }
done
exit "$cc_rc"
