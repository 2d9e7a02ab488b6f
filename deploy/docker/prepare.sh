#!/bin/sh
# Makes what a run in containers needs and does not have yet: the tokens of the roles, and the model.
set -eu
umask 077
for role in agent admin dispatcher; do
  file=/run/sluice/secrets/$role.token
  if [ ! -s "$file" ]; then
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$file.part"
    mv "$file.part" "$file"
    echo "made $file"
  fi
done
umask 022
exec /bin/sh "$PREPARE" /run/sluice/model
