#!/bin/sh
# Writes the stubs in sluicev1/ from the contracts: generate.sh [FOLDER OF THE CONTRACTS]
# It needs protoc, protoc-gen-go and protoc-gen-go-grpc on the path. PROTOC names another protoc.
set -eu
cd "$(dirname "$0")"
protos=${1:-../../../proto}
files=$(cd "$protos" && ls sluice/v1/*.proto)
options=
for file in $files; do # the contracts name no package of Go, so that each program can have its own
  options="$options --go_opt=M$file=sluice-agent/sluicev1 --go-grpc_opt=M$file=sluice-agent/sluicev1"
done
# shellcheck disable=SC2086 # words on purpose
${PROTOC:-protoc} -I "$protos" --go_out=. --go-grpc_out=. --go_opt=module=sluice-agent --go-grpc_opt=module=sluice-agent $options $files
