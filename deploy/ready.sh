#!/bin/bash
# Exits with 0 if the service of this container is ready, at once, or else as soon as it is: it waits for that, so that
# the end of a start is noticed when it comes, not at the next check. Builtins of the shell alone: no program is started.
# Usage: ready.sh VARIABLE DEFAULT SECONDS: where the service's metrics_port is set, what it is if it is not, how long to
# wait.
port=${!1:-$2} most=$3

is_ready() {
  local status
  { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 1
  printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
  read -r -t 5 status <&3
  exec 3>&-
  [[ $status == *" 200 "* ]]
}

is_ready && exit 0
exec 4<> <(:)  # nothing ever comes from it, so that to read from it is to sleep
until ((SECONDS >= most)); do
  read -r -t 0.1 -u 4
  is_ready && exit 0
done
exit 1
