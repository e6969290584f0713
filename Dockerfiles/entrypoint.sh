#!/bin/sh
# Runs one service in a container: `entrypoint.sh ROLE MODULE [--field value]...`. The node is named after the container,
# so that replicas differ; its data plane listens on every address and is reached at the container's own.
set -eu
role=$1 module=$2
shift 2
address=$(hostname -i | cut -d' ' -f1)
exec python -m "services.$module" --node "$role-$(hostname)" --bind 0.0.0.0 --advertise "$address" "$@"
