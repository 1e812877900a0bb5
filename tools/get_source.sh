#!/bin/sh
# get_source.sh PACKAGE VERSIONS [RELEASE]: downloads a source package of Debian or Ubuntu
# into the current folder, without root. VERSIONS is a basic regular expression. The newest
# version that it matches is taken, from this release of the system if it has one, else from
# RELEASE.
#
# apt fetches it from the mirrors that this machine uses already, and verifies it. It keeps
# its lists in a temporary folder, so the system's lists do not change.
set -eu

package=$1 versions=$2 other=${3-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Writes this machine's list of mirrors for source packages of release $1.
write_sources() {
  eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
  for file in "$list" "$parts"/*.list "$parts"/*.sources; do
    [ -f "$file" ] || continue
    case $file in
    *.list) sed -n 's/^[[:space:]]*deb[[:space:]]/deb-src /p' "$file" ;;
    *) sed 's/^Types:.*/Types: deb-src/' "$file" ;;
    esac | sed "s/\b$VERSION_CODENAME\b/$1/g" >"$work/sources/${file##*/}"
  done
}

mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/sources"
cat >"$work/apt.conf" <<END
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$work/sources";
Acquire::Languages "none";
APT::Sandbox::User "root";
END

. /etc/os-release
for release in "${VERSION_CODENAME:=$other}" $other; do
  write_sources "$release"
  APT_CONFIG=$work/apt.conf apt-get update || true # not every mirror has source packages
  version=$(APT_CONFIG=$work/apt.conf apt-cache showsrc "$package" |
    sed -n "s/^Version: \($versions\)\$/\1/p" | sort -V | tail -n 1)
  [ -z "$version" ] || break
done
if [ -z "$version" ]; then
  echo "get_source: no mirror of this machine has the source package $package $versions"
  exit 1
fi
APT_CONFIG=$work/apt.conf apt-get source --download-only "$package=$version"
