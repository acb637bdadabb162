#!/bin/bash
# Runs before a worker pod ends: Ray moves its Serve replicas to other nodes, and the script waits until they are gone.
# The pod's grace period bounds the time.
#   saturate-drain SECONDS
set -u
proc=${PROC:-/proc}

# Ray's own process has the id of this node as an argument.
node=$(cat "$proc"/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | sed -n 's/^--node[_-]id=//p' | head -n 1)
[ -n "$node" ] || exit 0

# With the reason "preemption" Ray accepts the deadline; with "idle" it may refuse.
ray drain-node --node-id "$node" --reason DRAIN_NODE_REASON_PREEMPTION \
  --reason-message "its pod is being deleted" --deadline-remaining-seconds "$1" || exit 0

while grep -qs '^ray::ServeReplica' "$proc"/[0-9]*/cmdline; do
  sleep 1
done
