#!/bin/sh
# Makes what a run in containers needs and does not have yet: certificates, principals, a token for agents, and the model.
# Each service sees its own key alone. The authority, and what operators and agents need, stay in a volume that only this container has.
# Run it again (docker compose run --rm prepare) to renew what has passed two thirds of its life.
set -eu
umask 077
authority=/run/sluice/authority
days=365
exec 9>"$authority/.prepare"
flock 9 # one at a time
if [ ! -s "$authority/agent.token" ]; then # made last
  find "$authority" -mindepth 1 ! -name .prepare -delete
  sluice certs init --dir "$authority" --days "$days"
  sluice certs issue relay --dir "$authority" --days "$days" --uri spiffe://sluice/weightsync
  # The gateway asks for tokens, not for certificates.
  for role in admin viewer; do
    sluice token new "$role" --role "$role" --file "$authority/gateway.toml" --out "$authority/$role.token"
  done
  sluice token new agent --role agent --file "$authority/gateway.toml" --out "$authority/agent.token"
fi
if [ ! -s "$authority/prometheus.token" ]; then # a folder of an earlier release has none
  sluice token new prometheus --role viewer --file "$authority/principals.toml" --out "$authority/prometheus.token"
fi
sluice certs renew --dir "$authority"
# A service may start and read its files at any moment, and a key of another state than its certificate would end it for good. So a state has
# a folder of its own, and what services open are links through `.now`, which is replaced in one step.
point() { # a link that is replaced in one step
  ln -sfn "$1" "$2.part"
  mv -T "$2.part" "$2"
}
for secrets in /run/sluice/keys/*; do
  name=$(basename "$secrets")
  mountpoint -q "$secrets" || continue # a service that this run does not have
  before=$(readlink "$secrets/.now" || true)
  state=$(basename "$(mktemp -d "$secrets/.state-XXXXXX")")
  principals=principals.toml
  [ "$name" != gateway ] || principals=gateway.toml
  cp "$authority/ca.pem" "$secrets/$state/ca.pem"
  cp "$authority/$principals" "$secrets/$state/principals.toml"
  [ "$name" != agents ] || cp "$authority/agent.token" "$secrets/$state/agent.token"
  cp "$authority/$name.key" "$secrets/$state/tls.key"
  cp "$authority/$name.pem" "$secrets/$state/tls.pem"
  point "$state" "$secrets/.now"
  for path in "$secrets/$state"/*; do
    file=$(basename "$path")
    [ "$(readlink "$secrets/$file")" = ".now/$file" ] || point ".now/$file" "$secrets/$file"
  done
  # The state before stays for who is opening its files right now.
  find "$secrets" -mindepth 1 -maxdepth 1 -name '.state-*' ! -name "$state" ! -name "$before" -exec rm -r {} +
done
exec 9>&-
umask 022
[ "$PREPARE" = none ] || exec /bin/sh "$PREPARE" /run/sluice/model
