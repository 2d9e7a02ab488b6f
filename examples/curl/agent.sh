#!/bin/sh
# Plays one episode of a run with curl, and rewards it: agent.sh [URL of the gateway]. Many, 16 at a time, until the run has ended:
#   yes http://127.0.0.1:7115 | xargs -n 1 -P 16 sh examples/curl/agent.sh
# xargs ends when this script exits with 255. Set SLUICE_TOKEN where the run asks for a token.
gateway=${1:-${SLUICE_GATEWAY_URL:-http://127.0.0.1:7115}} # an evaluation sets SLUICE_GATEWAY_URL

# post PATH KEY BODY: curl waits while the gateway starts, is busy or has nothing on offer. The last header says that the same body is
# the same request, so that a repeated one is sampled once.
post() {
  curl --silent --fail-with-body --max-time 300 --retry 60 --retry-delay 1 --retry-max-time 60 --retry-connrefused \
    "$gateway$1" -H "authorization: Bearer $2" -H "content-type: application/json" -H "x-stainless-retry-count: 1" -d "$3"
}

# field NAME JSON: the first string of that name; for what may hold quotes, take jq.
field() {
  value=${2#*\"$1\":\"}
  printf %s "${value%%\"*}"
}

stop() {
  echo "$1: $2" >&2
  exit 255
}

session=$(post /rl/sessions "${SLUICE_TOKEN:-none}" "{\"request_id\": \"$(uname -n)-$$-$(date +%s)\", \"wait_s\": 30}") || case $session in
  *RUN_ENDED*) exit 255 ;;
  *) stop "no session at $gateway; is the run alive, and SLUICE_TOKEN right?" "$session" ;;
esac
id=$(field id "$session") key=$(field key "$session") settles=$(field settling_key "$session") text=$(field text "$session")

reply=$(post /v1/chat/completions "$key" "{\"model\": \"any\", \"messages\": [{\"role\": \"user\", \"content\": \"$text\"}]}") ||
  stop "$id has no reply" "$reply"

# The reward: the share of the letters that stand where the reversed text has them.
reward=$(said=$(field content "$reply") text=$text awk 'BEGIN {
  said = ENVIRON["said"]; text = ENVIRON["text"]; letters = length(text)
  for (at = 1; at <= letters; at++) right += substr(said, at, 1) == substr(text, letters + 1 - at, 1)
  print right / (length(said) > letters ? length(said) : letters) }')
ended=$(post "/rl/sessions/$id/end" "$settles" "{\"reward\": $reward}") || stop "$id has not ended" "$ended"
