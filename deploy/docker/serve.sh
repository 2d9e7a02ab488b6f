#!/bin/sh
# Runs a service of compose, whose restart policies know no exit codes: what another start would not cure ends with 0 here.
# Codes: 2 wrong settings, 3 it gave up, 5 too much was set aside (docs/run-books.md). The reason is in the lines before.
# A service that has run for ten minutes had the right settings: then 2 is something that may pass.
began=$(date +%s)
service='' stopped=''
stop() {
  stopped=yes
  [ -z "$service" ] || kill -TERM "$service"
}
trap stop TERM INT
sluice "$@" &
service=$!
[ -z "$stopped" ] || stop
code=0
wait "$service" || code=$?
while kill -0 "$service" 2>/dev/null; do # a signal ended the wait, not the service
  code=0
  wait "$service" || code=$?
done
[ "$code" != 2 ] || [ $(($(date +%s) - began)) -lt 600 ] || exit 2
case $code in
2 | 3 | 5)
  echo "sluice $1 ended with exit code $code, for good: it is not started again until you start it" >&2
  exit 0
  ;;
esac
exit "$code"
