#!/bin/sh
# Unpacks packages of Debian, with those that they depend on, into a folder of their own: nothing is installed, and the system's own list of packages stays.
#   unpack_debian.sh FOLDER SUITE PATTERN PACKAGE...
# PATTERN is an extended regular expression: of what the packages depend on, only packages whose names match are unpacked.
set -eu
folder=$1 suite=$2 pattern=$3
shift 3
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial"
cd "$folder"
: >apt/status
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' | head -n 1)
test -n "$mirror" || mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >apt/sources.list
here=$(pwd)
get() {
  apt-get -qq -o Dir::Etc::sourcelist="$here/apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State="$here/apt" -o Dir::State::status="$here/apt/status" \
    -o Dir::Cache="$here/apt" -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}
get update
# What a package of the closure is called, and its version in the suite.
names=$(get install --no-install-recommends --print-uris "$@" | awk '{print $2}' | sed 's/_.*//' | grep -E "$pattern")
cd apt/archives
# shellcheck disable=SC2086 # words on purpose
get download $names >/dev/null
cd ../..
for package in apt/archives/*.deb; do dpkg -x "$package" .; done
rm -rf apt
