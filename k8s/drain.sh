#!/bin/bash
# Before a worker pod ends: have Ray move its Serve replicas to other nodes, and wait until they have gone.
# The pod's grace period bounds all of it.
#   saturate-drain SECONDS
set -u
proc=${PROC:-/proc}

# The id of this node is an argument of Ray's own process.
node=$(cat "$proc"/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | sed -n 's/^--node[_-]id=//p' | head -n 1)
[ -n "$node" ] || exit 0

# Preemption, to Ray, is a node that goes at that time whatever it does until then; "idle" it could refuse.
ray drain-node --node-id "$node" --reason DRAIN_NODE_REASON_PREEMPTION \
  --reason-message "its pod is being deleted" --deadline-remaining-seconds "$1" || exit 0

while grep -qs '^ray::ServeReplica' "$proc"/[0-9]*/cmdline; do
  sleep 1
done
