#!/bin/bash
# Requeues a job as long as it makes progress. A job file sources this, and starts srun with
#   requeue_on_signal COMMAND    which requeues it after its time limit or a preemption
#   requeue_on_failure COMMAND   which requeues it after any failure of COMMAND
# An elastic job also runs the second on each node: slurm/requeue.sh COMMAND

job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

ask() {  # a busy Slurm may not answer at once
  for _ in {1..12}; do
    "$@" && return
    sleep 5
  done
  return 1
}

preempted() {  # the record has a date, such as 2026-11-24T21:44:19, or else None
  [[ $(SLURM_TIME_FORMAT=standard ask scontrol show job "$job") == *PreemptTime=2* ]]
}

# Requeues the job, unless two of its lives in a row have saved nothing at --snapshot_path, or ten
# have never saved anything. Preemptions do not count.
requeue() {
  local snapshots=(snapshot.pt snapshot) argument previous  # the defaults
  for argument in "$@"; do
    [[ $previous != --snapshot_path ]] || snapshots=("$argument")
    [[ $argument != --snapshot_path=* ]] || snapshots=("${argument#*=}")
    previous=$argument
  done
  # A file, or a folder with complete snapshots in it: each save changes one of these numbers.
  local saved state=none
  saved=$(find -H "${snapshots[@]}" -type f -printf '%d %f %i %s %T@\n' 2> /dev/null || true)
  saved=$(grep -E '^0 |^. \.metadata ' <<< "$saved" | sort)
  [[ ! $saved ]] || state=$(cksum <<< "$saved")

  local lives=.lives-without-progress-$job life=${SLURM_RESTART_COUNT:-0} limit=10 count
  ((life > 0)) || rm -f "$lives"  # of an earlier job with the same number
  if ! preempted; then
    echo "life $life: $state" >> "$lives"  # several nodes of a life may do so
  elif [[ $state != none ]] && ! grep -qs ": $state$" "$lives"; then
    echo "preempted: $state" >> "$lives"  # it has saved this
  fi
  count=$(grep -s ": $state$" "$lives" | sort -u | wc -l)
  if [[ $state != none ]]; then
    limit=2
    count=$((count - 1))  # the first of them has saved it
  fi
  if ((count >= limit)); then
    echo "not requeued: $limit lives in a row have saved nothing at ${snapshots[*]}:" \
      "is --snapshot_path the same in each?" >&2
    return 1
  fi
  ask scontrol requeue "$job"
}

run() {  # in the background: while a command runs in the foreground, Bash runs no trap
  set +e  # a failure does not end the job file at once: lines below may look at why
  stopped=
  trap 'stopped=USR1; until scancel --signal=TERM "$job"; do sleep 5; done' USR1
  "$@" &
  while kill -0 $! 2> /dev/null; do wait $!; done  # a signal interrupts wait
  wait $!
}

requeue_on_failure() {
  run "$@" && exit
  [[ $stopped != TERM ]] && requeue "$@"
}

requeue_on_signal() {
  run "$@" && exit
  if [[ $stopped == USR1 ]] || preempted; then
    requeue "$@"
    exit
  fi
  return 1
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then  # executed on a node, not sourced
  trap '[[ $stopped ]] || kill $!; stopped=TERM' TERM  # Slurm may signal this shell only
  requeue_on_failure "$@"
fi
