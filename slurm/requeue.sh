#!/bin/bash
# Requeues a job that its time limit or a failure has ended, as long as it makes progress:
#   slurm/requeue.sh JOB [SCRIPT AND ITS ARGUMENTS]
# It gives up after two such lives in a row without a newer snapshot at --snapshot_path, or after
# ten if there is none at all. Preemptions do not count.

set -eo pipefail
job=$1
snapshots=(snapshot.pt snapshot)  # the defaults
for argument in "$@"; do
  [[ $previous == --snapshot_path ]] && snapshots=("$argument")
  [[ $argument == --snapshot_path=* ]] && snapshots=("${argument#*=}")
  previous=$argument
done
retry() {  # a busy Slurm may not answer at once
  for seconds in 5 5 0; do
    "$@" && return
    sleep "$seconds"
  done
  return 1
}
record=$(SLURM_TIME_FORMAT=standard retry scontrol show job "$job")
start=$(grep -oP ' StartTime=\K\S+' <<< "$record")
lives=.lives-without-progress-$job
# A file, or a folder with a complete snapshot in it.
newer=$(find -H "${snapshots[@]}" -type f -newermt "$start" -printf '%d %f\n' 2> /dev/null || true)
if grep -qE '^0 |^. \.metadata$' <<< "$newer"; then
  rm -f "$lives"
elif [[ $record != *PreemptTime=2* ]]; then  # a date, such as 2026-11-24T21:44:19, or else None
  echo "${SLURM_RESTART_COUNT:-0}" >> "$lives"  # several nodes of a life may do so
  limit=10
  [[ -e ${snapshots[0]} || -e ${snapshots[-1]} ]] && limit=2
  if (($(sort -u "$lives" | wc -l) >= limit)); then
    echo "not requeued: $limit lives in a row have saved nothing at ${snapshots[*]}:" \
      "is --snapshot_path the same in each?" >&2
    exit 1
  fi
fi
retry scontrol requeue "$job"
