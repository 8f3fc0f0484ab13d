#!/bin/bash
# Exits with 0 if the service of this container is ready. Builtins of the shell alone: no other process is started.
# Usage: ready.sh VARIABLE DEFAULT: where the service's metrics_port is set, and what it is if it is not.
exec 3<>"/dev/tcp/127.0.0.1/${!1:-$2}" || exit 1
printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
read -r -t 5 status <&3
[[ $status == *" 200 "* ]]
