#!/bin/sh
# Makes what a run in containers needs and does not have yet: certificates, principals, a token for agents, and the model.
# Each service sees its own key alone. The authority, and what operators and agents need, stay in a volume that only this container has.
# Run it again (docker compose run --rm prepare) to renew what has passed two thirds of its life.
set -eu
umask 077
authority=/run/sluice/authority
days=365
if [ ! -s "$authority/agent.token" ]; then # made last
  find "$authority" -mindepth 1 -delete
  sluice certs init --dir "$authority" --days "$days"
  sluice certs issue relay --dir "$authority" --days "$days" --uri spiffe://sluice/weightsync
  # The gateway asks for tokens, not for certificates.
  for role in admin viewer; do
    sluice token new "$role" --role "$role" --file "$authority/gateway.toml" --out "$authority/$role.token"
  done
  sluice token new agent --role agent --file "$authority/gateway.toml" --out "$authority/agent.token"
fi
sluice certs renew --dir "$authority"
put() {
  cp "$1" "$2.part"
  mv "$2.part" "$2"
}
for secrets in /run/sluice/keys/*; do
  name=$(basename "$secrets")
  mountpoint -q "$secrets" || continue # a service that this run does not have
  put "$authority/ca.pem" "$secrets/ca.pem"
  case $name in
  gateway) put "$authority/gateway.toml" "$secrets/principals.toml" ;;
  *) put "$authority/principals.toml" "$secrets/principals.toml" ;;
  esac
  [ "$name" != agents ] || put "$authority/agent.token" "$secrets/agent.token"
  put "$authority/$name.key" "$secrets/tls.key"
  put "$authority/$name.pem" "$secrets/tls.pem"
done
umask 022
[ "$PREPARE" = none ] || exec /bin/sh "$PREPARE" /run/sluice/model
